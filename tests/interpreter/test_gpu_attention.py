"""The GPU's attention, in the interpreter, against softmax in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from localkv.arch.spec import AttentionParams
from localkv.cache.layout import SegmentSpec
from localkv.kernels.attention import attention
from localkv.kernels.gpu.attention import packed_attention
from localkv.kernels.gpu.attention.packed_attention import segment_attention
from localkv.kernels.gpu.device import GpuInfo
from localkv.kernels.gpu.group_store import rotate_gpu
from localkv.kernels.gpu.rope_store import QueryKeySteps, rope_store
from localkv.kernels.reference.backend import attention_reference, hadamard_transform
from localkv.quant_formats import TOKEN_FORMATS
from support.paged_rows import paged_rows, plain_attention, spoil_unseen_pages
from support.quick import quick
from support.torch_edge import torch_cache

NAMES = [fmt.name for fmt in TOKEN_FORMATS.values() if fmt.has_part("gpu") and not fmt.shared_codec]
GPU = GpuInfo(arch=90, n_processors=3, ptx=False)


def check(
    lengths: Sequence[tuple[int, int]],
    *,
    type_k: str = "f16",
    type_v: str = "f16",
    n_kv_heads: int = 1,
    group: int = 1,
    head_dim: int = 64,
    value_dim: int | None = None,
    softcap: float = 0.0,
    window: int = 0,
    chunk: int = 0,
    alibi: float = 0.0,
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
        value_dim=value_dim,
    )
    params = AttentionParams(1 / math.sqrt(head_dim), window, softcap, chunk, alibi)
    scale, sees = params.softmax_scale, {"window": window, "chunk": chunk}
    want, want_lse = plain_attention(rows, scale, softcap=softcap, sinks=sinks, alibi=alibi, **sees)
    spoil_unseen_pages(rows, params)
    out, lse = segment_attention(
        gpu, rows.q, rows.segment, rows.seg_batch, rows.batch, params, sinks=sinks
    )
    # q, K, V and the weights are rounded to fp16, with a relative error of 2 ** -11 = 5e-4 each
    assert float((out - want).norm() / want.norm()) < 1.5e-3
    assert float((out - want).abs().max()) < 1e-2
    assert float((lse - want_lse).abs().max()) < 1e-2


@pytest.mark.parametrize("head_dim", [64, 96])
def test_prompts_multiply_codes(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """K of e4m3 is an operand as it is; queries in two e4m3 are about as good as in fp16."""
    lengths, types = [(40, 70), (0, 90)], {"type_k": "fp8_e4m3", "type_v": "q8_0"}
    read = []
    part = packed_attention.attention_constants
    monkeypatch.setattr(packed_attention, "MULTIPLIES_CODES", True)
    monkeypatch.setattr(
        packed_attention,
        "attention_constants",
        lambda *a, **b: read.append(b["codes"]) or part(*a, **b),
    )
    check(lengths, group=2, head_dim=head_dim, **types)
    check(lengths, group=2, head_dim=head_dim, **types, gpu=replace(GPU, arch=86))
    assert read == [True, False]


def beside(name: str, step: int) -> tuple[str, str]:
    """A type and the one that many further on."""
    return name, NAMES[(NAMES.index(name) + step) % len(NAMES)]


STEPS = (0, 1, 4, 7, 11)
PAIRS = [beside(name, step) for step in STEPS for name in NAMES]
"""Every type five times on each side. The readers of both sides know nothing of each other."""
SOME = PAIRS[: 3 * len(NAMES)]


@pytest.mark.parametrize(("type_k", "type_v"), quick(PAIRS, PAIRS[: 2 * len(NAMES)], SOME))
def test_decode_pairs(type_k: str, type_v: str) -> None:
    check([(70, 1)], type_k=type_k, type_v=type_v)


@pytest.mark.parametrize("lengths", [[(300, 1)], [(70, 20), (0, 9)], [(12, 3), (520, 2)]])
@pytest.mark.parametrize("group", [2, 3])
def test_bias_by_distance(group: int, lengths: list[tuple[int, int]]) -> None:
    """Heads of a power of two, and others."""
    for alibi in (2.0, 8.0):
        check(lengths, n_kv_heads=2, group=group, type_k="q8_0", alibi=alibi)


HEAD_DIMS, GROUPS = (64, 80, 96, 128, 256), (1, 3, 4, 8)


@pytest.mark.parametrize(
    ("head_dim", "group"),
    quick(product(HEAD_DIMS, GROUPS), {*product(HEAD_DIMS, (4,)), *product((64,), GROUPS)}),
)
def test_decode_shapes(head_dim: int, group: int) -> None:
    type_k, type_v = ("f16", "bf16") if head_dim == 80 else ("q5_1", "q8_0")
    check([(300, 1)], head_dim=head_dim, group=group, n_kv_heads=2, type_k=type_k, type_v=type_v)


@pytest.mark.parametrize(
    ("head_dim", "group"),
    quick(product(HEAD_DIMS, (1, 4, 8)), {*product(HEAD_DIMS, (4,)), (64, 1), (64, 8)}),
)
def test_prefill_shapes(head_dim: int, group: int) -> None:
    type_k, type_v = ("bf16", "f16") if head_dim == 80 else ("q4_1", "q5_0")
    check([(70, 20)], head_dim=head_dim, group=group, n_kv_heads=2, type_k=type_k, type_v=type_v)


@pytest.mark.parametrize(("type_k", "type_v"), [("nuq4", "nuq3"), ("nuq2", "nuq4")])
def test_blocks_without_an_outlier(type_k: str, type_v: str) -> None:
    """An outlier belongs to two blocks: a third one, or an only one, has none."""
    for head_dim in (96, 32):
        check([(40, 1)], head_dim=head_dim, type_k=type_k, type_v=type_v)


@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [
        (192, 128),
        *(
            pytest.param(*dims, marks=pytest.mark.slow)
            for dims in ((64, 48), (112, 112), (512, 512), (80, 256))
        ),
    ],
)
@pytest.mark.parametrize("lengths", [[(300, 1), (0, 3)], [(70, 20)]], ids=["decode", "prefill"])
def test_heads_of_k_and_v(head_dim: int, value_dim: int, lengths: list[tuple[int, int]]) -> None:
    """Heads have different sizes, and are larger than a warp's registers hold."""
    type_k = "q8_0" if head_dim % 32 == 0 else "f16"
    type_v = "q4_0" if value_dim % 32 == 0 else "f16"
    sizes = {"head_dim": head_dim, "value_dim": value_dim, "group": 2, "n_kv_heads": 2}
    check(lengths, type_k=type_k, type_v=type_v, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "n_new"), [(8, 5), (8, 8)])
