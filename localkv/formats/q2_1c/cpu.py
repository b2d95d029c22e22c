"""q2_1c on the CPU, without Numba; planes d, m, qs."""

from __future__ import annotations

from localkv.formats.cpu.page_order import BY_CHANNEL
from localkv.formats.q2_1.cpu import PLANES as BY_TOKEN

BLOCK = 32
SCALED = True
AFFINE = True
PLANES = (BY_CHANNEL, BY_CHANNEL, *BY_TOKEN[2:])

OFFSET = 0

LAST = 3
