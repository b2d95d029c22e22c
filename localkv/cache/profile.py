"""What was measured of a model's K and V: how large they are, and what packing each of them costs.

`localkv calibrate` measures a *profile* once and keeps it in a file beside the model or in the
user's data folder. A cache takes its types by layer, its codebooks and its *scales* from it; scales
may also have a file of their own. No torch, and NumPy only where there are arrays.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import os
import reprlib
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from localkv.arch.spec import CacheGroup, ModelSpec
from localkv.cache.layout import (
    SegmentSpec,
    allocated_bits,
    default_sink,
    group_layouts,
    with_types,
)
from localkv.config import KV_ROTATIONS, MOST_EXACT, CacheConfig, KVCodebook, KVScales
from localkv.errors import UsageError, printable
from localkv.quant_formats import KV_FORMATS, with_todays_names
from localkv.quant_formats.shared.codebooks import Codebook, check_codebook
from localkv.system.files import read_input, write_whole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


LayerTypes = tuple[tuple[str, str] | None, ...]
"""The types of K and V of each layer, in the form of `CacheConfig.layer_types`."""

DEFAULT_BITS = 5.0
"""Bits per value where a profile is used and nobody says how many."""

OUTLIER = 6.0
"""An outlier's magnitude is more than this many times the median of its head's channels."""

_SLACK = 1e-6
"""How much sums of bits may be off, since they add fractions."""


@dataclass(frozen=True)
class SideFacts:
    """K or V of one layer.

    Attributes:
        n_heads, n_channels: KV heads, and channels of each.
        packed_ranges: base64 of float16 [n_heads, n_channels, 2], little endian: the least and the
            largest value of each channel, away from 0 to the next float16.
        kld: mean divergence, in nats, from an f16 cache if this side of this layer alone is of a
            type, by type.
        exponents: [n_heads][n_channels] of the smoothing that weights are loaded with
            (`loader/smoothing.py`), which all else was measured with; empty for none.
        codebooks: one for each number of codes (`shared/codebooks.py`), for rows as they are
            packed.
    """

    n_heads: int
    n_channels: int
    packed_ranges: str
    kld: Mapping[str, float]
    exponents: tuple[tuple[int, ...], ...] = ()
    codebooks: tuple[Codebook, ...] = ()

    @property
    def ranges(self) -> NDArray[np.float32]:
        """[n_heads, n_channels, 2]: the least and the largest value."""
        import numpy as np

        raw = np.frombuffer(base64.b64decode(self.packed_ranges, validate=True), "<f2")
        return raw.reshape(self.n_heads, self.n_channels, 2).astype(np.float32)

    @property
    def channel_absmax(self) -> NDArray[np.float32]:
        """[n_heads, n_channels]"""
        absmax: NDArray[np.float32] = abs(self.ranges).max(-1)
        return absmax

    @property
    def absmax(self) -> tuple[float, ...]:
        """The largest magnitude of each head."""
        return tuple(self.channel_absmax.max(-1).tolist())

    @property
    def outliers(self) -> tuple[tuple[int, int], ...]:
        """(head, channel) of those that are much larger than the others of their head."""
        import numpy as np

        absmax = self.channel_absmax
        found = np.argwhere(absmax > OUTLIER * np.median(absmax, axis=-1, keepdims=True))
        return tuple((int(head), int(channel)) for head, channel in found)


def packed_ranges(lo: NDArray[np.float32], hi: NDArray[np.float32]) -> str:
    """Pack least and largest values, [n_heads, n_channels] each, in the form of `SideFacts`."""
    import numpy as np

    values = np.stack([lo, hi], -1).astype(np.float32)
    halves = values.clip(-65504, 65504).astype("<f2")
    away = np.nextafter(halves, np.copysign(np.float16(np.inf), halves)).astype("<f2")
    smaller = np.abs(halves.astype(np.float32)) < np.abs(values)
    halves = np.where(smaller & np.isfinite(away), away, halves).astype("<f2")
    return base64.b64encode(halves.tobytes()).decode()


@dataclass(frozen=True)
class LayerFacts:
    """One layer that stores rows; they are latents and rotated parts of keys if it keeps these."""

    k: SideFacts
    v: SideFacts


@dataclass(frozen=True)
class TypeList:
    """The types of all layers, and what they cost together.

    Attributes:
        layers: types of K and of V, None for a layer without rows.
        bits: per value of packed rows, on average; `allocated_bits` counts those in a cache.
        bytes_per_token: of packed rows of K and V.
        predicted: the sum of the divergences that the types cost alone.
        verified: the divergence with all of them at once.
        kv_tail, kv_sink: tokens in f16 that all packed layers have, and had while this was
            measured; None for what types have by themselves.
    """

    layers: LayerTypes
    bits: float
    bytes_per_token: int
    predicted: float
    verified: float
    kv_tail: int | None = None
    kv_sink: int | None = None

    @property
    def has_exact_rows(self) -> bool:
        """Whether a cache with these types has a tail or a sink, which older files don't say: types
        have it by themselves then."""
        names = {name for pair in self.layers if pair is not None for name in pair}
        formats = [KV_FORMATS[name] for name in names]
        sink = self.kv_sink
        if sink is None:
            bits = (8 * fmt.block_bytes / fmt.block_size for fmt in formats)
            sink = default_sink(min(bits), 1)
        return bool(self.kv_tail or sink or any(fmt.group_tokens > 1 for fmt in formats))

    def in_words(self, kv_tail: int | None) -> str:
        """The bits of packed rows, and the tail of a cache with these types, for people."""
        tail = f" and a tail of {kv_tail} tokens in f16" if kv_tail else ""
        return f"{self.bits:.4g} bits per value by layer{tail}"


@dataclass(frozen=True)
class KVProfile:
    """The measurements of one model.

    Attributes:
        model: its hash (`loader/model_fingerprint.py`).
        architecture, name: the model's, for people.
        text: what was run through it, for people.
        n_tokens, n_scored: of that, and those whose predictions were compared.
        kv_rotation: the cache's, while divergences were measured (`CacheConfig.kv_rotation`).
        token_seconds: for a generated token without history, on the machine that measured.
        bandwidth: of that machine's memory, in bytes per second.
        smoothing: strength of the smoothing, 0 for none.
        layers: in the model's order; None for one without rows.
        lists: types by layer for growing budgets, with a tail and without.
        uniform: of types that all layers have: whether predictions hold, and to compare with.
        pairs: the divergence of other pairs that all layers have, such as the pairs of presets, by
            "K/V". Each has the tail and the sink that it has by itself.
    """

    model: str
    architecture: str
    name: str
    text: str
    n_tokens: int
    n_scored: int
    kv_rotation: str
    token_seconds: float
    bandwidth: float
    smoothing: float
    layers: tuple[LayerFacts | None, ...]
    lists: tuple[TypeList, ...]
    uniform: tuple[TypeList, ...]
    pairs: dict[str, float] = field(default_factory=dict)

    @property
    def without_tail(self) -> tuple[TypeList, ...]:
        """The types by layer that take their packed rows and nothing else, in any context."""
        return tuple(one for one in self.lists if not one.has_exact_rows)

    def measured_with(self, kv_tail: int | None, kv_sink: int | None) -> KVProfile:
        """The profile with only those types by layer that were measured with such a tail, and of
        these with such a sink; None is any. Where none were, all stay.

        Without a tail, types that were found with one are far worse than measured.
        """
        lists = self.lists
        for name, tokens in (("kv_tail", kv_tail), ("kv_sink", kv_sink)):
            alike = tuple(one for one in lists if tokens in (None, getattr(one, name)))
            lists = alike or lists
        return replace(self, lists=lists)

    def within(self, bits: float, takes: Callable[[TypeList], float]) -> TypeList:
        """The types by layer that diverge least within a budget.

        Args:
            bits: per value.
            takes: the bits of a cache with the types, such as `allocated_bits`.

        Raises:
            UsageError: all take more.
        """
        sizes = [takes(one) for one in self.lists]
        pairs = zip(sizes, self.lists, strict=True)
        fitting = [(one.verified, size, one) for size, one in pairs if size <= bits + _SLACK]
        if not fitting:
            raise UsageError(
                f"the KV profile has no types that take at most {bits:g} bits per value here",
                hint=f"its smallest take {math.ceil(1000 * min(sizes)) / 1000:g} (--kv-bits)",
            )
        return min(fitting, key=lambda one: one[:2])[2]

    @property
    def codebooks(self) -> tuple[KVCodebook, ...]:
        """The codebooks of all layers."""
        return tuple(
            KVCodebook(i, side, numbers)
            for i, layer in enumerate(self.layers)
            if layer is not None
            for side, facts in (("k", layer.k), ("v", layer.v))
            for numbers in facts.codebooks
        )

    @property
    def smoothing_name(self) -> str:
        """A name of the smoothing that rows were measured with: equal for equal exponents, "" for
        none."""
        exponents = [layer and (layer.k.exponents, layer.v.exponents) for layer in self.layers]
        sides = (side for layer in exponents if layer for side in layer)
        if not self.smoothing or not any(n for side in sides for head in side for n in head):
            return ""
        return hashlib.sha256(repr(exponents).encode()).hexdigest()[:16]

    def scales(self) -> KVScales | None:
        """For types that are scaled by head; None if layers differ in their heads."""
        layers = [layer for layer in self.layers if layer is not None]
        sizes = {(s.n_heads, s.n_channels) for layer in layers for s in (layer.k, layer.v)}
        if len(sizes) > 1 or len(layers) < len(self.layers):
            return None
        ((n_heads, n_channels),) = sizes
        return KVScales(
            architecture=self.architecture,
            name=self.name,
            n_layers=len(layers),
            n_kv_heads=n_heads,
            head_dim=n_channels,
            rotation_k=0,
            rotation_v=0,
            n_tokens=self.n_tokens,
            absmax_k=tuple(layer.k.absmax for layer in layers),
            absmax_v=tuple(layer.v.absmax for layer in layers),
            smoothing=self.smoothing_name,
        )


KIND, VERSION = "localkv KV profile", 1
_MOST_PROFILE = 64 << 20
MOST_LAYERS, MOST_CHANNELS = 1 << 12, 1 << 16
"""Most layers of a model, and most channels of all heads of a layer."""

HINT = "localkv calibrate -m MODEL -o FILE makes one"
LARGEST_EXPONENT = 8
"""The largest exponent of a channel that is smoothed, up or down."""

_LISTS = ("lists", "uniform")
_NUMBERS = ("bits", "predicted", "verified")
_EXACT = ("kv_tail", "kv_sink")


def write_profile(path: str | os.PathLike[str], profile: KVProfile) -> None:
    """Write a profile.

    Raises:
        UsageError: it can't be written.
    """
    data = {"kind": KIND, "version": VERSION, **asdict(profile)}
    for name in _LISTS:
        for one in data[name]:
            one["layers"] = [pair and "/".join(pair) for pair in one["layers"]]
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    try:
        write_whole(path, (text + "\n").encode(errors="replace"))
    except OSError as error:
        raise UsageError(f"the KV profile {printable(path)}: {error.strerror}") from error


def read_profile(path: str | os.PathLike[str]) -> KVProfile:
    """Read a profile.

    Raises:
        UsageError: it can't be read, or is no profile, or holds what can't be.
    """
    what = f"the KV profile {printable(path)}"
    try:
        data = json.loads(read_input(path, _MOST_PROFILE, what), parse_constant=_no_number)
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}", hint=HINT) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{what}: not a JSON file", hint=HINT) from error
    if not isinstance(data, dict) or data.get("kind") != KIND:
        scales = isinstance(data, dict) and data.get("kind") == "localkv KV scales"
        raise UsageError(
            f"{what}: not a KV profile",
            hint="it is a file of scales, which --kv-scales takes" if scales else HINT,
        )
    if data.get("version") != VERSION:
        version = reprlib.repr(data.get("version"))
        raise UsageError(f"{what}: version {version} is not supported, {VERSION} is", hint=HINT)
    return _Reader(what).profile(data)


def _halves(raw: bytes) -> list[float]:
    """The numbers that little endian float16 values stand for."""
    return [value for (value,) in struct.iter_unpack("<e", raw)]


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)


class _Reader:
    """Checks the parts of a file; `what` is its name in messages."""

    def __init__(self, what: str) -> None:
        self.what = what

    def _fail(self, problem: str) -> NoReturn:
        raise UsageError(f"{self.what}: {problem}", hint=HINT)

    def _keys(self, data: object, where: str, names: Collection[str]) -> dict[str, Any]:
        """An object with exactly these keys."""
        if not isinstance(data, dict):
            self._fail(f"{where} is not an object")
        for name in data:
            if name not in names:
                self._fail(f"unknown key {reprlib.repr(name)}{where and ' in '}{where}")
        for name in names:
            if name not in data:
                self._fail(f"{where or 'it'} lacks {name!r}")
        return data

    def _number(self, value: object, where: str, most: float = math.inf) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fail(f"{where} is not a number")
        if not 0 <= value <= min(most, 1e300):
            self._fail(f"{where} is {reprlib.repr(value)}")
        return float(value)

    def _count(self, value: object, where: str, most: int = 1 << 53) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            self._fail(f"{where} is not a count")
        return value

    def _exact(self, value: object, where: str) -> int | None:
        return None if value is None else self._count(value, where, MOST_EXACT)

    def _text(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            self._fail(f"{where} is not a text")
        return value

    def _items(self, value: object, where: str, n: int | None = None) -> list[Any]:
        if not isinstance(value, list) or (n is not None and len(value) != n):
            self._fail(f"{where} is not a list" + ("" if n is None else f" of {n}"))
        return value

    def profile(self, data: dict[str, Any]) -> KVProfile:
        texts = ("model", "architecture", "name", "text", "kv_rotation")
        numbers = ("token_seconds", "bandwidth", "smoothing")
        counts = ("n_tokens", "n_scored")
        names = {"kind", "version", *texts, *numbers, *counts, "layers", *_LISTS, "pairs"}
        data = {"pairs": {}, **data}  # older files have none
        self._keys(data, "", names)
        layers = self._items(data["layers"], "layers")
        if not 1 <= len(layers) <= MOST_LAYERS:
            self._fail(f"{len(layers)} layers")
        if data["kv_rotation"] not in KV_ROTATIONS:
            self._fail(f"kv_rotation is {reprlib.repr(data['kv_rotation'])}")
        found = tuple(self._layer(layer, f"layer {i}") for i, layer in enumerate(layers))
        lists: dict[str, Any] = {name: self._lists(data[name], name, found) for name in _LISTS}
        if not lists["lists"]:
            self._fail("lists is empty")
        fields: dict[str, Any] = {name: self._text(data[name], name) for name in texts}
        fields |= {name: self._count(data[name], name) for name in counts}
        fields |= {name: self._number(data[name], name) for name in numbers}
        return KVProfile(**fields, **lists, layers=found, pairs=self._pairs(data["pairs"]))

    def _layer(self, data: object, where: str) -> LayerFacts | None:
        if data is None:
            return None
        sides = self._keys(data, where, ("k", "v"))
        return LayerFacts(
            self._side(sides["k"], f"k of {where}"), self._side(sides["v"], f"v of {where}")
        )

    def _side(self, data: object, where: str) -> SideFacts:
        found = self._keys(data, where, (*_SIZES, "packed_ranges", "kld", "exponents", "codebooks"))
        sizes = [self._count(found[name], f"{name} of {where}") for name in _SIZES]
        if not 1 <= math.prod(sizes) <= MOST_CHANNELS:
            self._fail(f"{where} has {sizes[0]} heads of {sizes[1]} channels")
        text = self._text(found["packed_ranges"], f"packed_ranges of {where}")
        try:
            raw = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != 4 * math.prod(sizes) or not all(map(math.isfinite, _halves(raw))):
            self._fail(f"packed_ranges of {where} are not those of {math.prod(sizes)} channels")
        if not isinstance(found["kld"], dict):
            self._fail(f"kld of {where} is not an object")
        kld = {
            self._type(name, f"kld of {where}"): self._number(value, f"kld of {where}")
            for name, value in found["kld"].items()
        }
        exponents = self._items(found["exponents"], f"exponents of {where}")
        if exponents:
            self._items(exponents, f"exponents of {where}", sizes[0])
        codebooks = self._items(found["codebooks"], f"codebooks of {where}")
        return SideFacts(
            sizes[0],
            sizes[1],
            text,
            kld,
            tuple(self._exponents(row, f"exponents of {where}", sizes[1]) for row in exponents),
            tuple(self._codebook(numbers, f"codebooks of {where}") for numbers in codebooks),
        )

    def _exponents(self, data: object, where: str, n: int) -> tuple[int, ...]:
        row = self._items(data, where, n)
        if any(type(value) is not int or abs(value) > LARGEST_EXPONENT for value in row):
            self._fail(f"{where} are not integers of at most {LARGEST_EXPONENT}")
        return tuple(row)

    def _codebook(self, data: object, where: str) -> Codebook:
        numbers = tuple(self._items(data, where))
        try:
            check_codebook(numbers)
        except ValueError as error:
            self._fail(f"{where}: {error}")
        return numbers

    def _type(self, name: object, where: str) -> str:
        found = with_todays_names(name) if isinstance(name, str) else None
        if found not in KV_FORMATS:
            self._fail(f"{where} names {reprlib.repr(name)}, which is no cache type")
        return found

    def _pairs(self, data: object) -> dict[str, float]:
        if not isinstance(data, dict):
            self._fail("pairs is not an object")
        for name in data:
            k, _, v = name.partition("/")
            self._type(k, "pairs")
            self._type(v, "pairs")
        return {
            with_todays_names(name): self._number(value, "pairs") for name, value in data.items()
        }

    def _lists(
        self, data: object, name: str, layers: tuple[LayerFacts | None, ...]
    ) -> tuple[TypeList, ...]:
        lists = []
        for i, one in enumerate(self._items(data, name)):
            where = f"{name}[{i}]"
            if isinstance(one, dict):
                one = {**dict.fromkeys(_EXACT), **one}  # older files have none
            keys = self._keys(one, where, ("layers", "bytes_per_token", *_NUMBERS, *_EXACT))
            numbers: Any = {n: self._number(keys[n], f"{n} of {where}") for n in _NUMBERS}
            exact: Any = {n: self._exact(keys[n], f"{n} of {where}") for n in _EXACT}
            lists.append(
                TypeList(
                    layers=self._layer_types(keys["layers"], f"layers of {where}", layers),
                    bytes_per_token=self._count(keys["bytes_per_token"], f"bytes of {where}"),
                    **numbers,
                    **exact,
                )
            )
        return tuple(lists)

    def _layer_types(
        self, data: object, where: str, layers: tuple[LayerFacts | None, ...]
    ) -> LayerTypes:
        types = list[tuple[str, str] | None]()
        for text, layer in zip(self._items(data, where, len(layers)), layers, strict=True):
            if (text is None) != (layer is None):
                self._fail(f"{where} are of other layers")
            if layer is None:
                types.append(None)
                continue
            k, _, v = self._text(text, where).partition("/")
            k, v = self._type(k, where), self._type(v, where)
            for name, side in ((k, layer.k), (v, layer.v)):
                if side.n_channels % KV_FORMATS[name].block_size:
                    self._fail(f"{where} name {name} for {side.n_channels} channels")
            types.append((k, v))
        return tuple(types)


_SIZES = ("n_heads", "n_channels")


SCALES_KIND, SCALES_VERSION = "localkv KV scales", 1
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The normal numbers of float32."""

