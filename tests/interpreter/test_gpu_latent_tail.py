"""The GPU's attention over latents with a sink and a tail, in the interpreter."""

from __future__ import annotations

from functools import partial

import pytest

from localkv.cache.layout import Tail
from localkv.kernels.gpu.attention.latents import segment_latents
from localkv.kernels.gpu.device import GpuInfo
from localkv.kernels.gpu.group_store import pack_groups_gpu, rotate_gpu
from localkv.kernels.reference.backend import store_kv
from localkv.kernels.reference.torch_arrays import TorchArrays
from support.latent_tails import LatentKernels, check_latents

GPU = GpuInfo(arch=90, n_processors=3, ptx=False)
STEPS = [((270, 20), False), ((1, 1), True), ((2, 40), False), ((1, 3), True)]


@pytest.mark.parametrize(
    ("tail", "type_k"),
    [(Tail(4, 20, 32), "q4_1c"), pytest.param(Tail(70, 30), "q4_0", marks=pytest.mark.slow)],
)
def test_rows_are_read_as_they_are_defined(tail: Tail, type_k: str) -> None:
    run = partial(segment_latents, GPU)
    kernels = LatentKernels(TorchArrays(), run, store_kv, pack_groups_gpu, rotate_gpu, lambda x: x)
    assert check_latents(kernels, tail, type_k, "f16", STEPS) < 1.5e-3
