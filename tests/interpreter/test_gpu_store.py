"""What the GPU's kernels write into pages, in the interpreter, against the formats' encoders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from localkv.arch.spec import CacheGroup, NormSpec
from localkv.cache.arrays import LayerCache
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import PAGE_TOKENS, GroupLayout, SegmentSpec
from localkv.kernels.attention_mixers import norm_heads
from localkv.kernels.gpu.grouped_attention import gated
from localkv.kernels.gpu.rope_store import QueryKeySteps, rope_store, turn_queries
from localkv.kernels.layer_weights import Norm
from localkv.kernels.reference.backend import apply_rope, hadamard_transform, norm
from localkv.kernels.reference.torch_arrays import TorchArrays, decode, encode
from localkv.kernels.rope import RopeTable
from localkv.quant_formats import TOKEN_FORMATS, QuantFormat
from localkv.quant_formats.shared.codebooks import CodebookCodec, table_of
from support.gpu_store import store_kv_gpu
from support.layers import rms
from support.paged_rows import poisoned_cache
from support.torch_edge import torch_cache

by_format = pytest.mark.parametrize(
    "fmt",
    [f for f in TOKEN_FORMATS.values() if f.has_part("gpu") and not f.shared_codec],
    ids=lambda fmt: fmt.name,
)


def stored(planes: tuple[Tensor, ...], slots: Tensor) -> list[Tensor]:
    """The bytes at `slots`: [tokens, heads, blocks, plane bytes] of each plane."""
    return [plane[slots // PAGE_TOKENS, :, slots % PAGE_TOKENS] for plane in planes]


VALUES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def numbers(fmt: QuantFormat, plane: Tensor) -> Tensor:
    """A plane as the floats that it holds (f32, f16, bf16, scales and minima), or as bytes."""
    halves = torch.float16 if plane.shape[-1] == 2 else torch.uint8
    return plane.contiguous().view(VALUES.get(fmt.name, halves))


def assert_encoded(fmt: QuantFormat, got: list[Tensor], x: Tensor) -> None:
    """Byte for byte what `encode` makes of x, save for the bits of a NaN and a minimum's -0."""
    for i, (ours, want) in enumerate(zip(got, encode(fmt, x), strict=True)):
        assert ours.shape == want.shape
        ours, want = numbers(fmt, ours), numbers(fmt, want)
        if want.dtype == torch.uint8:
            if fmt.name.startswith("fp8"):
                ours, want = (
                    plane.masked_fill((plane & 0x7F) == 0x7F, 0x7F) for plane in (ours, want)
                )
        else:
            assert torch.equal(ours.isnan(), want.isnan())
            ours, want = (plane.masked_fill(plane.isnan(), 0) for plane in (ours, want))
            if i == 1:
                ours, want = ours + 0, want + 0
            ours, want = ours.view(torch.uint8), want.view(torch.uint8)
        assert torch.equal(ours, want), f"plane {i}"


def store_all(fmt: QuantFormat, x: Tensor) -> list[Tensor]:
    """x [tokens, heads, head_dim] through the kernel."""
    cache = poisoned_cache(
        type_k=fmt.name,
        type_v=fmt.name,
        n_kv_heads=x.shape[1],
        head_dim=x.shape[2],
        n_ctx=x.shape[0],
    )
    batch = cache.batch([(cache.new_sequence(), [0] * x.shape[0])])
    store_kv_gpu(x, x, cache.layers[0], batch.segments)
    segment, slots = cache.layers[0].segments[0], batch.segments[0].slots
    got = stored(segment.k, slots)
    for plane, other in zip(got, stored(segment.v, slots), strict=True):
        assert torch.equal(plane, other)
    return got


@by_format
def test_random_rows(fmt: QuantFormat) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 2, 96, generator=generator)
    x *= torch.exp2(torch.randint(-20, 20, (40, 2, 1), generator=generator).float())
    assert_encoded(fmt, store_all(fmt, x), x)