_MOST_SCALES = 64 << 20
"""Most bytes of a file of scales; 1000 layers of 1000 heads take half of that."""

_COUNTS = ("n_layers", "n_kv_heads", "head_dim")
_ROTATIONS = ("rotation_k", "rotation_v")


def head_scales(absmax: Iterable[float], type_name: str) -> list[float]:
    """The scales of one layer's KV heads; 1 for a head without values other than 0."""
    largest = KV_FORMATS[type_name].largest
    return [value / largest if value / largest >= SMALLEST else 1.0 for value in absmax]


def wants_scales(types: Iterable[str]) -> list[str]:
    """Pick the cache types whose rows are scaled by head."""
    return [name for name in types if name in KV_FORMATS and KV_FORMATS[name].scales_by_head]


def require_scales(types: Iterable[str], given: bool) -> None:
    """Refuse a type without the scales that it wants, and scales that no type wants.

    Raises:
        UsageError: tells how scales are measured.
    """
    wanting = wants_scales(types)
    if wanting and not given:
        raise UsageError(
            f"cache type {wanting[0]} needs a file of scales (--kv-scales)",
            hint="localkv perplexity -m MODEL -f TEXT --calibrate-kv FILE makes one; "
            "--kv-profile has them, too, from localkv calibrate -m MODEL",
        )
    if given and not wanting:
        having = ", ".join(name for name, fmt in KV_FORMATS.items() if fmt.scales_by_head)
        raise UsageError("no cache type chosen uses scales (--kv-scales)", hint=f"those: {having}")


