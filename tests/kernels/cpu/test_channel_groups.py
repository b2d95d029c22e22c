"""The CPU's kernels for types with scales by channel."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from localkv.arch.spec import AttentionParams
from localkv.kernels.cpu.attention.kernels import cache_decoder
from localkv.kernels.cpu.store import store_kv
from localkv.kernels.reference.backend import hadamard_transform
from localkv.kernels.reference.torch_arrays import encode
from localkv.quant_formats import FORMATS
from localkv.system.threads import n_threads, use_threads
from support.cpu_ops import cpu_attention, store_kv_cpu
from support.cpu_pages import pool_planes
from support.grouped_rows import GroupedRows, grouped_rows, plain_attention
from support.quick import quick
from support.torch_edge import with_tensors

NAMES = [fmt.name for fmt in FORMATS.values() if fmt.group_tokens > 1 and fmt.has_part("cpu")]
make = partial(grouped_rows, store=store_kv_cpu, pack=with_tensors(store_kv.store_groups_cpu))


@pytest.mark.parametrize(
    ("name", "rotation"),
    quick(
        [(name, 32 * (i % 2)) for i, name in enumerate(NAMES)],
        [("q8_0c", 0), ("q4_1c", 32), ("kv3_1c128", 0)],
    ),
)
def test_pages_hold_the_bytes_of_the_reference(name: str, rotation: int) -> None:
    """In another order, whatever the order of groups; also of types by token beside them."""
    n, turned = FORMATS[name].group_tokens, (rotation, rotation)
    check_bytes(make([256 + n, n, 512], type_k=name, type_v="q4_1", rotations=turned, size=2))
    other = "fp8_e4m3_token" if rotation else "q8_t"
    check_bytes(make([2 * n, 256], type_k=other, type_v=name, rotations=turned))


def test_types_of_short_and_of_long_groups() -> None:
    """The short ones are packed part by part."""
    check_bytes(make([384, 128], type_k="kv3_1c128", type_v="q8_0c"))
    check_bytes(make([128], type_k="q4_1c", type_v="q4_1c128", rotations=(32, 32)))


def check_bytes(rows: GroupedRows) -> None:
    packed = rows.packed
    for side, fmt, planes, xs, rotation in (
        ("k", packed.format_k, packed.k, rows.k, packed.rotation_k),
        ("v", packed.format_v, packed.v, rows.v, packed.rotation_v),
    ):
        restored = pool_planes(fmt, side, planes)
        for i, x in enumerate(xs):
            turned = hadamard_transform(x, rotation).transpose(0, 1).contiguous()
            pages = rows.seg_batch.page_table[i]
            for plane, want in zip(restored, encode(fmt, turned), strict=True):
                got = plane[pages].transpose(0, 1).flatten(1, 2)[:, : len(x)]
                assert torch.equal(got, want), (fmt.name, side)


def error(rows: GroupedRows, params: AttentionParams, *, generated: bool) -> tuple[float, float]:
    """The relative error of all results together, and the largest one of log-sum-exp."""
    batch = replace(rows.batch, generated=(generated,) * len(rows.seg_batch.lengths))
    out, lse = cpu_attention()(rows.q, rows.packed, rows.seg_batch, batch, params)
    want, want_lse = plain_attention(rows, params)
    seen = want_lse.isfinite()
    assert (lse[~seen] == -torch.inf).all()
    assert (out[~seen] == 0).all()
    return float((out - want).norm() / want.norm()), float((lse - want_lse)[seen].abs().max())


CASES = [
    ("q4_1c", "q4_1", 128, 4, 0),
    ("q4_1c", "q4_1c", 64, 8, 0),
    ("q8_0c", "q8_0c", 32, 7, 50),
    ("kv3_1c", "kv3_1c", 96, 1, 0),
    ("kv2_1c", "kv2_1c", 512, 5, 300),
    ("q8_0c", "fp8_e4m3", 256, 4, 0),
    ("f16", "q8_0c", 64, 8, 0),
    ("kv3_1c128", "kv2_0", 64, 3, 0),
    ("q4_1c128", "q4_1c128", 192, 8, 300),
    ("q8_0c", "kv3_1c128", 128, 1, 0),
]


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize(
    ("type_k", "type_v", "head_dim", "group", "window"),
    quick(CASES, [("q4_1c", "q4_1", 128, 4, 0), ("kv3_1c128", "kv2_0", 64, 3, 0)]),
)
def test_attention(
    type_k: str, type_v: str, head_dim: int, group: int, window: int, generated: bool
) -> None:
    """Any types beside each other, ragged sequences in permuted pages, windows."""
    n = max(FORMATS[name].group_tokens for name in (type_k, type_v))
    rows = make(
        [256 + n, n, 512 + n], type_k=type_k, type_v=type_v, head_dim=head_dim, group=group, n_new=2
    )
    params = AttentionParams(head_dim**-0.5, window)
    of_out, of_lse = error(rows, params, generated=generated)
    digits = generated and any(cache_decoder(name).digits for name in (type_k, type_v))
    assert of_out < (2**-10 if digits else 3e-6)
    assert of_lse < (2**-9 if digits else 2e-5)


def test_threads_and_company_change_no_bit() -> None:
    rows = make([800, 64], type_k="q4_1c", type_v="q8_0c", group=4)
    params, before, outs = AttentionParams(0.1), n_threads(), []
    for threads in (1, 2):
        use_threads(threads)
        try:
            args = rows.packed, rows.seg_batch, rows.batch, params
            outs.append(torch.cat(cpu_attention()(rows.q, *args)[:1]))
        finally:
            use_threads(before)
    assert torch.equal(*outs)
