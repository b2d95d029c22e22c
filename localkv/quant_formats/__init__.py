"""The registry of number formats: one line each, and no array library.

`FORMATS` maps a name to its facts. `WEIGHT_FORMATS` maps ggml's type id to the formats that a
weight may have. `KV_FORMATS` maps a name to the formats that the KV cache can store. Command-line
choices, byte arithmetic, tests, documentation and benchmarks iterate these. Block layouts are
ggml's (`ggml-common.h`).
"""

from __future__ import annotations

import re

from localkv.quant_formats.base import Plane, QuantFormat

E4M3_LARGEST, E5M2_LARGEST = 448.0, 57344.0
CHANNEL_TOKENS, MANY_CHANNEL_TOKENS = 32, 128
"""Tokens that share a channel's scale in types with such scales: KIVI's G, and more."""


def _format(
    name: str,
    ggml_type: int | None,
    block_size: int,
    planes: dict[str, int],
    *,
    is_weight: bool = True,
    is_cache: bool = False,
    stays_in_file: bool = False,
    is_offered: bool = False,
    narrow: str = "",
    folder: str = "",
) -> QuantFormat:
    fields = tuple(Plane(field, n_bytes) for field, n_bytes in planes.items())
    return QuantFormat(
        name,
        ggml_type,
        block_size,
        fields,
        is_weight=is_weight,
        is_cache=is_cache,
        stays_in_file=stays_in_file,
        is_offered=is_offered,
        narrow=narrow,
        folder=folder,
    )


def _low_bits(name: str, **planes: int) -> QuantFormat:
    """Two or three bits in blocks of 32, for caches."""
    return _format(name, None, 32, planes, is_weight=False, is_cache=True, folder="low_bits")


def _per_token(name: str, folder: str, row: tuple[Plane, ...], qs: int) -> QuantFormat:
    """Integers with fields for a whole row (a token and KV head), for caches."""
    return QuantFormat(
        name,
        None,
        32,
        (Plane("qs", qs),),
        is_weight=False,
        is_cache=True,
        row_planes=row,
        folder=folder,
    )


def _super_block(folder: str, name: str, ggml_type: int, narrow: str, **planes: int) -> QuantFormat:
    """256 values, with scales of smaller groups in one of the fields."""
    offered = folder == "k_quants"
    return _format(name, ggml_type, 256, planes, is_offered=offered, narrow=narrow, folder=folder)


def _fp8(
    name: str, largest: float, *, row: tuple[Plane, ...] = (), by_head_of: str = ""
) -> QuantFormat:
    """An 8-bit float for caches: `by_head_of` names the type whose codes it scales by head."""
    return QuantFormat(
        name,
        None,
        1,
        (Plane("values", 1),),
        is_weight=False,
        is_cache=True,
        row_planes=row,
        scales_by_head=bool(by_head_of),
        largest=largest,
        shared_codec=by_head_of,
        folder="fp8",
    )


def _by_channel(name: str, folder: str, **planes: int) -> QuantFormat:
    """For caches: each channel has a scale of its own for some tokens, 128 in types whose name ends
    so. Then a block is 64 channels, of whose scales a row has a byte."""
    many = name.endswith(str(MANY_CHANNEL_TOKENS))
    fields = tuple(Plane(field, n_bytes) for field, n_bytes in planes.items())
    return QuantFormat(
        name,
        None,
        64 if many else 32,
        fields,
        is_weight=False,
        is_cache=True,
        group_tokens=MANY_CHANNEL_TOKENS if many else CHANNEL_TOKENS,
        folder=folder,
    )


def _codebook(name: str, n_centroids: int, **planes: int) -> QuantFormat:
    """For caches: codes of a layer's codebook, and outliers."""
    fields = tuple(Plane(field, n_bytes) for field, n_bytes in {"d": 2, "o": 2, **planes}.items())
    return QuantFormat(
        name,
        None,
        32,
        fields,
        is_weight=False,
        is_cache=True,
        n_centroids=n_centroids,
        folder="nuq",
    )


_SCALE = (Plane("d", 2),)
_SCALE_AND_MINIMUM = (Plane("d", 2), Plane("m", 2))

