"""Attention over latents that reads the first and the newest rows as f16, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from localkv.cache.layout import Tail
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.cpu.attention.latent_attention import LatentAttention
from localkv.kernels.cpu.store.store_kv import rotate_cpu, store_groups_cpu, store_kv_cpu
from localkv.kernels.reference.backend import (
    hadamard_transform,
    latents_reference,
    pack_groups,
    store_kv,
)
from localkv.kernels.reference.torch_arrays import TorchArrays
from support.latent_tails import LatentKernels, check_latents

BACKENDS: dict[str, Callable[[], LatentKernels]] = {
    "reference": lambda: LatentKernels(
        TorchArrays(), latents_reference, store_kv, pack_groups, hadamard_transform, lambda x: x
    ),
    "cpu": lambda: LatentKernels(
        NumpyArrays(),
        LatentAttention(),
        store_kv_cpu,
        store_groups_cpu,
        rotate_cpu,
        lambda x: x.contiguous().numpy(),
    ),
}
STEPS = [((1, 280), False), ((3, 3), True), ((300, 40), False), ((20, 1), True), ((1, 2), True)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("tail", "type_k", "type_v"),
    [
        (Tail(4, 64, 32), "q4_1c", "f16"),
        (Tail(4, 20), "q4_0", "q8_0"),
        pytest.param(Tail(0, 0, 32), "kv2_1c", "q8_0c", marks=pytest.mark.slow),
        pytest.param(Tail(300, 300), "kv2_1", "f16", marks=pytest.mark.slow),
    ],
)
def test_rows_are_read_as_they_are_defined(
    backend: str, tail: Tail, type_k: str, type_v: str
) -> None:
    assert check_latents(BACKENDS[backend](), tail, type_k, type_v, STEPS) < 5e-5
