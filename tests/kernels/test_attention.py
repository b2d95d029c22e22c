"""Attention over the paged cache against softmax as it is written in the books."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.arch.spec import AttentionParams
from localkv.cache.layout import SegmentSpec
from localkv.config import KVScales
from localkv.kernels.attention import attention, store_rotated
from localkv.kernels.reference.backend import attention_reference, hadamard_transform, store_kv
from support.attention_checks import check, check_rows_without_keys, check_windows, plain
from support.cache_types import NAMES, PAIRS
from support.torch_edge import torch_cache

run_plainly = partial(attention, attention_reference, rotate=hadamard_transform)


@pytest.mark.parametrize("group", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_shapes(head_dim: int, group: int) -> None:
    check(
        attention_reference, head_dim=head_dim, n_kv_heads=2, group=group, lengths=[(9, 1), (0, 7)]
    )


@pytest.mark.parametrize(("type_k", "type_v"), PAIRS)
def test_every_type(type_k: str, type_v: str) -> None:
    check(
        attention_reference,
        head_dim=64,
        n_kv_heads=2,
        group=2,
        lengths=[(300, 3)],
        type_k=type_k,
        type_v=type_v,
    )


@pytest.mark.parametrize("type_k", NAMES)
def test_rotated(type_k: str) -> None:
    for rotations in ((128, 64), (128, 0), (0, 64)):
        check(
            attention_reference,
            head_dim=128,
            n_kv_heads=2,
            group=2,
            lengths=[(280, 3), (0, 2)],
            type_k=type_k,
            type_v="q5_1",
            bounds=(0, 100),
            rotations=rotations,
        )


def test_segments_that_are_not_rotated_alike() -> None:
    """Queries turn for each segment, and its output turns back before segments are merged."""
    head_dim = 64
    specs = [
        SegmentSpec("f32", "f32", 0),
        SegmentSpec("f32", "f32", 10, 64, 64),
        SegmentSpec("f32", "f32", 300, 32, 0),
        SegmentSpec("f32", "f32", 310, 0, 64),
    ]
    cache = torch_cache(n_layers=1, n_kv_heads=1, head_dim=head_dim, segments=specs, n_ctx=400)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(330, 1, head_dim, generator=generator) for _ in range(3))
    batch = cache.batch([(cache.new_sequence(), [0] * 330)])
    store_rotated(store_kv, hadamard_transform, k, v, cache.layers[0], batch.segments)
    got = attention(
        attention_reference,
        3 * q,
        cache.layers[0],
        batch,
        AttentionParams(0.125),
        rotate=hadamard_transform,
    )
    want = plain(*(x[:, 0].double() for x in (3 * q, k, v)), 0, AttentionParams(0.125))
    assert float((got[:, 0] - want).abs().max()) < 1e-5


@pytest.mark.parametrize("length", [1, 255, 256, 257, 1023, 1024, 1025, 2100])
def test_lengths_around_pages_and_tiles(length: int) -> None:
    check(attention_reference, head_dim=32, n_kv_heads=1, group=1, lengths=[(length - 1, 1)])
    if length > 40:
        check(attention_reference, head_dim=32, n_kv_heads=1, group=1, lengths=[(length - 40, 40)])


def test_scales_of_heads_bring_rows_into_range() -> None:
    """Rows far beyond and far below the range of fp8 come out as ordinary ones do."""
    head_dim, group = 32, 2
    sizes_k, sizes_v = torch.tensor([1e5, 1e-6, 1.0]), torch.tensor([1e-7, 3.0, 1e6])
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(50, 3 * group, head_dim, generator=generator)
    q = q / sizes_k.repeat_interleave(group)[:, None]
    k, v = (torch.randn(50, 3, head_dim, generator=generator) for _ in range(2))
    k, v = k * sizes_k[:, None], v * sizes_v[:, None]
    absmax = [tuple(x.abs().amax((0, 2)).tolist()) for x in (k, v)]
    scales = KVScales("llama", "", 1, 3, head_dim, 0, 0, 50, (absmax[0],), (absmax[1],))

    params = AttentionParams(0.3)

    def error(name: str) -> float:
        cache = torch_cache(
            n_layers=1,
            n_kv_heads=3,
            head_dim=head_dim,
            segments=[SegmentSpec(name, name)],
            n_ctx=50,
            kv_scales=scales,
        )
        batch = cache.batch([(cache.new_sequence(), [0] * 50)])
        store_rotated(store_kv, hadamard_transform, k, v, cache.layers[0], batch.segments)
        got = attention(
            attention_reference, q, cache.layers[0], batch, params, rotate=hadamard_transform
        )
        worst = 0.0
        for head in range(3 * group):
            args = (q[:, head], k[:, head // group], v[:, head // group])
            want = plain(*(x.double() for x in args), 0, params)
            worst = max(worst, float((got[:, head] - want).norm() / want.norm()))
        return worst

    assert error("fp8_e4m3_head") < 0.06
    assert error("fp8_e4m3_token") < 0.06
    assert error("fp8_e5m2_head") < 0.12
    assert error("fp8_e4m3") > 0.5


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 600), st.integers(1, 20)), min_size=1, max_size=4),
    bounds=st.sampled_from([(0,), (0, 1), (0, 4, 260), (0, 256, 512)]),
    n_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
)
def test_ragged_batches(
    lengths: list[tuple[int, int]], bounds: tuple[int, ...], n_kv_heads: int, group: int
) -> None:
    check(
        attention_reference,
        head_dim=32,
        n_kv_heads=n_kv_heads,
        group=group,
        lengths=lengths,
        bounds=bounds,
    )


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 256, 300, 5000])
def test_window(window: int) -> None:
    check_windows(attention_reference, window=window, softcap=0.0)


@pytest.mark.parametrize("chunk", [1, 2, 64, 100, 256, 300, 5000])
def test_chunk(chunk: int) -> None:
    """A token sees from the last multiple of it on, as in Llama 4."""
    check_windows(attention_reference, chunk=chunk)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_softcap(softcap: float) -> None:
    check_windows(attention_reference, window=0, softcap=softcap)
    check_windows(attention_reference, window=100, softcap=softcap)


def test_rows_without_keys() -> None:
    check_rows_without_keys(attention_reference)


def test_negative_params_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        AttentionParams(1.0, window=-1)
    with pytest.raises(ValueError, match="negative"):
        AttentionParams(1.0, softcap=-1.0)


@pytest.mark.parametrize("bounds", [[0], [0, 40]])
def test_a_sink_takes_part_of_the_weight(bounds: list[int]) -> None:
    """A sink is one more key of each head, with a logit and a value of 0, in any segments."""
    generator = torch.Generator().manual_seed(1)
    specs = [SegmentSpec("f32", "f32", first) for first in bounds]
    cache = torch_cache(n_layers=1, n_kv_heads=1, head_dim=16, segments=specs, n_ctx=60)
    batch = cache.batch([(cache.new_sequence(), [0] * 60)])
    q = torch.randn(60, 3, 16, generator=generator)
    k, v = torch.randn(2, 60, 1, 16, generator=generator)
    store_rotated(store_kv, hadamard_transform, k, v, cache.layers[0], batch.segments)
    sinks = torch.tensor([-torch.inf, 0.5, 30.0])
    params = AttentionParams(0.3)
    got = attention(
        attention_reference, q, cache.layers[0], batch, params, sinks, rotate=hadamard_transform
    )
    logits = torch.einsum("thd,sd->ths", q, k[:, 0]) * 0.3
    logits = logits.masked_fill(torch.ones(60, 60).triu(1).bool()[:, None], -torch.inf)
    logits = torch.cat((logits, sinks.expand(60, 3)[..., None]), -1)
    want = torch.einsum("ths,sd->thd", logits.softmax(-1)[..., :-1], v[:, 0])
    torch.testing.assert_close(got, want)
