"""The GPU's attention over a sink, packed rows and a tail, in the interpreter."""

from __future__ import annotations

from functools import partial

import pytest

from localkv.cache.layout import Tail
from localkv.kernels.gpu.attention.packed_attention import segment_attention
from localkv.kernels.gpu.device import GpuInfo
from localkv.kernels.gpu.group_store import pack_groups_gpu, rotate_gpu
from localkv.kernels.reference.backend import store_kv
from localkv.kernels.reference.torch_arrays import TorchArrays
from support.tail_checks import Kernels, check

GPU = GpuInfo(arch=90, n_processors=3, ptx=False)
STEPS = [((270, 20), False), ((1, 1), True), ((2, 40), False), ((1, 3), True)]


@pytest.mark.parametrize(
    ("tail", "window"),
    [
        (Tail(4, 20), 0),
        (Tail(4, 20, 32), 0),
        pytest.param(Tail(70, 30), 90, marks=pytest.mark.slow),
    ],
)
def test_rows_are_read_as_they_are_defined(tail: Tail, window: int) -> None:
    run = partial(segment_attention, GPU)
    kernels = Kernels(TorchArrays(), run, store_kv, pack_groups_gpu, rotate_gpu, lambda x: x)
    type_k = "q4_1c" if tail.group > 1 else "q4_0"
    check(kernels, tail, type_k, steps=STEPS, errors=(1.5e-3, 1.5e-3), window=window, rotation=64)
