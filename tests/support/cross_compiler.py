"""Kernels for a CPU of 64-bit ARM, compiled on any other: a program that is asked for them.

It believes to be on one, as `platform`, LLVM and NUMBA_CPU_* tell it, so all branches are ARM's and
Numba makes ARM's machine code, which nobody runs here. A request is a line of JSON, [template,
parameters]. Asked on stdin it says what the machine code holds; asked at a socket (its path is the
argument) it answers as `localkv.kernels.cpu.jit.compile_helper` does.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import platform
import re
import socketserver
import struct
import sys
from typing import Any

TRIPLE = "aarch64-unknown-linux-gnu"
NEOVERSE_N1 = {
    "NUMBA_CPU_NAME": "neoverse-n1",
    "NUMBA_CPU_FEATURES": "+dotprod,+fp-armv8,+fullfp16,+lse,+neon",
}
NEOVERSE_V1 = {
    "NUMBA_CPU_NAME": "neoverse-v1",
    "NUMBA_CPU_FEATURES": NEOVERSE_N1["NUMBA_CPU_FEATURES"] + ",+i8mm",
}
CORTEX_A72 = {"NUMBA_CPU_NAME": "cortex-a72", "NUMBA_CPU_FEATURES": "+fp-armv8,+neon"}
"""Without dot products of bytes."""

_SYMBOLS, _ANYWHERE, _UNDEFINED = 2, 0xFFFF, 0


def believe() -> None:
    """Let all that is imported from now on take this for an ARM CPU on Linux."""
    platform.machine = lambda: "aarch64"
    from llvmlite import binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.get_process_triple = llvm.targets.get_process_triple = lambda: TRIPLE


def undefined_symbols(code: bytes) -> set[str]:
    """Names that an object file (64-bit ELF, little endian) wants of others."""
    assert code[:6] == b"\x7fELF\x02\x01"
    (at,) = struct.unpack_from("<Q", code, 40)
    size, n = struct.unpack_from("<HH", code, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, at + i * size) for i in range(n)]
    names = set[str]()
    for _, kind, _, _, start, n_bytes, link, *_ in sections:
        if kind != _SYMBOLS:
            continue
        strings = sections[link][4]
        for symbol in struct.iter_unpack("<IBBHQQ", code[start : start + n_bytes]):
            name, _, _, section, _, _ = symbol
            if section == _UNDEFINED and name:
                first = strings + name
                names.add(code[first : code.index(b"\0", first)].decode())
    return names


def _describe(template: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The symbols that a kernel wants, and how often it has each instruction."""
    from localkv.kernels.cpu.jit import compiler
    from localkv.kernels.cpu.jit.kernel_source import KernelSource

    listings = list[str]()
    plain = compiler._function

    def with_listing(callback: Any) -> Any:
        listings.append(callback._library.get_asm_str())
        return plain(callback)

    compiler._function = with_listing
    try:
        functions = KernelSource(template, parameters).compile()
    finally:
        compiler._function = plain
    wanted = set[str]().union(*(undefined_symbols(f.code) for f in functions.values()))
    instructions = re.findall(r"^\t([a-z]\w*)", "\n".join(listings), re.MULTILINE)
    return {"symbols": sorted(wanted), "instructions": dict(collections.Counter(instructions))}


class _Compiles(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        from localkv.kernels.cpu.jit.kernel_source import KernelSource
        from localkv.kernels.cpu.jit.machine_code import pack

        for line in self.rfile:
            source = KernelSource(*json.loads(line))
            data = pack(source.name, source.compile())
            self.wfile.write(len(data).to_bytes(8, "little") + data)
            self.wfile.flush()


class _Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    """A process for each of those who ask, which compile at the same time."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: who asked compiles the kernel itself then, and shows what is wrong with it."""


def main() -> None:
    believe()
    if len(sys.argv) > 1:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(sys.argv[1])
        with _Server(sys.argv[1], _Compiles) as server:
            server.serve_forever()
    for line in sys.stdin:
        print(json.dumps(_describe(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
