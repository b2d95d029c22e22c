"""Names for what compiled functions, and the functions that emit their instructions, take and give.

Numba finds types out by itself, and llvmlite has none for mypy: these are for readers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import typing
from numba.core.base import BaseContext

# of compiled functions

Address = int
"""Where memory starts, in bytes; what reads and writes it takes a NumPy array, too."""
Addresses = tuple[int, ...]
Count = int
Float = Any
"""A float32."""
Lanes = Any
"""A vector of 16 lanes: F32x16, I32x16 or Mask16."""
Vectors = tuple[Any, ...]
"""Vectors that stay in registers, in the order that the function says."""

# of intrinsics and what they emit

Typing = typing.BaseContext
Kind = Any
"""The type of an argument: one of Numba's, or ours of vectors."""
Intrinsic = tuple[typing.Signature, Callable[..., Any]]
"""A signature, and what emits the instructions."""
Target = BaseContext
Builder = ir.IRBuilder
Signature = typing.Signature
Value = ir.Value
"""A number or vector that exists when the code runs."""
Args = Sequence[ir.Value]
