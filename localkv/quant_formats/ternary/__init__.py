"""Weights of one or two bits with one scale, most of them ternary: `x = d (q - 1)`.

They are ggml's `block_q1_0`, `block_q2_0`, `block_tq1_0` and `block_tq2_0`. q1_0 has the two
values -d and d, 128 with one scale; q2_0 has -d, 0, d and 2 d, 64 with one scale. Both have a
byte's values one after the other, from the lowest bit on. The others have 256 with one scale.

tq2_0 has two bits a value, tq1_0 five values a byte: a fraction of 256, whose digits in base 3 are
the values. Times 3, the digit is what is above 8 bits, and the rest holds the next ones. The last
16 values are four to a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from localkv.quant_formats.shared.bits import Bytes, Floats, bit_fields, half, less, scaled
from localkv.quant_formats.shared.cpu.panel_layout import QS, D, PanelPlane, planes

RUNS = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
"""Runs of bytes, from the first to after the last, and how many values each holds: byte by byte
the first digit, then the second."""


def digits(packed: Bytes, n_digits: int) -> Bytes:
    """Digits in base 3, the first of all bytes first: uint8 [..., n] -> [..., n_digits * n]."""
    powers = 3 ** np.arange(n_digits, dtype=np.uint8)
    rest = packed[..., None, :] * powers[:, None]
    found = (rest.astype(np.uint16) * 3) >> 8
    return found.astype(np.uint8).reshape(*packed.shape[:-1], n_digits * packed.shape[-1])


def decode_q1_0(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (16 bytes) -> float32 [..., n_blocks * 128]."""
    d, qs = planes
    return scaled(less(2 * bit_fields(qs, n_bits=1, run=1), 1), half(d))


def decode_q2_0(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (16 bytes) -> float32 [..., n_blocks * 64]."""
    d, qs = planes
    return scaled(less(bit_fields(qs, n_bits=2, run=1), 1), half(d))


def decode_tq1_0(planes: Sequence[Bytes]) -> Floats:
    """qs (48 bytes), qh (4), d (fp16) -> float32 [..., n_blocks * 256]."""
    qs, qh, d = planes
    packed = np.concatenate([qs, qh], axis=-1)
    codes = [digits(packed[..., start:stop], n) for start, stop, n in RUNS]
    return scaled(less(np.concatenate(codes, axis=-1), 1), half(d))


def decode_tq2_0(planes: Sequence[Bytes]) -> Floats:
    """qs (64 bytes), d (fp16) -> float32 [..., n_blocks * 256]."""
    qs, d = planes
    return scaled(less(bit_fields(qs, n_bits=2, run=32), 1), half(d))


q1_0 = SimpleNamespace(LAYOUT=planes("q1_0", QS, D), decode=decode_q1_0)
q2_0 = SimpleNamespace(LAYOUT=planes("q2_0", QS, D), decode=decode_q2_0)
tq1_0 = SimpleNamespace(LAYOUT=planes("tq1_0", QS, PanelPlane("qh", 4), D), decode=decode_tq1_0)
tq2_0 = SimpleNamespace(LAYOUT=planes("tq2_0", QS, D), decode=decode_tq2_0)