def odd_rows() -> Tensor:
    """[rows, 1, 64]: zeros, ties, denormals, the huge, infinities and NaN."""
    generator = torch.Generator().manual_seed(2)
    rows = [
        torch.zeros(64),
        -torch.zeros(64),
        torch.arange(-32, 32).float(),
        torch.arange(-32, 32).float().flip(0),
        (torch.arange(64) - 127) / 2,
        torch.tensor([4.0, -4.0] * 32),
        torch.tensor([-4.0, 4.0] * 32),
        torch.randint(-127, 128, (64,), generator=generator).float() / 2,
        torch.tensor([127.0, 0.5 - 2**-25, 0.5, -0.5, 1.5, 2.5, 126.5, 3.0] * 8),
        torch.full((64,), 3.0),
        torch.full((64,), -3.0),
    ]
    for scale in (1e-45, 1e-40, 1e-38, 1e-30, 1e-15, 1e-8, 1e-5, 60000.0, 1e6, 1e20, 3e38):
        rows.append((torch.rand(64, generator=generator) * 2 - 1) * scale)
    for odd in (torch.inf, -torch.inf, torch.nan):
        for position in (0, 5, 31):
            row = torch.randn(64, generator=generator)
            row[position] = odd
            rows.append(row)
    both = torch.randn(64, generator=generator)
    both[3], both[7], both[9] = torch.inf, -torch.inf, torch.nan
    both[40], both[50] = -torch.inf, torch.inf
    return torch.stack([*rows, both])[:, None]


@by_format
def test_odd_rows(fmt: QuantFormat) -> None:
    x = odd_rows()
    assert_encoded(fmt, store_all(fmt, x), x)


def test_codes_of_a_measured_codebook() -> None:
    book = (-101, -7, 40, 127)
    table = torch.from_numpy(table_of(book))
    cache = poisoned_cache(type_k="nuq2", type_v="nuq2", n_kv_heads=2, head_dim=64, n_ctx=40)
    batch = cache.batch([(cache.new_sequence(), [0] * 40)])
    segment = replace(cache.layers[0].segments[0], codebook_k=table, codebook_v=table)
    x = torch.randn(40, 2, 64, generator=torch.Generator().manual_seed(1))
    store_kv_gpu(x, x, LayerCache((segment,)), batch.segments)
    got = stored(segment.v, batch.segments[0].slots)
    codec = CodebookCodec(TOKEN_FORMATS["nuq2"], book)
    for ours, want in zip(got, codec.encode(x.numpy()), strict=True):
        assert torch.equal(ours, torch.from_numpy(want))