_ALL = (
    _format("f32", 0, 1, {"values": 4}, is_cache=True, folder="floats"),
    _format("f16", 1, 1, {"values": 2}, is_cache=True, is_offered=True, folder="floats"),
    _format("bf16", 30, 1, {"values": 2}, is_cache=True, folder="floats"),
    _format("q8_0", 8, 32, {"d": 2, "qs": 32}, is_cache=True, stays_in_file=True, is_offered=True),
    _per_token("q8_t", "q8_0", _SCALE, qs=32),
    _format("q6_0", None, 32, {"d": 2, "qh": 8, "qs": 16}, is_weight=False, is_cache=True),
    _format("q5_1", 7, 32, {"d": 2, "m": 2, "qh": 4, "qs": 16}, is_cache=True, folder="q5"),
    _format("q5_0", 6, 32, {"d": 2, "qh": 4, "qs": 16}, is_cache=True, folder="q5"),
    _format("q4_1", 3, 32, {"d": 2, "m": 2, "qs": 16}, is_cache=True, folder="q4"),
    _format("q4_0", 2, 32, {"d": 2, "qs": 16}, is_cache=True, folder="q4"),
    _format("iq4_nl", 20, 32, {"d": 2, "qs": 16}, is_cache=True),
    _per_token("q4_t", "q4", _SCALE_AND_MINIMUM, qs=16),
    _low_bits("kv3_1", d=2, m=2, qh=4, qs=8),
    _low_bits("kv3_0", d=2, qh=4, qs=8),
    _low_bits("kv2_1", d=2, m=2, qs=8),
    _low_bits("kv2_0", d=2, qs=8),
    _fp8("fp8_e4m3", E4M3_LARGEST),
    _fp8("fp8_e4m3_head", E4M3_LARGEST, by_head_of="fp8_e4m3"),
    _fp8("fp8_e4m3_token", E4M3_LARGEST, row=_SCALE),
    _fp8("fp8_e5m2", E5M2_LARGEST),
    _fp8("fp8_e5m2_head", E5M2_LARGEST, by_head_of="fp8_e5m2"),
    _fp8("fp8_e5m2_token", E5M2_LARGEST, row=_SCALE),
    _by_channel("q8_0c", "q8_0", d=2, qs=32),
    _by_channel("q4_1c", "q4", d=2, m=2, qs=16),
    _by_channel("q4_1c128", "q4", d=1, m=1, qs=32),
    _by_channel("kv3_1c", "low_bits", d=2, m=2, qh=4, qs=8),
    _by_channel("kv3_1c128", "low_bits", d=1, m=1, qh=8, qs=16),
    _by_channel("kv2_1c", "low_bits", d=2, m=2, qs=8),
    _codebook("nuq4", 16, qs=16),
    _codebook("nuq3", 8, qh=4, qs=8),
    _codebook("nuq2", 4, qs=8),
    _super_block("k_quants", "q2_K", 10, "q4_0", scales=16, qs=64, d=2, dmin=2),
    _super_block("k_quants", "q3_K", 11, "q4_0", hmask=32, qs=64, scales=12, d=2),
    _super_block("k_quants", "q4_K", 12, "q5_0", d=2, dmin=2, scales=12, qs=128),
    _super_block("k_quants", "q5_K", 13, "q5_1", d=2, dmin=2, scales=12, qh=32, qs=128),
    _super_block("k_quants", "q6_K", 14, "q8_0", ql=128, qh=64, scales=16, d=2),
    _super_block("iq4_nl", "iq4_xs", 23, "iq4_nl", d=2, scales_h=2, scales_l=4, qs=128),
    _super_block("i_quants", "iq3_s", 21, "iq4_nl", d=2, qs=64, qh=8, signs=32, scales=4),
    _super_block("i_quants", "iq3_xxs", 18, "iq4_nl", d=2, qs=64, signs=32),
    _super_block("i_quants", "iq2_s", 22, "iq4_nl", d=2, qs=32, signs=32, qh=8, scales=8),
    _super_block("i_quants", "iq2_xs", 17, "iq4_nl", d=2, qs=64, scales=8),
    _super_block("i_quants", "iq2_xxs", 16, "iq4_nl", d=2, qs=64),
    _super_block("i_quants", "iq1_m", 29, "iq4_nl", qs=32, qh=16, scales=8),
    _super_block("i_quants", "iq1_s", 19, "iq4_nl", d=2, qs=32, qh=16),
    _format("q2_0", 42, 64, {"d": 2, "qs": 16}, narrow="q4_0", folder="ternary"),
    _format("q1_0", 41, 128, {"d": 2, "qs": 16}, folder="ternary"),
    _super_block("ternary", "tq2_0", 35, "q4_0", qs=64, d=2),
    _super_block("ternary", "tq1_0", 34, "q4_0", qs=48, qh=4, d=2),
    _format("mxfp4", 39, 32, {"e": 1, "qs": 16}, folder="fp4"),
    _format("nvfp4", 40, 64, {"d": 4, "qs": 32}, folder="fp4"),
)

FORMATS = {fmt.name: fmt for fmt in _ALL}
WEIGHT_FORMATS = {fmt.ggml_type: fmt for fmt in _ALL if fmt.is_weight and fmt.ggml_type is not None}
KV_FORMATS = {fmt.name: fmt for fmt in _ALL if fmt.is_cache}
TOKEN_FORMATS = {name: fmt for name, fmt in KV_FORMATS.items() if fmt.group_tokens == 1}
"""The types of `KV_FORMATS` whose rows are packed one by one, so that they need no tail."""

_FORMER = ("q3_1", "q3_0", "q2_1", "q2_0", "q3_1c", "q2_1c")
FORMER_NAMES = {name: f"kv{name[1:]}" for name in _FORMER}
"""The names that cache types had before version 0.3, and today's."""

WHY_RENAMED = "ggml's weight type Q2_0 has other bytes"


def with_todays_names(text: str) -> str:
    """Replace the former names of cache types in a text, such as a pair or JSON."""
    return re.sub(r"\bq[23]_[01]c?\b", lambda found: FORMER_NAMES.get(found[0], found[0]), text)


TYPES_LISTED = "localkv complete --help lists the types of the cache"

__all__ = [
    "FORMATS",
    "FORMER_NAMES",
    "KV_FORMATS",
    "TOKEN_FORMATS",
    "TYPES_LISTED",
    "WEIGHT_FORMATS",
    "WHY_RENAMED",
    "Plane",
    "QuantFormat",
    "with_todays_names",
]
