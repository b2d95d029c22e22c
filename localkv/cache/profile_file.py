"""The file of a KV profile: JSON, checked in every part before anything of it is used. Keys that
this version does not know are refused: nothing that was measured is left out in silence."""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import reprlib
import struct
from collections.abc import Collection
from dataclasses import asdict
from typing import Any, NoReturn

from localkv.cache.profile import KVProfile, LayerFacts, LayerTypes, SideFacts, TypeList
from localkv.config import KV_ROTATIONS, MOST_EXACT
from localkv.errors import UsageError, printable
from localkv.formats import KV_FORMATS
from localkv.formats.shared.codebooks import Codebook, check_codebook
from localkv.system.input_file import read_input
from localkv.system.whole_file import write_whole

KIND, VERSION = "localkv KV profile", 1
MOST_BYTES = 64 << 20
MOST_LAYERS, MOST_CHANNELS = 1 << 12, 1 << 16
"""Of a model, and of all heads of a layer."""

HINT = "localkv calibrate -m MODEL -o FILE makes one"
LARGEST_EXPONENT = 8
"""Of a channel that is smoothed, up or down."""

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
        data = json.loads(read_input(path, MOST_BYTES, what), parse_constant=_no_number)
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
    """Of little endian float16."""
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
        if not isinstance(name, str) or name not in KV_FORMATS:
            self._fail(f"{where} names {reprlib.repr(name)}, which is no cache type")
        return name

    def _pairs(self, data: object) -> dict[str, float]:
        if not isinstance(data, dict):
            self._fail("pairs is not an object")
        for name in data:
            k, _, v = name.partition("/")
            self._type(k, "pairs")
            self._type(v, "pairs")
        return {name: self._number(value, "pairs") for name, value in data.items()}

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
            for name, side in ((k, layer.k), (v, layer.v)):
                if side.n_channels % KV_FORMATS[self._type(name, where)].block_size:
                    self._fail(f"{where} name {name} for {side.n_channels} channels")
            types.append((k, v))
        return tuple(types)


_SIZES = ("n_heads", "n_channels")
