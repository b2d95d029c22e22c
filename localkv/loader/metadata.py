"""Keys and values of a model file, with getters that check types and ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Final, Literal, TypeVar, cast

from localkv.errors import ModelFileError, quoted
from localkv.loader.gguf_header import LazyArray
from localkv.loader.number_ranges import first_outside, range_of


class _Required(Enum):
    """The default of a getter that has none."""

    REQUIRED = "required"


_REQUIRED: Final = _Required.REQUIRED
_Default = TypeVar("_Default")
_NoDefault = Literal[_Required.REQUIRED]


class Metadata(Mapping[str, object]):
    """Keys and values of a header, as Python's str, int, float, bool and lists of those.

    Arrays are decoded on first use: a tokenizer's are most of a header, and few callers want them.

    The getters check the type, and numbers against the range of the key (`number_ranges`). They
    return `default` if the key is missing and raise `ModelFileError` if there is no default, or if
    the value is of another type or out of its range. An empty array is an array of any type.

    Args:
        values: the decoded values; a value may be an array that is still to be decoded.
        source: the file, for error messages.
    """

    def __init__(self, values: Mapping[str, object], source: str = "metadata") -> None:
        self._values = dict(values)
        self._source = source

    def __getitem__(self, key: str) -> object:
        value = self._values[key]
        if isinstance(value, LazyArray):
            value = self._values[key] = value.decode()
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<Metadata of {self._source}: {len(self)} keys>"

    def string(self, key: str, default: _Default | _NoDefault = _REQUIRED) -> str | _Default:
        """The value of `key`, a string."""
        return cast("str | _Default", self._scalar(key, default, (str,), "a string"))

    def integer(self, key: str, default: _Default | _NoDefault = _REQUIRED) -> int | _Default:
        """The value of `key`, an integer of any width (a boolean is not one)."""
        value = self._scalar(key, default, (int,), "an integer")
        return cast("int | _Default", self._in_range(key, value))

    def number(self, key: str, default: _Default | _NoDefault = _REQUIRED) -> float | _Default:
        """The value of `key`, a float or an integer, as a float."""
        value = self._in_range(key, self._scalar(key, default, (float, int), "a number"))
        return float(cast(float, value)) if key in self else cast(_Default, value)

    def boolean(self, key: str, default: _Default | _NoDefault = _REQUIRED) -> bool | _Default:
        """The value of `key`, a boolean."""
        return cast("bool | _Default", self._scalar(key, default, (bool,), "a boolean"))

    def strings(self, key: str, default: _Default | _NoDefault = _REQUIRED) -> list[str] | _Default:
        """The value of `key`, an array of strings."""
        values = self._array(key, default, {str}, "an array of strings")
        return cast("list[str] | _Default", values)

    def integers(
        self, key: str, default: _Default | _NoDefault = _REQUIRED
    ) -> list[int] | _Default:
        """The value of `key`, an array of integers of any width."""
        values = self._array(key, default, {int}, "an array of integers")
        return cast("list[int] | _Default", self._all_in_range(key, values))

    def numbers(
        self, key: str, default: _Default | _NoDefault = _REQUIRED
    ) -> list[float] | _Default:
        """The value of `key`, an array of floats or of integers, as floats."""
        values = self._array(key, default, {float, int}, "an array of numbers")
        if key not in self:
            return cast(_Default, values)
        self._all_in_range(key, values)
        return [float(value) for value in cast("list[float]", values)]

    def booleans(
        self, key: str, default: _Default | _NoDefault = _REQUIRED
    ) -> list[bool] | _Default:
        """The value of `key`, an array of booleans."""
        return cast(
            "list[bool] | _Default", self._array(key, default, {bool}, "an array of booleans")
        )

    def _scalar(self, key: str, default: object, types: tuple[type, ...], expected: str) -> object:
        value = self._value(key, default)
        if key in self and type(value) not in types:
            raise self._mismatch(key, value, expected)
        return value

    def _array(self, key: str, default: object, types: set[type], expected: str) -> object:
        value = self._value(key, default)
        if key in self and not (isinstance(value, list) and set(map(type, value)) <= types):
            raise self._mismatch(key, value, expected)
        return value

    def _in_range(self, key: str, value: object) -> object:
        if key in self and not range_of(key).holds(cast(float, value)):
            raise self._out_of_range(key, "", value)
        return value

    def _all_in_range(self, key: str, values: object) -> object:
        if key in self:
            items = cast("list[float]", values)
            at = first_outside(key, items)
            if at is not None:
                raise self._out_of_range(key, f" at item {at}", items[at])
        return values

    def _out_of_range(self, key: str, where: str, value: object) -> ModelFileError:
        return ModelFileError(
            f"{self._source}: key {quoted(key)} is {value}{where}, expected {range_of(key)}"
        )

    def _value(self, key: str, default: object) -> object:
        if key in self:
            return self[key]
        if default is _REQUIRED:
            raise ModelFileError(f"{self._source}: missing key {quoted(key)}")
        return default

    def _mismatch(self, key: str, value: object, expected: str) -> ModelFileError:
        found = _type_of(value)
        return ModelFileError(f"{self._source}: key {quoted(key)} is {found}, expected {expected}")


_TYPE_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}


def _type_of(value: object) -> str:
    """A value's kind, for a message: "a string", "an array of integers"."""
    name = _TYPE_NAMES.get(type(value), type(value).__name__)
    if isinstance(value, list) and value:
        name += f" of {_TYPE_NAMES.get(type(value[0]), 'value')}s"
    return f"{'an' if name[0] in 'aei' else 'a'} {name}"
