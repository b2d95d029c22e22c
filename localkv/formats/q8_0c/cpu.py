"""q8_0c on the CPU, without Numba; planes d, qs."""

from __future__ import annotations

from localkv.formats.cpu.page_order import BY_CHANNEL
from localkv.formats.q8_0.cpu import PLANES as BY_TOKEN

BLOCK = 32
SCALED = True
AFFINE = False
PLANES = (BY_CHANNEL, *BY_TOKEN[1:])

OFFSET = 128
LAST = 127
