"""Imported, this has kernels made by a cross-compiler (`cross_compiler.py`) at LOCALKV_COMPILER.

Where tests run in an emulator, compiling there takes ten times as long.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
from typing import Any

from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.machine_code import Functions, unpack


@functools.cache
def _compiler() -> Any:
    connection = socket.socket(socket.AF_UNIX)
    atexit.register(connection.close)
    connection.connect(os.environ["LOCALKV_COMPILER"])
    return connection.makefile("rwb")


def _compile(source: KernelSource) -> Functions:
    name = source.name  # what is wrong with a source shows here, not in the other process
    compiler = _compiler()
    request = json.dumps([source.template, dict(source.parameters)])
    compiler.write(request.encode() + b"\n")
    compiler.flush()
    data = compiler.read(int.from_bytes(compiler.read(8), "little"))
    if not data:  # the compiler's process has ended, by an error that shows here, too
        _compiler.cache_clear()
        return _compile_here(source)
    functions = unpack(name, data)
    if functions is None:
        raise RuntimeError(f"{name} was compiled for another CPU")
    return functions


_compile_here = KernelSource.compile
KernelSource.compile = _compile  # type: ignore[method-assign]