def test_many_wide_queries_are_a_prompts(group: int, n_new: int) -> None:
    check([(40, n_new)], head_dim=512, group=group)
    check([(40, 2)], head_dim=512, group=group, type_k="f32", type_v="f32")


@pytest.mark.parametrize("type_k", NAMES)
def test_prefill_every_type(type_k: str) -> None:
    """On either side, and more than a page of history."""
    type_v = NAMES[(NAMES.index(type_k) * 3 + 1) % len(NAMES)]
    check([(250, 30)], type_k=type_k, type_v=type_v, group=2)


@pytest.mark.parametrize(("type_k", "type_v"), quick(PAIRS, (), SOME))
def test_prefill_pairs(type_k: str, type_v: str) -> None:
    check([(30, 10)], type_k=type_k, type_v=type_v)


RAGGED = [
    [(0, 1)],
    [(0, 8)],
    [(255, 1), (256, 1), (511, 1)],
    [(700, 3), (0, 1), (63, 8), (64, 5)],
    [(0, 9)],
    [(0, 256), (250, 12)],
    [(700, 3), (0, 130), (63, 1)],
]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "window": {"window": 50},
    "narrow window": {"window": 1},
    "window of pages": {"window": 300, "softcap": 5.0},
    "chunk": {"chunk": 70},
    "chunk of pages": {"chunk": 280, "softcap": 5.0},
}


@pytest.mark.parametrize(
    ("variant", "lengths"),
    [
        pytest.param(variant, lengths, marks=() if few else pytest.mark.slow)
        for variant in VARIANTS
        for lengths in RAGGED
        for few in [variant == "window" or lengths in (RAGGED[3], RAGGED[4])]
    ],
    ids=str,
)
def test_ragged_batches(lengths: list[tuple[int, int]], variant: str) -> None:
    """Sequences of other lengths, in permuted pages; a few of them wholly outside a window."""
    check(lengths, type_k="q8_0", type_v="q4_0", group=2, n_kv_heads=2, **VARIANTS[variant])


@pytest.mark.parametrize("lengths", [[(300, 1), (0, 3)], [(40, 20), (0, 1)]], ids=str)
def test_sinks(lengths: list[tuple[int, int]]) -> None:
    check(lengths, group=2, n_kv_heads=2, sinks=torch.tensor([1.0, -50.0, 4.0, 30.0]))
    check(lengths, group=2, sinks=torch.tensor([3.0, 0.0]), window=20, softcap=3.0)