def check_scales(cache: CacheConfig, config: ModelSpec) -> None:
    """Refuse a cache whose types lack scales, or whose scales are not for this model, rotation and
    smoothing.

    Raises:
        UsageError: names the difference.
    """
    if not wants_scales(cache.types):
        return
    require_scales(cache.types, cache.kv_scales is not None)
    assert cache.kv_scales is not None
    require_alike(config)
    check_model(cache.kv_scales, config)
    _check_smoothing(cache.kv_scales, cache.smoothing)
    for layout in group_layouts(cache, config.groups):
        for spec in layout.segments:
            _check_rotation(cache.kv_scales, spec)


def require_alike(config: ModelSpec) -> None:
    """Refuse a model whose layers can't share a table of scales.

    Raises:
        UsageError: some have other heads than others, or no K and V of their own.
    """
    heads = {(group.n_kv_heads, group.key_dim, group.value_dim) for group in config.groups}
    if len(heads) > 1 or sum(len(group.layers) for group in config.groups) < config.n_layers:
        raise UsageError(
            "types that are scaled by head need a model whose layers all have K and V, of alike "
            "heads",
            hint="use fp8_e4m3_token or fp8_e5m2_token, which need no file of scales",
        )


def check_model(scales: KVScales, config: ModelSpec) -> None:
    """Refuse scales of a model of another shape.

    Raises:
        UsageError: names the difference.
    """
    group = config.groups[0]
    sizes = {
        "architecture": config.architecture,
        "n_layers": config.n_layers,
        "n_kv_heads": group.n_kv_heads,
        "head_dim": group.key_dim,
    }
    for name, ours in sizes.items():
        theirs = getattr(scales, name)
        if theirs != ours:
            theirs, ours = map(reprlib.repr, (theirs, ours))
            raise UsageError(
                f"the KV scales are of another model: its {name} is {theirs}, this one's {ours}",
                hint="measure them with this model (localkv perplexity --calibrate-kv FILE)",
            )


