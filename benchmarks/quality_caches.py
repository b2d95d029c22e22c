"""The caches that `quality.py` measures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from localkv.arch.spec import CacheGroup
from localkv.cache.layout import cache_segments, exact_rows
from localkv.cache.profile import LayerTypes
from localkv.config import CacheConfig
from localkv.quant_formats import KV_FORMATS

BASE = "f16"
HEAD = CacheGroup(1, 64, 64, 0, (0,))
"""A layer with heads as the model's, to ask what a cache would be."""

PACKED = tuple(name for name, fmt in KV_FORMATS.items() if fmt.bits_per_value(64) < 16)
TURNED = tuple(name for name in PACKED if KV_FORMATS[name].shares_scale)
"""Types that are rotated unless a user wants it otherwise."""
FLOATS = tuple(name for name in PACKED if KV_FORMATS[name].block_size == 1)

MIXED = (
    ("q8_0", "q6_0"),
    ("q8_0", "q5_1"),
    ("q8_0", "q4_0"),
    ("q4_0", "q8_0"),
    ("q6_0", "q5_0"),
    ("q6_0", "q4_0"),
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
    ("q8_0", "kv3_1"),
    ("q6_0", "kv3_0"),
    ("kv3_1", "kv3_0"),
    ("kv3_0", "kv2_1"),
    ("kv2_1", "kv2_0"),
    ("kv2_0", "kv3_1"),
    ("q8_0c", "q4_1"),
    ("q8_0c", "kv2_1"),
    ("q4_1c", "q4_1"),
    ("q4_1c", "q4_0"),
    ("q4_1c", "kv3_1"),
    ("q4_1c", "nuq3"),
    ("kv3_1c", "kv3_1"),
    ("kv2_1c", "kv2_1"),
    ("q4_1c", "q8_0c"),
    ("nuq4", "nuq3"),
    ("nuq3", "nuq2"),
    ("nuq2", "nuq4"),
)
"""Pairs of two types: those that others have named, and every type as K of one and V of another."""

BY_BITS = ("q4_1", "kv3_1", "kv2_1")
"""Integers of 4, 3 and 2 bits from a group's least to its largest value, as papers have them."""

ASKED_UNTURNED = ("q8_0", "q6_0", "q5_0", "q4_0")
"""Types for which facts are asked for without a rotation, too."""

QUAROT = tuple((k, v) for k in BY_BITS for v in BY_BITS)

TAILED = (
    ("q4_0", "q4_0"),
    ("q4_1c", "q4_1"),
    ("kv3_1c", "kv3_1"),
    ("kv2_1", "kv2_1"),
    ("kv2_1c", "kv2_1"),
)
TAILS = ((0, 0), (0, 4), (64, 0), (64, 4), (128, 4))
"""Tokens of the tail and of the sink."""
EQUAL_TAIL = 64
"""Tokens of the tail that all pairs get as well, so that types which have one anyway are compared
with others on equal terms."""

SMOOTHED = (
    ("q8_0", "q8_0"),
    ("q8_0", "q4_0"),
    ("q5_1", "q4_0"),
    ("q4_1", "q4_1"),
    ("q4_0", "q4_0"),
    ("kv3_1", "kv3_1"),
    ("nuq3", "nuq3"),
    ("q4_1c", "q4_1"),
)

CODEBOOKS = ("nuq4", "nuq3", "nuq2")


