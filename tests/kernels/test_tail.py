"""Attention that reads the first and the newest rows as f16, against its definition in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from localkv.cache.layout import Tail
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.cpu.attention.packed_attention import PackedAttention
from localkv.kernels.cpu.store.store_kv import rotate_cpu, store_groups_cpu, store_kv_cpu
from localkv.kernels.reference.backend import (
    attention_reference,
    hadamard_transform,
    pack_groups,
    store_kv,
)
from localkv.kernels.reference.torch_arrays import TorchArrays
from support.tail_checks import Kernels, check

BACKENDS: dict[str, Callable[[], Kernels]] = {
    "reference": lambda: Kernels(
        TorchArrays(), attention_reference, store_kv, pack_groups, hadamard_transform, lambda x: x
    ),
    "cpu": lambda: Kernels(
        NumpyArrays(),
        PackedAttention(),
        store_kv_cpu,
        store_groups_cpu,
        rotate_cpu,
        lambda x: x.contiguous().numpy(),
    ),
}
STEPS = [((1, 280), False), ((3, 3), True), ((300, 40), False), ((20, 1), True), ((1, 2), True)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("tail", "window", "type_k", "rotation"),
    [
        (Tail(4, 64), 0, "q4_0", 64),
        pytest.param(Tail(0, 20), 100, "q4_0", 0, marks=pytest.mark.slow),
        pytest.param(Tail(70, 1), 0, "q8_0", 0, marks=pytest.mark.slow),
        pytest.param(Tail(300, 300), 0, "q4_0", 0, marks=pytest.mark.slow),
        (Tail(4, 64, 32), 0, "q4_1c", 0),
        pytest.param(Tail(0, 0, 32), 100, "q8_0c", 64, marks=pytest.mark.slow),
    ],
)
def test_rows_are_read_as_they_are_defined(
    backend: str, tail: Tail, window: int, type_k: str, rotation: int
) -> None:
    kernels = BACKENDS[backend]()
    errors = 2e-6, 5e-4
    check(kernels, tail, type_k, steps=STEPS, errors=errors, window=window, rotation=rotation)