def _check_smoothing(scales: KVScales, smoothing: str) -> None:
    if scales.smoothing == smoothing:
        return
    if not smoothing:
        raise UsageError(
            "the KV scales were measured with smoothing, which is not in use",
            hint="name the file that they are from as --kv-profile",
        )
    measured = "with other smoothing than" if scales.smoothing else "without the smoothing of"
    raise UsageError(
        f"the KV scales were measured {measured} the KV profile",
        hint="leave out --kv-scales: the profile has scales of its own",
    )


def _check_rotation(scales: KVScales, spec: SegmentSpec) -> None:
    for side, type_name, ours, theirs in (
        ("K", spec.type_k, spec.rotation_k, scales.rotation_k),
        ("V", spec.type_v, spec.rotation_v, scales.rotation_v),
    ):
        if KV_FORMATS[type_name].scales_by_head and ours != theirs:
            was, wanted = (f"rotated by {n}" if n else "not rotated" for n in (theirs, ours))
            raise UsageError(
                f"the KV scales were measured with {side} {was}, but it is to be {wanted}",
                hint="measure and use them with the same --kv-rotation",
            )


def write_kv_scales(path: str | os.PathLike[str], scales: KVScales) -> None:
    """Write a file of scales.

    Raises:
        UsageError: it can't be written.
    """
    text = json.dumps(
        {"kind": SCALES_KIND, "version": SCALES_VERSION, **asdict(scales)}, ensure_ascii=False
    )
    try:
        write_whole(path, (text + "\n").encode(errors="replace"))
    except OSError as error:
        raise UsageError(f"the KV scales {printable(path)}: {error.strerror}") from error


