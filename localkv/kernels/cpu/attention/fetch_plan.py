"""How many cache lines decode attention fetches at a time (see `attention/fetch.py`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import Segment
from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.attention.kernels import cache_decoder
from localkv.quant_formats.base import QuantFormat
from localkv.simd.lanes import LANES

LINE = 64
"""Bytes of a cache line."""
Bytes = NDArray[np.uint8]


def code_bytes(fmt: QuantFormat, planes: tuple[Bytes, ...]) -> int:
    """Bytes of codes of a page and KV head."""
    return planes[len(fmt.planes) - 1].strides[1]


class Fetches(NamedTuple):
    """Numbers of lines of a `Job`."""

    k_ahead: int
    v_ahead: int
    k_early: int
    v_early: int


def plan_fetches(segment: Segment, head_dim: int) -> Fetches:
    """So that the memory is busy alike during both sides' kernels, of which those of digits take
    some two thirds of the time that floats take."""
    decoders = [cache_decoder(fmt.name) for fmt in (segment.format_k, segment.format_v)]
    steps_k, steps_v = (PAGE_TOKENS // LANES * head_dim // decoder.block for decoder in decoders)
    lines_k, lines_v = (
        -(-code_bytes(fmt, planes) // LINE)
        for fmt, planes in ((segment.format_k, segment.k), (segment.format_v, segment.v))
    )
    time_k, time_v = (2 if decoder.digits else 3 for decoder in decoders)
    # of the lines, how many more than V's are fetched in the time of K's kernel
    more = (lines_k + lines_v) * time_k // (time_k + time_v) - lines_v
    k_early, v_early = max(0, more) // steps_k, max(0, -more) // steps_v
    return Fetches(
        -(-(lines_k - k_early * steps_k) // steps_v),
        -(-(lines_v - v_early * steps_v) // steps_k),
        k_early,
        v_early,
    )