@pytest.mark.slow
@by_format
def test_many_rows(fmt: QuantFormat) -> None:
    """Codes and scales near every boundary turn up in that many."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(120, 4, 128, generator=generator)
    x[::3] = (x[::3] * 8).round() / 2
    x[1::3] *= torch.exp2(torch.randint(-40, 17, (40, 4, 1), generator=generator).float())
    assert_encoded(fmt, store_all(fmt, x), x)


def turned(x: Tensor, by: Norm | None, steps: QueryKeySteps) -> Tensor:
    """What the reference makes of a projection."""
    if by is not None:
        x = norm(x, by)
    return x if steps.rope is None else apply_rope(x, steps.rope)


@pytest.mark.parametrize("n_tokens", [3, 37])
@pytest.mark.parametrize(
    ("head_dim", "rope_dims", "interleaved", "normed", "scaled"),
    [
        (64, 64, True, False, False),
        (96, 96, False, False, True),
        (128, 32, False, True, False),
        (64, 16, True, True, True),
        (80, 0, False, True, False),
    ],
)
def test_everything_before_the_store(
    head_dim: int, rope_dims: int, interleaved: bool, normed: bool, scaled: bool, n_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(head_dim + n_tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = (random(n_tokens, n_heads, head_dim) for n_heads in (4, 2, 2))
    angles = random(n_tokens, rope_dims // 2) * 100
    steps = QueryKeySteps(
        q_norm=rms(random(head_dim), 1e-6) if normed else None,
        k_norm=rms(random(head_dim), 1e-6) if normed else None,
        rope=RopeTable(angles.cos(), angles.sin(), interleaved) if rope_dims else None,
        q_scale=random(n_tokens) if scaled else None,
    )
    cache = poisoned_cache(
        type_k="f32", type_v="f32", n_kv_heads=2, head_dim=head_dim, n_ctx=n_tokens
    )
    batch = cache.batch([(cache.new_sequence(), [0] * n_tokens)])
    got_q = rope_store(q, k, v, steps, cache.layers[0], batch.segments)
    want_q, want_k = turned(q, steps.q_norm, steps), turned(k, steps.k_norm, steps)
    if steps.q_scale is not None:
        want_q = want_q * steps.q_scale[:, None, None]
    segment, slots = cache.layers[0].segments[0], batch.segments[0].slots
    got_k, got_v = (
        decode(TOKEN_FORMATS["f32"], stored(planes, slots)) for planes in (segment.k, segment.v)
    )
    assert torch.equal(got_v, v)
    if normed:  # whose sum is made in another order
        torch.testing.assert_close(got_q, want_q, rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(got_k, want_k, rtol=2e-6, atol=1e-6)
    else:
        assert torch.equal(got_q, want_q)
        assert torch.equal(got_k, want_k)


@dataclass(frozen=True)
class Kind:
    """What a layer does with q, k and v; `span` and `kind` are of their norms."""

    n_heads: int = 4
    key_dim: int = 64
    value_dim: int = 64
    kind: Literal["rms", "layer"] = "rms"
    span: Literal["head", "heads", "row"] = "head"
    after_rope: bool = False
    normed: bool = True
    v_normed: bool = False
    gated: bool = False
    biased: bool = False


KINDS = {
    "after": Kind(after_rope=True),
    "layer of each head": Kind(kind="layer", span="heads"),
    "layer": Kind(kind="layer", key_dim=80),
    "layer with biases": Kind(kind="layer", biased=True),
    "after, of each head": Kind(kind="layer", span="heads", after_rope=True, key_dim=96),
    "row": Kind(span="row"),
    "row of a gated": Kind(span="row", gated=True),
    "v": Kind(v_normed=True),
    "v alone": Kind(normed=False, v_normed=True, value_dim=80),
    "gated": Kind(gated=True),
    "one gated head": Kind(gated=True, n_heads=2),
    "192/128": Kind(key_dim=192, value_dim=128, normed=False),
    "512": Kind(key_dim=512, value_dim=512, v_normed=True),
}


def norm_of(kind: Kind, n_heads: int, generator: torch.Generator) -> Norm:
    shape: tuple[int, ...] = (kind.key_dim,)
    if kind.span != "head":
        shape = (n_heads, kind.key_dim)
    weight = 1 + torch.randn(*shape, generator=generator)
    if kind.span == "row":
        weight = weight.flatten()
    bias = torch.randn(kind.key_dim, generator=generator) if kind.biased else None
    return Norm(NormSpec("norm", kind.kind, 1e-3, kind.span), weight, bias)


@pytest.mark.parametrize("n_tokens", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_kinds_of_attention(kind: Kind, n_tokens: int) -> None:
    """Norms of all sorts, heads of q that a gate follows, K and V of other sizes; q alone, too."""
    generator = torch.Generator().manual_seed(n_tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    both = random(n_tokens, kind.n_heads, 2 if kind.gated else 1, kind.key_dim)
    q, k, v = both[:, :, 0], random(n_tokens, 2, kind.key_dim), random(n_tokens, 2, kind.value_dim)
    angles = random(n_tokens, 16) * 100
    steps = QueryKeySteps(
        norm_of(kind, kind.n_heads, generator) if kind.normed else None,
        norm_of(kind, 2, generator) if kind.normed else None,
        RopeTable(angles.cos(), angles.sin(), interleaved=False),
        random(n_tokens),
        kind.after_rope,
        rms(1 + random(kind.value_dim), 1e-3) if kind.v_normed else None,
    )
    group = CacheGroup(2, kind.key_dim, kind.value_dim, 0, (0,))
    layout = GroupLayout(group, (SegmentSpec("f32", "f32"),))
    cache = KVCache([layout], arrays=TorchArrays("cpu"), n_ctx=n_tokens)
    batch = cache.batch([(cache.new_sequence(), [0] * n_tokens)])
    got_q = rope_store(q, k, v, steps, cache.layers[0], batch.segments)
    assert torch.equal(turn_queries(q, steps), got_q)
    segment, slots = cache.layers[0].segments[0], batch.segments[0].slots
    got_k, got_v = (
        decode(TOKEN_FORMATS["f32"], stored(planes, slots)) for planes in (segment.k, segment.v)
    )

    def wanted(x: Tensor, by: Norm | None) -> Tensor:
        assert steps.rope is not None
        if by is None:
            return apply_rope(x, steps.rope)
        if kind.after_rope:
            return norm_heads(norm, apply_rope(x, steps.rope), by)
        return apply_rope(norm_heads(norm, x, by), steps.rope)

    assert steps.q_scale is not None
    want_q = wanted(q, steps.q_norm) * steps.q_scale[:, None, None]
    torch.testing.assert_close(got_q, want_q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_k, wanted(k, steps.k_norm), rtol=1e-5, atol=1e-5)
    want_v = v if steps.v_norm is None else norm(v, steps.v_norm)
    torch.testing.assert_close(got_v, want_v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_heads", [1, 5])
def test_gate(n_heads: int) -> None:
    """Values lie between the values of q."""
    x, both = torch.randn(3, n_heads, 80), torch.randn(3, n_heads, 2, 80)
    got = gated(x, both[:, :, 1])
    torch.testing.assert_close(got, x * both[:, :, 1].sigmoid(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["q4_0", "fp8_e4m3_token"])
def test_slots_beyond_two_gibibytes(name: str) -> None:
    """In the last page of a pool whose other memory is never touched, and so never taken."""
    x = torch.randn(3, 2, 128, generator=torch.Generator().manual_seed(6))
    cache = poisoned_cache(type_k=name, type_v=name, n_kv_heads=2, head_dim=128, n_ctx=3)
    batch = cache.batch([(cache.new_sequence(), [0] * 3)])
    layer, part = cache.layers[0], batch.segments[0]
    segment = layer.segments[0]
    n_pages = 2**31 // max(plane[0].numel() for plane in segment.k) + 2

    def far(planes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.empty(n_pages, *p.shape[1:], dtype=p.dtype) for p in planes)

    segment = replace(segment, k=far(segment.k), v=far(segment.v))
    slots = (n_pages - 1) * PAGE_TOKENS + torch.tensor([7, 0, PAGE_TOKENS - 1])
    store_kv_gpu(x, x, replace(layer, segments=(segment,)), (replace(part, slots=slots),))
    assert_encoded(segment.format_k, stored(segment.k, slots), x)
    assert_encoded(segment.format_v, stored(segment.v, slots), x)


@pytest.mark.parametrize(("type_k", "type_v"), [("q8_0", "q4_0"), ("q4_1", "iq4_nl")])
def test_segments_and_rotations(type_k: str, type_v: str) -> None:
    """Each row in its segment's types, rotated as it says, with the bytes of the reference."""
    cache = torch_cache(
        n_layers=1,
        n_kv_heads=2,
        head_dim=128,
        segments=[
            SegmentSpec("f16", "f32", 0),
            SegmentSpec(type_k, type_v, 20, rotation_k=128, rotation_v=64),
        ],
        n_ctx=300,
    )
    generator = torch.Generator().manual_seed(5)
    sequence = cache.new_sequence()
    for n_tokens in (30, 1):
        q, k, v = (torch.randn(n_tokens, 2, 128, generator=generator) for _ in range(3))
        angles = torch.randn(n_tokens, 64, generator=generator)
        rope = RopeTable(angles.cos(), angles.sin(), interleaved=False)
        batch = cache.batch([(sequence, [0] * n_tokens)])
        rope_store(q, k, v, QueryKeySteps(rope=rope), cache.layers[0], batch.segments)
        sequence.length += n_tokens
        k = apply_rope(k, rope)
        for segment, part in zip(cache.layers[0].segments, batch.segments, strict=True):
            for fmt, planes, rotation, x in (
                (segment.format_k, segment.k, segment.rotation_k, k),
                (segment.format_v, segment.v, segment.rotation_v, v),
            ):
                want = hadamard_transform(x[part.tokens], rotation)
                assert_encoded(fmt, stored(planes, part.slots), want)
