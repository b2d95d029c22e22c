"""Machine code of C callbacks, independent of the process that compiled it, and how it is linked.

Numba's own cache restores a function for further compilation. For that it fills its tables of types
and operators first, which takes longer than to load all the kernels of a model. Workers are only
called, by address: an object file, linked by LLVM, is enough, and Numba is not even imported.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import io
import json
import re
import sys
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from localkv.simd.cpu_features import CPU_FEATURES, CPU_NAME

_CALLBACK = re.compile(r"\n[@]cfunc\(.*\ndef (\w+)")  # "^" would be tried everywhere
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Function:
    """One callback.

    Attributes:
        symbol: its name in the object file.
        needs: symbols that the process must have.
        code: the object file.
    """

    symbol: str
    needs: tuple[str, ...]
    code: bytes


Functions = dict[str, Function]
"""The callbacks of a module by their Python names."""


def callbacks(source: str) -> list[str]:
    """The names of the C callbacks that a module's source has."""
    return _CALLBACK.findall(source)


def target() -> tuple[str, str, str]:
    """The system, the CPU and its features that kernels are compiled for, as Numba lists them."""
    return llvm.get_process_triple(), CPU_NAME, CPU_FEATURES


def toolchain() -> str:
    """What machine code depends on, its source aside."""
    versions = f"{_numba_version()} {llvmlite.__version__} {sys.version_info[:2]}"
    return f"{versions} {target()}"


def _numba_version() -> str:
    """Numba's version, or the file that says it: Numba is imported only to compile."""
    spec = importlib.util.find_spec("numba")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).with_name("_version.py")
        if path.exists():
            return path.read_text(encoding="utf-8")
    from importlib.metadata import version  # takes a while to import

    return version("numba")


FAILED = "localkv_kernel_failed"
"""The symbol of what a callback calls if it ends with an error, such as a division by 0."""


@ctypes.CFUNCTYPE(None)
def _failed() -> None:
    # Python says so on stderr: there is nobody to catch it
    raise RuntimeError("a kernel ended with an error, and its results are wrong; please report it")


@functools.cache
def prepare() -> Any:
    """LLVM's description of this system, once LLVM can link code that needs `FAILED`."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.add_symbol(FAILED, ctypes.cast(_failed, ctypes.c_void_p).value)
    return llvm.Target.from_triple(llvm.get_process_triple())


@functools.cache
def _engine() -> Any:
    """What links all functions, and owns their code: an engine for each would take eight times as
    long. Their names differ, and a file has no other names that the next one could mean."""
    machine = prepare().create_target_machine(jit=True)
    # the first engine lets LLVM find the symbols of this process
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


_one_at_a_time = threading.Lock()


def link(function: Function) -> int:
    """The address of a function; 0 if its code is damaged or this process lacks what it needs."""
    with _one_at_a_time:
        engine = _engine()
        if any(llvm.address_of_symbol(name) is None for name in function.needs):
            return 0
        code = llvm.ObjectFileRef.from_data(function.code)
        if not code._ptr:  # LLVM found no object file there; it would follow the null pointer
            return 0
        engine.add_object_file(code)
        engine.finalize_object()
        return int(engine.get_function_address(function.symbol))


def pack(name: str, functions: Functions) -> bytes:
    """The functions of a module as a file: a ZIP archive after the SHA-256 of name and archive."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        index = {key: [f.symbol, *f.needs] for key, f in functions.items()}
        archive.writestr(zipfile.ZipInfo("index.json"), json.dumps(index))
        for key, function in functions.items():
            archive.writestr(zipfile.ZipInfo(key), function.code)
    return _digest(name, file.getvalue()) + file.getvalue()


def _digest(name: str, archive: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + archive).digest()


def unpack(name: str, data: bytes) -> Functions | None:
    """The functions of a file, or None if it is damaged or another module's."""
    content = data[_DIGEST_BYTES:]
    if _digest(name, content) != data[:_DIGEST_BYTES]:
        return None
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            index = json.loads(archive.read("index.json"))
            functions = {
                key: Function(symbol, tuple(needs), archive.read(key))
                for key, (symbol, *needs) in index.items()
            }
    except Exception:  # zipfile has a dozen ways to say that something is none
        return None
    words = [word for f in functions.values() for word in (f.symbol, *f.needs)]
    return functions if all(isinstance(word, str) for word in words) else None
