"""The table of mapped files, and the handlers of SIGBUS that look into it (`bus_errors`)."""

from __future__ import annotations

import ctypes
import os
import weakref
from mmap import PAGESIZE, mmap
from typing import Any

import numpy as np

MOST_MAPS = 1 << 14
"""Mapped files that are watched at a time; parts beyond that end the process as ever."""

_SIGBUS = 7
_SA_SIGINFO, _SA_ONSTACK = 4, 0x08000000
_ADDRESS_AT = 16  # of the address in siginfo_t

_HANDLER = """
target triple = "{triple}"
define void @handle(i32 %signal, ptr %info, ptr %context) {{
start:
  %at = getelementptr i8, ptr %info, i64 {address_at}
  %address = load i64, ptr %at
  br label %look
look:
  %i = phi i64 [0, %start], [%following, %next]
  %more = icmp ult i64 %i, {most}
  br i1 %more, label %compare, label %foreign
compare:
  %map = getelementptr [4 x i64], ptr inttoptr (i64 {table} to ptr), i64 %i
  %first = load volatile i64, ptr %map
  %distance = sub i64 %address, %first
  %bytes_at = getelementptr i64, ptr %map, i64 1
  %bytes = load volatile i64, ptr %bytes_at
  %inside = icmp ult i64 %distance, %bytes
  br i1 %inside, label %ours, label %next
next:
  %following = add i64 %i, 1
  br label %look
ours:
  %line_at = getelementptr i64, ptr %map, i64 2
  %line = load i64, ptr %line_at
  %length_at = getelementptr i64, ptr %map, i64 3
  %length = load i64, ptr %length_at
  call i64 inttoptr (i64 {write} to ptr)(i32 2, i64 %line, i64 %length)
  call void inttoptr (i64 {exit} to ptr)(i32 1)
  unreachable
foreign:
  call i32 inttoptr (i64 {sigaction} to ptr)(i32 {signal}, i64 {former}, i64 0)
  call i32 inttoptr (i64 {again} to ptr)(i32 {signal})
  ret void
}}
"""


class _SigAction(ctypes.Structure):
    """glibc's and musl's `struct sigaction` on 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_ACTION_BYTES = ctypes.sizeof(_SigAction)
_HANDLER_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class BusErrorGuard:
    """The mapped files that are watched, and the handler that is installed.

    A row is the first address, the bytes, and the address and length of the line to be written. A
    row of no bytes is free.
    """

    def __init__(self) -> None:
        self.table = np.zeros((MOST_MAPS, 4), np.uint64)
        self.free = list(range(MOST_MAPS - 1, -1, -1))
        self.former = _SigAction()  # gets signals that are not ours
        self.replaced = _SigAction()
        self.kept: list[object] = []

    def add(self, data: mmap, line: bytes) -> None:
        if not self.free:
            return
        row, text = self.free.pop(), ctypes.create_string_buffer(line)
        address = np.frombuffer(data, np.uint8).ctypes.data
        self.table[row, [0, 2, 3]] = address, ctypes.addressof(text), len(line)
        self.table[row, 1] = -(-len(data) // PAGESIZE) * PAGESIZE
        weakref.finalize(data, self._remove, row, text).atexit = False

    def _remove(self, row: int, text: object) -> None:
        self.table[row, 1] = 0
        self.free.append(row)

    def line_at(self, address: int) -> bytes | None:
        """The line of the mapped file that an address is in."""
        inside = np.uint64(address) - self.table[:, 0] < self.table[:, 1]
        if not inside.any():
            return None
        _, _, text, length = map(int, self.table[int(inside.argmax())])
        return ctypes.string_at(text, length)

    def use_python(self) -> None:
        """Install the handler that needs Python's lock."""
        handler = _python_handler(self)
        self._install(_address(handler))
        ctypes.memmove(ctypes.byref(self.former), ctypes.byref(self.replaced), _ACTION_BYTES)
        self.kept.append(handler)

    def use_machine_code(self) -> None:
        """Install the one that needs nothing, in its place."""
        handler, engine = _native_handler(self)
        self._install(handler)
        self.kept.append(engine)

    def _install(self, handler: int) -> None:
        action = _SigAction(handler=handler, flags=_SA_SIGINFO | _SA_ONSTACK)
        ctypes.CDLL(None).sigaction(_SIGBUS, ctypes.byref(action), ctypes.byref(self.replaced))


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _python_handler(guard: BusErrorGuard) -> Any:
    def handle(number: int, info: int, context: int) -> None:
        address = ctypes.c_uint64.from_address(info + _ADDRESS_AT).value
        if (line := guard.line_at(address)) is not None:
            os.write(2, line)
            os._exit(1)
        libc = ctypes.CDLL(None)
        libc.sigaction(_SIGBUS, ctypes.byref(guard.former), None)
        libc["raise"](_SIGBUS)

    return _HANDLER_TYPE(handle)


def _native_handler(guard: BusErrorGuard) -> tuple[int, object]:
    """The address of the handler without Python, and the object that keeps its code."""
    import llvmlite.binding as llvm

    libc = ctypes.CDLL(None)

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple = llvm.get_process_triple()
    module = llvm.parse_assembly(
        _HANDLER.format(
            triple=triple,
            address_at=_ADDRESS_AT,
            most=MOST_MAPS,
            table=guard.table.ctypes.data,
            write=_address(libc.write),
            exit=_address(libc._exit),
            sigaction=_address(libc.sigaction),
            again=_address(libc["raise"]),
            signal=_SIGBUS,
            former=ctypes.addressof(guard.former),
        )
    )
    # LLVM's optimiser would take twice the memory, for a few instructions
    machine = llvm.Target.from_triple(triple).create_target_machine(jit=True, opt=0)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return int(engine.get_function_address("handle")), engine
