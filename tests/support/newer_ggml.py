"""Types that ggml has and gguf-py does not know yet, or does not decode: Q1_0 and Q2_0.

Their decoders are written after `dequantize_row_q1_0` and `dequantize_row_q2_0` of `ggml-quants.c`,
value by value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

SIZES = {"Q1_0": (41, 128, 18), "Q2_0": (42, 64, 18)}
"""ggml's number, values of a block, bytes of a block."""


def _teach(name: str) -> Any:
    """gguf-py's member of a type, which it gets if it has none."""
    number, size, n_bytes = SIZES[name]
    known = GGMLQuantizationType._value2member_map_
    if number not in known:
        member = int.__new__(GGMLQuantizationType, number)
        member._name_, member._value_ = name, number
        GGMLQuantizationType._member_map_[name] = member
        known[number] = member
    kind = known[number]
    GGML_QUANT_SIZES[kind] = size, n_bytes
    return kind


Q1_0, Q2_0 = map(_teach, SIZES)
_Quant: Any = getattr(quants, "__Quant")


def values(blocks: np.ndarray, n_values: int, n_bits: int, value: Any) -> np.ndarray:
    """uint8 [n, 18] -> float32 [n, n_values]: `value(code)` times the block's scale."""
    out = np.empty((len(blocks), n_values), np.float32)
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)[:, 0]
    for j in range(n_values):
        byte, shift = divmod(n_bits * j, 8)
        code = (blocks[:, 2 + byte] >> shift) & ((1 << n_bits) - 1)
        out[:, j] = value(code.astype(np.float32)) * scales
    return out


if Q1_0 not in quants._type_traits:

    class _Q1(_Quant, qtype=Q1_0):
        @classmethod
        def dequantize_blocks(cls, blocks: np.ndarray) -> np.ndarray:
            return values(blocks, 128, 1, lambda bit: np.where(bit == 1, 1, -1))


if Q2_0 not in quants._type_traits:

    class _Q2(_Quant, qtype=Q2_0):
        @classmethod
        def dequantize_blocks(cls, blocks: np.ndarray) -> np.ndarray:
            return values(blocks, 64, 2, lambda code: code - 1)