def read_kv_scales(path: str | os.PathLike[str]) -> KVScales:
    """Read the scales of a file of scales or of a KV profile.

    Raises:
        UsageError: it can't be read, or is not such a file, or holds an impossible value.
    """
    what = f"the KV scales {printable(path)}"
    try:
        data = json.loads(read_input(path, _MOST_SCALES, what))
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{what}: not a JSON file") from error
    if isinstance(data, dict) and data.get("kind") == KIND:
        scales = read_profile(path).scales()
        if scales is None:
            raise UsageError(f"{what}: the heads of its layers differ, so it has no scales")
        return scales
    if not isinstance(data, dict) or data.get("kind") != SCALES_KIND:
        raise UsageError(
            f"{what}: not a file of KV scales",
            hint="localkv perplexity -m MODEL -f TEXT --calibrate-kv FILE makes one",
        )
    if data.get("version") != SCALES_VERSION:
        version = reprlib.repr(data.get("version"))
        raise UsageError(f"{what}: version {version} is not supported, {SCALES_VERSION} is")
    for name in (*_COUNTS, *_ROTATIONS, "n_tokens"):
        if type(data.get(name)) is not int or data[name] < 0:
            raise UsageError(f"{what}: {name} is not a count")
    for name in ("architecture", "name", "smoothing"):
        if not isinstance(data.get(name, "" if name == "smoothing" else None), str):
            raise UsageError(f"{what}: {name} is not a text")
    return KVScales(
        **{name: data[name] for name in ("architecture", "name", *_COUNTS, *_ROTATIONS)},
        n_tokens=data["n_tokens"],
        absmax_k=_heads(data, "absmax_k", what),
        absmax_v=_heads(data, "absmax_v", what),
        smoothing=data.get("smoothing", ""),
    )