@dataclass(frozen=True)
class Case:
    """A cache to measure.

    Attributes:
        rotation: as in `CacheConfig`; in a case that is `settled`, "K, V", "K", "V" or "no".
        tail, sink: tokens; None for what the types have unless a user wants it otherwise.
        smoothed: whether the model's K and V are.
        normal: codebooks are made for normal numbers, not for the model.
        asks: facts are asked for as well.
        layers: types by layer, in the place of all others.
    """

    type_k: str
    type_v: str
    rotation: str = "auto"
    tail: int | None = None
    sink: int | None = None
    smoothed: bool = False
    normal: bool = False
    asks: bool = False
    layers: LayerTypes = ()

    def cache(self, n_ctx: int) -> CacheConfig:
        """The cache, without scales and codebooks."""
        return CacheConfig(
            self.type_k,
            self.type_v,
            n_ctx=n_ctx,
            kv_rotation=self.rotation,
            kv_tail=self.tail,
            kv_sink=self.sink,
            layer_types=self.layers,
        )

    @property
    def settled(self) -> Case:
        """What it comes to; equal for cases that are the same cache."""
        cache = replace(self.cache(1024), layer_types=())
        exact = exact_rows(cache, HEAD, (self.type_k, self.type_v))
        packed = cache_segments(cache, HEAD)[1 if exact.sink else 0]
        turned = [
            name
            for name, n in (("K", packed.rotation_k), ("V", packed.rotation_v))
            if n and (self.type_k, self.type_v)["KV".index(name)] != BASE
        ]
        return replace(
            self,
            rotation=", ".join(turned) or "no",
            tail=exact.tail.newest if exact.tail else 0,
            sink=exact.sink,
            asks=False,
        )


def pure() -> list[Case]:
    """Every type for both sides: as it is used, and with the other rotation."""
    return [
        *(Case(name, name, asks=True) for name in KV_FORMATS),
        *(Case(name, name, "off", asks=name in ASKED_UNTURNED) for name in TURNED),
        *(Case(name, name, "on") for name in FLOATS),
    ]


def alone() -> list[Case]:
    """Every type for one side, the other being f16: these show which side its cost is from."""
    return [
        Case(*pair, rotation)
        for name in PACKED
        for rotation in (("auto", "off") if name in TURNED else ("auto",))
        for pair in ((name, BASE), (BASE, name))
    ]


def mixed() -> list[Case]:
    """Pairs of two types."""
    return [
        *(Case(*pair, asks=not set(pair) & {*FLOATS, "f32"}) for pair in MIXED),
        *(Case(*pair) for pair in QUAROT),
    ]


def axes() -> list[Case]:
    """Scales by channel and by token, for K and for V: KIVI's ablation."""
    return [
        Case(k, v, "off", EQUAL_TAIL, 0)
        for name in BY_BITS
        for k in (f"{name}c", name)
        for v in (name, f"{name}c")
    ]


def tails() -> list[Case]:
    """Pairs of integers and codebooks with a tail and without, and some with other sinks, too."""
    pairs = [*((name, name) for name in KV_FORMATS), *MIXED]
    return [
        *(
            Case(*pair, tail=tail)
            for pair in pairs
            if not set(pair) - set(PACKED) and not set(pair) & set(FLOATS)
            for tail in (0, EQUAL_TAIL)
        ),
        *(Case(*pair, tail=tail, sink=sink) for pair in TAILED for tail, sink in TAILS),
    ]


def smoothed() -> list[Case]:
    return [Case(*pair, smoothed=True) for pair in SMOOTHED]


def normal() -> list[Case]:
    """Codebooks that know nothing of the model."""
    return [Case(name, name, normal=True) for name in CODEBOOKS]


def cases() -> list[Case]:
    """All, each once."""
    return once([*pure(), *alone(), *mixed(), *axes(), *tails(), *smoothed(), *normal()])


def dry_run() -> list[Case]:
    return [
        Case("f16", "f16", asks=True),
        Case("q8_0", "q8_0", asks=True),
        Case("q4_0", "q4_0", asks=True),
        Case("q4_0", "q4_0", "off"),
        Case("q4_0", "f16"),
        Case("f16", "q4_0"),
        Case("fp8_e4m3_head", "q4_0"),
        Case("q4_1c", "q4_1"),
        Case("q4_0", "q4_0", smoothed=True),
        Case("nuq3", "nuq3"),
        Case("nuq3", "nuq3", normal=True),
    ]


def once(wanted: Iterable[Case]) -> list[Case]:
    """Without cases that come to the same as an earlier one."""
    found = dict[Case, Case]()
    for case in wanted:
        first = found.setdefault(case.settled, case)
        if case.asks and not first.asks:
            found[case.settled] = replace(first, asks=True)
    return list(found.values())
