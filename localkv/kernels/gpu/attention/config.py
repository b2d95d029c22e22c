"""Sizes of attention's tiles for each generation of GPUs.

They follow from compiled code: no spilled register, shared memory that every GPU of the
generation has, few instructions per key. Products in three parts of rows with 512 channels spill,
whatever the tiles. So does decoding for 128 queries, or 64 with 256 channels, where K and V are
fp16. None of them has been timed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton


@dataclass(frozen=True)
class TileConfig:
    """How a kernel is launched.

    Attributes:
        queries: rows of Q of a program, a power of two.
        keys: rows of K and V of a tile; divides a page.
        warps: of a program.
        stages: tiles on their way from memory at the same time, plus one.
    """

    queries: int
    keys: int
    warps: int
    stages: int


PRODUCTS = ("fp16", "tf32", "tf32x3")
"""How tiles are multiplied (see `shared/gpu/`), by the room that it takes."""

SERVER_BLACKWELL = 10
"""Compute capability 10.x: its matrix unit has a memory of its own."""
BLACKWELL = 12
"""The same of those without that unit, 12.x."""
SMALL = (86, 89, 120)
"""GPUs with 99 KiB of shared memory for a block; others have 163 and more."""
PIPELINES_FEW_QUERIES = triton.__version__.startswith("3.8.")
"""Triton 3.8 gives 8 queries to that unit, too, and then its pipeliner fails as in prefill."""

DECODE_KEYS = {
    "fp16": {64: 128, 128: 64, 256: 64, 512: 32},
    "tf32": {64: 64, 128: 64, 256: 32, 512: 16},
    "tf32x3": {64: 64, 128: 32, 256: 16, 512: 16},
}
PREFILL = {
    "fp16": {
        64: TileConfig(128, 128, 8, 2),
        128: TileConfig(128, 64, 8, 2),
        256: TileConfig(32, 64, 4, 2),
        512: TileConfig(16, 32, 4, 2),
    },
    "tf32": {
        64: TileConfig(64, 64, 4, 2),
        128: TileConfig(64, 32, 4, 2),
        256: TileConfig(32, 32, 8, 1),
        512: TileConfig(16, 16, 8, 1),
    },
    "tf32x3": {
        64: TileConfig(64, 32, 4, 2),
        128: TileConfig(32, 32, 4, 2),
        256: TileConfig(16, 16, 4, 1),
        512: TileConfig(16, 16, 8, 1),
    },
}
"""By channels of a head, as a power of two; within the 99 KiB of shared memory of 8.6."""
WIDEST = max(PREFILL["fp16"])
LEAST_KEYS = min(min(by_width.values()) for by_width in DECODE_KEYS.values())
"""No tile of decoding has fewer."""


def decode_config(
    arch: int, width: int, product: str, queries: int, *, halves: bool = False
) -> TileConfig:
    """For `attention_decode`.

    Args:
        arch: compute capability, 86 for 8.6.
        width: channels of a head, as a power of two.
        product: of `PRODUCTS`, the later of K's and V's.
        queries: rows of Q, as a power of two.
        halves: K and V are fp16, of which tiles are copied to shared memory as they are.
    """
    if halves and (width, queries) == (128, 64) and arch // 10 in (8, BLACKWELL):
        return TileConfig(queries, 32, 4, 2 if arch // 10 == 8 else 1)
    keys = DECODE_KEYS[product][width]
    if arch // 10 == SERVER_BLACKWELL:
        # fewer than its matrix unit takes, which is made for large products
        keys = min(keys, 64 if queries <= 8 else 32)
        if PIPELINES_FEW_QUERIES:
            return TileConfig(queries, keys, 4, 1)
    warps, stages = 4, 2
    if width == WIDEST:
        warps = 4 if queries <= 8 else 8
        stages = 2 if product == "fp16" and arch // 10 != SERVER_BLACKWELL else 1
    return TileConfig(queries, keys, warps, stages)


def prefill_config(arch: int, width: int, product: str, *, halves_and_codes: bool) -> TileConfig:
    """For `attention_prefill`; arguments as of `decode_config`.

    Args:
        halves_and_codes: K is fp16, which is copied to shared memory as it is, and V isn't.
    """
    if arch == 90 and width == 256 and product == "fp16":
        return TileConfig(128, 64, 8, 2)  # wgmma reads from more shared memory
    tiles = PREFILL[product][width]
    if halves_and_codes and width == 256 and product == "fp16" and arch in SMALL:
        tiles = replace(tiles, keys=32)
    if arch // 10 == SERVER_BLACKWELL:
        # the pipeliner of Triton 3.6 to 3.8 fails on its tensor memory and the fence
        return replace(tiles, stages=1)
    return tiles