def _heads(data: dict[str, Any], name: str, what: str) -> tuple[tuple[float, ...], ...]:
    """The checked rows of one side: [n_layers][n_kv_heads]."""
    n_layers, n_kv_heads = data["n_layers"], data["n_kv_heads"]
    layers = data.get(name)
    if (
        not isinstance(layers, list)
        or len(layers) != n_layers
        or any(not isinstance(heads, list) or len(heads) != n_kv_heads for heads in layers)
    ):
        raise UsageError(
            f"{what}: {name} is not a table of {n_layers} layers x {n_kv_heads} KV heads"
        )
    for i, heads in enumerate(layers):
        for j, value in enumerate(heads):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= LARGEST:
                raise UsageError(
                    f"{what}: {name} of layer {i}, head {j} is {reprlib.repr(value)}, "
                    "not a finite number of 0 or more"
                )
    return tuple(tuple(float(value) for value in heads) for heads in layers)


@dataclass(frozen=True)
class ProfiledCache:
    """What becomes of a cache.

    Attributes:
        cache: with types by layer, if the profile's are taken.
        types: these; None if others are named.
        scales: the profile's, if a type wants them.
        warnings: for the user.
    """

    cache: CacheConfig
    types: TypeList | None = None
    scales: KVScales | None = None
    warnings: tuple[str, ...] = ()


