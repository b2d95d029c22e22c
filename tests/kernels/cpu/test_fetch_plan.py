"""What decode attention fetches ahead: all of a page, and about as much in either side's time."""

from __future__ import annotations

from itertools import product

import pytest

from localkv.cache.kv_cache import uniform_cache
from localkv.cache.layout import PAGE_TOKENS, SegmentSpec
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.cpu.attention.kernels import cache_decoder
from localkv.kernels.cpu.attention.packed_attention import LINE, code_bytes, plan_fetches

TYPES = ("f32", "f16", "q8_0", "q4_0")
HEAD_DIMS = (64, 128, 256)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("pair", list(product(TYPES, TYPES)), ids="/".join)
def test_a_page_is_fetched_in_even_parts(pair: tuple[str, str], head_dim: int) -> None:
    (segment,) = (
        uniform_cache(
            NumpyArrays(),
            n_layers=1,
            n_kv_heads=1,
            head_dim=head_dim,
            segments=[SegmentSpec(*pair)],
            n_ctx=PAGE_TOKENS,
        )
        .layers[0]
        .segments
    )
    lines_k = code_bytes(segment.format_k, segment.k) // LINE
    lines_v = code_bytes(segment.format_v, segment.v) // LINE
    steps_k, steps_v = (PAGE_TOKENS // 16 * head_dim // cache_decoder(x).block for x in pair)
    plan = plan_fetches(segment, head_dim)
    assert lines_k <= plan.k_early * steps_k + plan.k_ahead * steps_v < lines_k + steps_v
    assert lines_v <= plan.v_early * steps_v + plan.v_ahead * steps_k < lines_v + steps_k
    assert not (plan.k_early and plan.v_early)
    weights = [2 if cache_decoder(x).digits else 3 for x in pair]
    share = weights[0] / sum(weights)
    in_time_of_k = plan.v_ahead * steps_k + plan.k_early * steps_k
    assert abs(in_time_of_k - share * (lines_k + lines_v)) <= 2 * max(steps_k, steps_v)
