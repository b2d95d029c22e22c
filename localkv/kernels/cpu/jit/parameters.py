"""Parameters of kernels: constants of a module that a specialised kernel has other values of.

A template says `ROWS = parameter("ROWS", 4)`. Imported like any module, it has the value 4; run by
`compile_source` for a `KernelSource` with parameters, it has the one given there. To Numba either
is a global, and so a constant: branches that it rules out are not even compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import TypeVar

Value = int | str
"""A parameter's value: an integer, a truth value or a name."""

T = TypeVar("T", bound=Value)

_GIVEN = "__parameters__"


def give(module: ModuleType, values: Mapping[str, Value]) -> None:
    """Let a module that is about to run have these values for its parameters."""
    setattr(module, _GIVEN, values)


def parameter(name: str, default: T) -> T:
    """The value of a parameter of the module that calls this.

    Raises:
        TypeError: what it was given is of another type than its default.
    """
    given: Mapping[str, Value] = sys._getframe(1).f_globals.get(_GIVEN, {})
    value = given.get(name, default)
    if type(value) is not type(default):
        raise TypeError(f"{name} is {value!r}, of another type than {default!r}")
    return value