def profiled(
    cache: CacheConfig,
    profile: KVProfile | None,
    bits: float | None,
    *,
    names_types: bool,
    groups: Sequence[CacheGroup],
    n_batch: int,
) -> ProfiledCache:
    """A cache with what a profile has for it.

    Args:
        bits: per value, that the types by layer may take in the cache's context, with their tail
            and sink (`allocated_bits`); None is `DEFAULT_BITS`.
        names_types: the cache's types were chosen, so the profile gives scales only.
        groups: the model's layers.
        n_batch: most tokens of a batch.

    Raises:
        UsageError: no types take so few bits, or `bits` says nothing.
    """
    if profile is None or names_types:
        if bits is not None:
            raise UsageError(
                "kv_bits chooses among the types of a KV profile"
                + (", but types are named" if names_types else ", and there is none"),
                hint="leave it out"
                if names_types
                else "name one: kv_profile, or --kv-profile auto",
            )
        if profile is None:
            return ProfiledCache(cache)
        with_codebooks = replace(
            cache, kv_codebooks=profile.codebooks, smoothing=profile.smoothing_name
        )
        has_codebooks = any(KV_FORMATS[name].n_centroids for name in cache.types)
        scales = profile.scales() if wants_scales(cache.types) else None
        if scales is not None or has_codebooks or profile.smoothing_name:
            warnings = _other_rotation(cache, profile) if has_codebooks else ()
            return ProfiledCache(with_codebooks, scales=scales, warnings=warnings)
        return ProfiledCache(
            cache,
            warnings=(
                "the KV profile is not used: types are named, none uses its scales or codebooks, "
                "and it has no smoothing",
            ),
        )
    types = profile.measured_with(cache.kv_tail, cache.kv_sink).within(
        DEFAULT_BITS if bits is None else bits,
        lambda one: allocated_bits(with_profile_types(cache, one), groups, n_batch),
    )
    warnings = (*_other_rotation(cache, profile), *_other_rows(cache, types))
    cache = replace(
        with_profile_types(cache, types),
        kv_codebooks=profile.codebooks,
        smoothing=profile.smoothing_name,
    )
    scales = profile.scales() if wants_scales(cache.types) else None
    return ProfiledCache(cache, types, scales, warnings)


def with_profile_types(cache: CacheConfig, types: TypeList) -> CacheConfig:
    """A cache with types by layer, and with the tail and the sink that they were measured with
    unless others are chosen."""
    tail = types.kv_tail if cache.kv_tail is None else cache.kv_tail
    sink = types.kv_sink if cache.kv_sink is None else cache.kv_sink
    return with_types(replace(cache, kv_tail=tail, kv_sink=sink), types.layers)


def _other_rows(cache: CacheConfig, types: TypeList) -> tuple[str, ...]:
    return tuple(
        f"the types by layer were measured with a {what} of {measured}, not {chosen}: expect "
        "another quality than the KV profile says"
        for what, measured, chosen in (
            ("tail", types.kv_tail, cache.kv_tail),
            ("sink", types.kv_sink, cache.kv_sink),
        )
        if None not in (measured, chosen) and measured != chosen
    )


def _other_rotation(cache: CacheConfig, profile: KVProfile) -> tuple[str, ...]:
    if cache.kv_rotation == profile.kv_rotation:
        return ()
    return (
        f"the KV profile was measured with kv_rotation {profile.kv_rotation}, not "
        f"{cache.kv_rotation}: expect another quality than it says",
    )
