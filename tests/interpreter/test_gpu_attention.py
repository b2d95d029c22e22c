"""The GPU's attention, in the interpreter, against softmax in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from paged_rows import paged_rows, plain_attention
from torch import Tensor

from localkv.kernels.gpu.attention import device_batch, segment_attention
from localkv.kernels.gpu.gpu_info import GpuInfo
from localkv.quant_formats import KV_FORMATS

GPU = GpuInfo(arch=90, n_processors=3, ptx=False)


def check(
    lengths: Sequence[tuple[int, int]],
    *,
    type_k: str = "f16",
    type_v: str = "f16",
    n_kv_heads: int = 1,
    group: int = 1,
    head_dim: int = 64,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    gpu: GpuInfo = GPU,
) -> None:
    rows = paged_rows(
        lengths,
        type_k=type_k,
        type_v=type_v,
        n_kv_heads=n_kv_heads,
        group=group,
        head_dim=head_dim,
    )
    scale = 1 / math.sqrt(head_dim)
    out, lse = segment_attention(
        gpu,
        rows.q,
        rows.segment,
        device_batch(rows.batch, rows.seg_batch),
        scale,
        softcap=softcap,
        window=window,
        sinks=sinks,
    )
    want, want_lse = plain_attention(rows, scale, softcap=softcap, window=window, sinks=sinks)
    # of fp16's relative error of 2 ** -11 in q, K, V and the weights
    assert float((out - want).abs().max()) < 4e-3
    assert float((out - want).norm() / want.norm()) < 1e-3
    assert float((lse - want_lse).abs().max()) < 4e-3


@pytest.mark.parametrize("type_k", KV_FORMATS)
@pytest.mark.parametrize("type_v", KV_FORMATS)
def test_decode_every_pair(type_k: str, type_v: str) -> None:
    check([(70, 1)], type_k=type_k, type_v=type_v)
