"""ggml's K-quants: 256 values in groups of 16 or 32, whose scales are packed with them.

q2_K    2-bit codes, 16 groups, `x = d scale q - dmin min`; a byte of `scales` holds a group's
        scale in its low and its minimum in its high 4 bits
q3_K    3-bit codes, 16 groups, `x = d (scale - 32) (q - 4)`; bits 0 and 1 of the codes are in
        `qs`, bit 2 in `hmask`
q4_K    4-bit codes, 8 groups, `x = d scale q - dmin min`
q5_K    5-bit codes, 8 groups, scales as q4_K's. Bits 0 to 3 of the codes are in `qs`, and bit i
        of byte j of `qh` is bit 4 of code j of group i
q6_K    6-bit codes, 16 groups, `x = d scale (q - 32)`; bits 0 to 3 of the codes are in `ql`,
        bits 4 and 5 in `qh`; the scales are signed bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from localkv.quant_formats.shared.bits import (
    Bytes,
    Codes,
    Floats,
    bit_fields,
    half_times,
    less,
    scaled,
)
from localkv.quant_formats.shared.cpu.panel_layout import DMIN, QS, SCALES, D, PanelPlane, planes


def q3_k_codes(scales: Bytes) -> Codes:
    """The sixteen scales of a q3_K block, plus 32: uint8 [..., n_blocks, 12] -> [..., 16].

    The low 4 bits are in the first 8 bytes, the high 2 in the last 4.
    """
    low = bit_fields(scales[..., :8], n_bits=4, run=8)
    return low | (bit_fields(scales[..., 8:], n_bits=2, run=4) << 4)


def q4_k_scales(planes: Sequence[Bytes]) -> tuple[Floats, Floats]:
    """The factors and subtrahends of the eight groups of a q4_K or q5_K block.

    Scale and minimum j have 6 bits (ggml's `get_scale_min_k4`). For j < 4 they are the low bits of
    bytes j and j + 4. For j >= 4 their low 4 bits are the nibbles of byte j + 4. Their high 2 bits
    lie above the scale and the minimum of j - 4.

    Args:
        planes: d, dmin (fp16) and scales (12 bytes) first; others are ignored.

    Returns:
        d * scale and dmin * minimum, float32 [..., n_blocks, 8] each.
    """
    d, dmin, scales = planes[:3]
    low, high, nibbles = scales[..., 0:4], scales[..., 4:8], scales[..., 8:12]
    scale = np.concatenate([low & 63, (nibbles & 15) | ((low >> 6) << 4)], axis=-1)
    minimum = np.concatenate([high & 63, (nibbles >> 4) | ((high >> 6) << 4)], axis=-1)
    return half_times(d, scale), half_times(dmin, minimum)


def decode_q2_k(planes: Sequence[Bytes]) -> Floats:
    """scales (16 bytes), qs (64 bytes), d, dmin (fp16) -> float32 [..., n_blocks * 256]."""
    scales, qs, d, dmin = planes
    codes = bit_fields(qs, n_bits=2, run=32)
    return scaled(codes, half_times(d, scales & 15), minimum=half_times(dmin, scales >> 4))


def decode_q3_k(planes: Sequence[Bytes]) -> Floats:
    """hmask (32 bytes), qs (64), scales (12), d (fp16) -> float32 [..., n_blocks * 256]."""
    hmask, qs, scales, d = planes
    codes = bit_fields(qs, n_bits=2, run=32) | (bit_fields(hmask, n_bits=1, run=32) << 2)
    return scaled(less(codes, 4), half_times(d, less(q3_k_codes(scales), 32)))


def decode_q4_k(planes: Sequence[Bytes]) -> Floats:
    """d, dmin (fp16), scales (12 bytes), qs (128 bytes) -> float32 [..., n_blocks * 256]."""
    scale, minimum = q4_k_scales(planes)
    return scaled(bit_fields(planes[3], n_bits=4, run=32), scale, minimum)


def decode_q5_k(planes: Sequence[Bytes]) -> Floats:
    """d, dmin (fp16), scales (12 bytes), qh (32), qs (128) -> float32 [..., n_blocks * 256]."""
    scale, minimum = q4_k_scales(planes)
    qh, qs = planes[3:]
    codes = bit_fields(qs, n_bits=4, run=32) | (bit_fields(qh, n_bits=1, run=32) << 4)
    return scaled(codes, scale, minimum)


def decode_q6_k(planes: Sequence[Bytes]) -> Floats:
    """ql (128 bytes), qh (64), scales (16 int8), d (fp16) -> float32 [..., n_blocks * 256]."""
    ql, qh, scales, d = planes
    codes = bit_fields(ql, n_bits=4, run=64) | (bit_fields(qh, n_bits=2, run=32) << 4)
    return scaled(less(codes, 32), half_times(d, scales.view(np.int8)))


# what is read together lies together, or the processor does not recognise a stream
Q6_CODES = [PanelPlane(name, 4, part=i, n_parts=2) for i in range(2) for name in ("ql", "qh")]

q2_k = SimpleNamespace(LAYOUT=planes("q2_K", QS, SCALES, D, DMIN), decode=decode_q2_k)
q3_k = SimpleNamespace(
    LAYOUT=planes("q3_K", QS, PanelPlane("hmask", 4), SCALES, D), decode=decode_q3_k
)
q4_k = SimpleNamespace(LAYOUT=planes("q4_K", QS, SCALES, D, DMIN), decode=decode_q4_k)
q5_k = SimpleNamespace(
    LAYOUT=planes("q5_K", QS, PanelPlane("qh", 4), SCALES, D, DMIN), decode=decode_q5_k
)
q6_k = SimpleNamespace(LAYOUT=planes("q6_K", *Q6_CODES, SCALES, D), decode=decode_q6_k)
