"""The caches that `quality.py` measures."""

from __future__ import annotations

from collections.abc import Mapping

from localkv.cache.scales import wants_scales
from localkv.config import CacheConfig, KVScales
from localkv.formats import KV_FORMATS

ROTATIONS = ("off", "on")
BASE = "f16"
ALONE = tuple(
    name
    for name, fmt in KV_FORMATS.items()
    if 8 * fmt.block_bytes < 16 * fmt.block_size and not fmt.row_planes and not fmt.scales_by_head
)
"""Types that K alone has, and V alone, beside f16: these show which side a type's cost is from."""

MIXED = (
    ("q8_0", "q5_1"),
    ("q8_0", "q4_0"),
    ("q4_0", "q8_0"),
    ("q5_1", "q4_0"),
    ("q4_0", "q5_1"),
    ("q5_0", "iq4_nl"),
    ("q4_1", "q5_0"),
    ("fp8_e4m3_head", "q4_1"),
    ("fp8_e4m3_token", "q4_0"),
    ("q8_0", "fp8_e4m3_token"),
    ("iq4_nl", "fp8_e4m3_head"),
    ("fp8_e5m2_head", "fp8_e4m3"),
    ("fp8_e5m2_token", "fp8_e5m2_head"),
    ("fp8_e4m3", "fp8_e5m2_token"),
    ("bf16", "fp8_e5m2"),
    ("f32", "bf16"),
    ("fp8_e5m2", "f32"),
    ("q8_t", "q4_t"),
    ("q4_t", "q8_t"),
    ("q3_1", "q3_0"),
    ("q3_0", "q2_1"),
    ("q2_1", "q2_0"),
    ("q2_0", "q3_1"),
    ("q8_0c", "q2_1"),
    ("q4_1c", "q4_1"),
    ("q3_1c", "q3_1"),
    ("q2_1c", "q2_1"),
    ("q4_1", "q4_1c"),
    ("q3_1", "q3_1c"),
    ("q2_1", "q2_1c"),
    ("q4_1c", "q8_0c"),
    ("nuq4", "nuq3"),
    ("nuq3", "nuq2"),
    ("nuq2", "nuq4"),
)
"""With `ALONE` every type is K of some pair of two types and V of another."""

DRY_RUN = (("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("fp8_e4m3_head", "q4_0"))


def pairs() -> list[tuple[str, str]]:
    """(type of K, type of V): every type on both sides, each alone, and mixed pairs."""
    pure = [(name, name) for name in KV_FORMATS]
    alone = [pair for name in ALONE for pair in ((name, BASE), (BASE, name))]
    return [*pure, *alone, *MIXED]


def caches(
    which: list[tuple[str, str]], n_ctx: int, scales: Mapping[str, KVScales]
) -> list[CacheConfig]:
    """The caches of some pairs, with each rotation and the scales that belong to it."""
    return [
        CacheConfig(
            type_k,
            type_v,
            n_ctx=n_ctx,
            kv_rotation=rotation,
            kv_scales=scales[rotation] if wants_scales((type_k, type_v)) else None,
        )
        for rotation in ROTATIONS
        for type_k, type_v in which
    ]
