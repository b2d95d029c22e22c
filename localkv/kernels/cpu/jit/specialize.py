"""Kernels that are compiled once per parameter value and stay compiled across processes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping

from localkv.kernels.cpu.jit.compile_ahead import compiled, tell
from localkv.kernels.cpu.jit.kernel_source import KernelSource, stored
from localkv.kernels.cpu.jit.machine_code import Functions, link


def _addresses(functions: Functions) -> dict[str, int] | None:
    addresses = {name: link(function) for name, function in functions.items()}
    return addresses if all(addresses.values()) else None


_one_at_a_time = threading.RLock()
"""Models that are loaded at the same time need the same kernels."""


@functools.cache
def specialized(source: KernelSource) -> Mapping[str, int]:
    """The addresses of a kernel's callbacks by name; compiles them if no process has before."""
    with _one_at_a_time:
        addresses = _linked(source)
        tell()
        return addresses


def _linked(source: KernelSource) -> Mapping[str, int]:
    found = stored(source)
    if found is not None and (addresses := _addresses(found)) is not None:
        return addresses
    addresses = _addresses(compiled(source))
    if addresses is None:
        raise RuntimeError(f"{source.template} was compiled but does not link")
    return addresses
