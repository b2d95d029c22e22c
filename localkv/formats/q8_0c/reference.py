"""q8_0c: signed bytes and a scale per channel of 32 tokens, `x = d q`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.formats.bits import Bytes, Floats
from localkv.formats.channel_groups import scaled_codes, symmetric_groups


def decode(planes: Sequence[Bytes]) -> Floats:
    """d (fp16 of each channel), qs (32 int8) -> float32 [..., tokens, n_blocks * 32]."""
    d, qs = planes
    return scaled_codes(qs.view(np.int8), d)


def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., tokens, n] -> d, qs (see `channel_groups.symmetric_groups`)."""
    d, codes = symmetric_groups(x, 127)
    return d, codes.view(np.uint8)
