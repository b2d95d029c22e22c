"""Machine code of Numba's C callbacks, independent of the process that compiled it.

Numba's own cache restores a function for further compilation, and for that it fills its tables of
types and operators first, which takes longer than to load all the kernels of a model. Workers are
only called, by address: an object file, linked by LLVM, is enough.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import types
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from localkv.kernels.cpu.jit.parameters import Value, give

_DIGEST_BYTES = hashlib.sha256().digest_size
_LINKED = list[Any]()
"""LLVM's engines own the code that they linked."""


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


def toolchain() -> str:
    """What machine code depends on besides its source."""
    target = cpu_target.target_context.codegen().magic_tuple()
    return f"{numba.__version__} {llvmlite.__version__} {sys.version_info[:2]} {target}"


def compile_source(
    name: str, source: str, parameters: Mapping[str, Value] | None = None
) -> Functions:
    """Run the source of a module with some parameters; its `cfunc`s are compiled by that."""
    module = types.ModuleType(name)
    give(module, parameters or {})
    sys.modules[name] = module
    exec(compile(source, f"<{name}>", "exec"), module.__dict__)
    return {
        key: _function(value) for key, value in vars(module).items() if isinstance(value, CFunc)
    }


def _function(callback: Any) -> Function:
    library = callback._library
    if library.has_dynamic_globals:
        raise ValueError(f"{callback.__name__} holds addresses of the process that compiles it")
    module = library._final_module
    needs = [
        item.name
        for item in (*module.functions, *module.global_variables)
        if item.is_declaration and not item.name.startswith("llvm.")
    ]
    _, _, (code, _) = library.serialize_using_object_code()
    return Function(callback.native_name, tuple(needs), bytes(code))


def link(function: Function) -> int:
    """The address of a function; 0 if its code is damaged or this process lacks what it needs."""
    rtsys.initialize(cpu_target.target_context)  # the process has Numba's symbols then
    if any(llvm.address_of_symbol(name) is None for name in function.needs):
        return 0
    code = llvm.ObjectFileRef.from_data(function.code)
    if not code._ptr:  # LLVM found no object file there; it would follow the null pointer
        return 0
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(code)
    engine.finalize_object()
    _LINKED.append(engine)
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
    """The functions of a file, or None if it is damaged or that of another module."""
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
