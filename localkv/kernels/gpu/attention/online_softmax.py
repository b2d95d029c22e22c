"""Arithmetic of both decode and prefill attention: logits, masks, weights."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.triton_primitives.saturate import F16_MAX, saturate

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)
"""Where a running maximum starts: finite, so that a row which sees nothing gets 0, not NaN."""


@triton.jit
def rounded_to(x, PRODUCT: tl.constexpr):
    """`x` as the operand of such a product."""
    if PRODUCT == "fp16":
        return x.to(tl.float16)
    else:
        return x.to(tl.float32)


@triton.jit
def query(x, PRODUCT: tl.constexpr):
    """Queries as such an operand: values too large for fp16 saturate."""
    if PRODUCT == "fp16":
        x = saturate(x.to(tl.float32), F16_MAX)
    return rounded_to(x, PRODUCT)


@triton.jit
def dot(a, b, sums, PRODUCT: tl.constexpr):
    """The matrix product, "fp16", "tf32" or "tf32x3", added to `sums` unless that is None."""
    if PRODUCT == "fp16":
        return tl.dot(a, b, sums)
    else:
        return tl.dot(a, b, sums, input_precision=PRODUCT)


@triton.jit
def scaled_logits(products, scale, softcap, SOFTCAP: tl.constexpr):
    """Products of q and k as logits to base 2: times `scale`, then capped to +-`softcap`.

    softcap * tanh(x / softcap), as Gemma 2 has it; tanh by way of exp2.
    """
    if SOFTCAP:
        e = tl.exp2(products * (scale * 2 * LOG2_E / softcap))
        return (softcap * LOG2_E) * (1 - 2 / (e + 1))
    else:
        return products * (scale * LOG2_E)


@triton.jit
def sees(key, position, first_position, window, WINDOW: tl.constexpr):
    """Whether the token at `position` attends to `key`, both counted from `first_position`: causal,
    and `window` keys at most, or those of its chunk.

    With a window that is one comparison, 0 <= position - key < window: a negative difference is
    large without its sign. The bound `position - window` would take registers of its own.
    """
    if WINDOW == 1:
        return (position - key).to(tl.uint32) < window.to(tl.uint32)
    elif WINDOW == 2:
        reach = (position + first_position) % window + 1
        return (position - key).to(tl.uint32) < reach.to(tl.uint32)
    else:
        return key <= position


@triton.jit
def first_seen(position, first_position, window, WINDOW: tl.constexpr):
    """The first key that the token at `position` attends to, if there is a window or a chunk."""
    if WINDOW == 2:
        first = (position + first_position) // window * window - first_position
    else:
        first = position - window + 1
    return tl.maximum(first, 0)


@triton.jit
def tail_begin(
    position,
    first_position,
    exact_ptr,
    sequence,
    tail_start,
    tail_newest,
    TAIL_TOKENS: tl.constexpr,
):
    """The first key that the tokens of a sequence at `position` read in their tails, counted like
    these from `first_position` (`cache/layout.py`)."""
    packed = position + first_position - tail_start + 1 - tail_newest
    begin = tail_start + tl.maximum(packed, 0) // TAIL_TOKENS * TAIL_TOKENS
    exact = tl.load(exact_ptr + sequence).to(tl.int32)
    return tl.maximum(begin, exact) - first_position