@pytest.mark.parametrize("n_new", [1, 12])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("f32", "f16", "bf16")])
def test_what_fp16_cannot_hold_saturates(name: str, n_new: int) -> None:
    """A scale can be 65504, and times a code more; queries may be large, too."""
    rows = paged_rows([(40, n_new)], type_k=name, type_v=name, head_dim=96, size=1e7)
    out, lse = segment_attention(
        GPU, 1e5 * rows.q, rows.segment, rows.seg_batch, rows.batch, AttentionParams(0.125)
    )
    assert bool(lse.isfinite().all())
    largest = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}.get(name, 65504.0)
    assert bool((out.abs() <= largest).all())
    assert bool((out.abs().amax(-1) > 0.4 * largest).all())


@pytest.mark.parametrize("n_processors", [1, 16, 200])
def test_any_number_of_splits(n_processors: int) -> None:
    """More than there are tiles, too: those without keys say so."""
    gpu = GpuInfo(arch=90, n_processors=n_processors, ptx=False)
    check([(600, 2), (0, 1)], type_k="q4_0", type_v="q4_1", gpu=gpu)


def test_rows_that_see_nothing_of_a_segment() -> None:
    """The tokens before a segment: 0, and a log-sum-exp of -inf."""
    for n_new in (2, 12):
        rows = paged_rows([(40, n_new)], group=2)
        params = AttentionParams(0.125)
        late = replace(rows.seg_batch, first_position=41)
        out, lse = segment_attention(GPU, rows.q, rows.segment, late, rows.batch, params)
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert bool((lse[0] == -torch.inf).all())
        assert bool(lse[1:].isfinite().all())
        moved = replace(rows, seg_batch=late)
        want, _ = plain_attention(moved, 0.125)
        assert float((out - want).abs().max()) < 4e-3


@pytest.mark.parametrize("n_new", [1, 9])
@pytest.mark.parametrize("name", ["fp8_e5m2", "q4_0"])
def test_pages_beyond_two_gibibytes(name: str, n_new: int) -> None:
    """Offsets of more than 31 bits: a page and its copy, the last of a pool whose other memory is
    never touched, and so never taken."""
    rows = paged_rows([(40, n_new)], type_k=name, type_v=name)
    largest_plane = max(plane[0].numel() for plane in rows.segment.k)
    n_pages = 2**31 // largest_plane + 2

    def far(plane: Tensor) -> Tensor:
        planes = torch.empty(n_pages, *plane.shape[1:], dtype=plane.dtype)
        planes[-1] = plane[int(rows.seg_batch.page_table[0, 0])]
        return planes

    segment = replace(
        rows.segment, k=tuple(map(far, rows.segment.k)), v=tuple(map(far, rows.segment.v))
    )
    table = torch.full_like(rows.seg_batch.page_table, n_pages - 1)
    params = AttentionParams(0.125)
    near = segment_attention(GPU, rows.q, rows.segment, rows.seg_batch, rows.batch, params)
    seg_batch = replace(rows.seg_batch, page_table=table)
    there = segment_attention(GPU, rows.q, segment, seg_batch, rows.batch, params)
    assert all(torch.equal(a, b) for a, b in zip(near, there, strict=True))


@pytest.mark.parametrize(("head_dim", "block"), [(64, 64), (96, 32), (192, 64), (128, 128)])
def test_rotation(head_dim: int, block: int) -> None:
    x = torch.randn(5, 3, head_dim, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rotate_gpu(x, block), hadamard_transform(x, block))
    assert rotate_gpu(x, 0) is x


@pytest.mark.parametrize("rotations", [(64, 64), (0, 64)])
def test_through_the_cache(rotations: tuple[int, int]) -> None:
    """Several segments, rotated and merged, as a backend calls it; stored by its own kernel."""
    cache = torch_cache(
        n_layers=1,
        n_kv_heads=1,
        head_dim=64,
        segments=[SegmentSpec("f16", "f16", 0), SegmentSpec("q8_0", "q5_1", 30, *rotations)],
        n_ctx=400,
    )
    generator = torch.Generator().manual_seed(0)
    sequence, ours = cache.new_sequence(), partial(segment_attention, GPU)
    for n_new in (100, 1, 1, 20):
        q, k, v = (torch.randn(n_new, n, 64, generator=generator) for n in (2, 1, 1))
        batch = cache.batch([(sequence, [0] * n_new)])
        rope_store(q, k, v, QueryKeySteps(), cache.layers[0], batch.segments)
        sequence.length += n_new
        params = AttentionParams(0.125)
        got = attention(ours, q, cache.layers[0], batch, params, rotate=rotate_gpu)
        want = attention(
            attention_reference,
            q.double(),
            cache.layers[0],
            batch,
            params,
            rotate=hadamard_transform,
        )
        assert float((got - want).norm() / want.norm()) < 1e-3
