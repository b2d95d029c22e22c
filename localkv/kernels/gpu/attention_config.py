"""Sizes of attention's tiles for each generation of GPUs.

They come from what compiled code shows: no spilled register, shared memory that every GPU of the
generation has, few instructions per key. None of them has been timed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileConfig:
    """How a kernel is launched.

    Attributes:
        queries: rows of Q of a program, a power of two; 0 where the kernel has as many as there are.
        keys: rows of K and V of a tile; divides a page.
        warps: of a program.
        stages: tiles on their way from memory at the same time, plus one.
    """

    queries: int
    keys: int
    warps: int
    stages: int


BLACKWELL_SERVER = 100
"""Compute capability 10: Triton 3.6 and 3.7 can't pipeline prefill, and take its matrix unit, which
has costs of its own, for tiles of 64 keys."""


def decode_config(arch: int, width: int, value_bytes: int) -> TileConfig:
    """For `attention_decode`.

    Args:
        arch: compute capability, 86 for 8.6.
        width: channels of a head, as a power of two.
        value_bytes: of a decoded value, the wider of K's and V's.
    """
    keys = 64
    return TileConfig(0, keys, 4, 2)


def prefill_config(arch: int, width: int, value_bytes: int) -> TileConfig:
    """For `attention_prefill`; arguments as of `decode_config`."""
    return TileConfig(128, 64, 8, 1 if arch == BLACKWELL_SERVER else 2)
