"""Types with scales by channel on a GPU, in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from localkv.arch.spec import AttentionParams
from localkv.kernels.gpu.attention.packed_attention import segment_attention
from localkv.kernels.gpu.device import GpuInfo
from localkv.kernels.gpu.group_store import pack_groups_gpu
from localkv.kernels.reference.backend import hadamard_transform
from localkv.kernels.reference.torch_arrays import encode
from localkv.quant_formats import FORMATS
from support.gpu_store import store_kv_gpu
from support.grouped_rows import grouped_rows, plain_attention
from support.quick import quick

NAMES = [fmt.name for fmt in FORMATS.values() if fmt.group_tokens > 1]
GPU = GpuInfo(arch=90, n_processors=3, ptx=False)
make = partial(grouped_rows, store=store_kv_gpu, pack=pack_groups_gpu)


@pytest.mark.parametrize(
    ("name", "rotation"),
    quick(
        [(name, 32 * (i % 2)) for i, name in enumerate(NAMES)], [("q4_1c", 32), ("kv3_1c128", 0)]
    ),
)
def test_pages_hold_the_bytes_of_the_reference(name: str, rotation: int) -> None:
    fmt, rotations = FORMATS[name], (rotation, rotation)
    n, head_dim = fmt.group_tokens, 3 * fmt.block_size
    rows = make([2 * n, n], type_k=name, type_v="q4_1", rotations=rotations, head_dim=head_dim)
    packed = rows.packed
    for fmt, planes, xs in (
        (packed.format_k, packed.k, rows.k),
        (packed.format_v, packed.v, rows.v),
    ):
        for i, x in enumerate(xs):
            turned = hadamard_transform(x, rotation).transpose(0, 1).contiguous()
            for plane, want in zip(planes, encode(fmt, turned), strict=True):
                got = plane[rows.seg_batch.page_table[i]].transpose(0, 1).flatten(1, 2)
                assert torch.equal(got[:, : len(x)], want), fmt.name


CASES = [
    ("q4_1c", "q4_0", 64, 4, 0, 1),
    ("kv3_1c", "kv3_1c", 96, 2, 50, 40),
    ("kv2_1c", "kv2_1c", 128, 2, 0, 1),
    ("q8_0c", "q8_0c", 96, 1, 0, 2),
    ("f16", "q4_1c", 512, 1, 0, 1),
    ("q8_0c", "f32", 256, 1, 0, 1),
    ("kv3_1c128", "kv2_0", 64, 3, 0, 1),
    ("q4_1c128", "q8_0c", 128, 2, 50, 40),
    ("q8_0c", "kv3_1c128", 64, 1, 0, 1),
]


@pytest.mark.parametrize(
    ("type_k", "type_v", "head_dim", "group", "window", "n_new"),
    quick(
        CASES,
        [
            ("q4_1c", "q4_0", 64, 4, 0, 1),
            ("kv3_1c", "kv3_1c", 96, 2, 50, 40),
            ("kv3_1c128", "kv2_0", 64, 3, 0, 1),
        ],
    ),
)
def test_attention(
    type_k: str, type_v: str, head_dim: int, group: int, window: int, n_new: int
) -> None:
    """Few and many new tokens; pages behind the last group are full of NaN."""
    n = max(FORMATS[name].group_tokens for name in (type_k, type_v))
    rows = make(
        [256 + n, n], type_k=type_k, type_v=type_v, head_dim=head_dim, group=group, n_new=n_new,
        n_kv_heads=1,
    )  # fmt: skip
    params = AttentionParams(head_dim**-0.5, window)
    want, want_lse = plain_attention(rows, params)
    for generated in (False, True):
        batch = replace(rows.batch, generated=(generated,) * 2)
        out, lse = segment_attention(GPU, rows.q, rows.packed, rows.seg_batch, batch, params)
        seen = want_lse.isfinite()
        assert float((out - want).norm() / want.norm()) < 2e-3
        assert float((lse - want_lse)[seen].abs().max()) < 2e-2
        assert (lse[~seen] == -torch.inf).all()
