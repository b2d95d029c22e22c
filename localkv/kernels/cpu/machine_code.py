"""Machine code of Numba's C callbacks, apart from the process that compiled it.

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
from dataclasses import dataclass
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

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


def compile_source(name: str, source: str) -> Functions:
    """Run the source of a module; its `cfunc`s are compiled by that."""
    module = types.ModuleType(name)
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
    """The address of a function, or 0 if this process lacks what it needs."""
    rtsys.initialize(cpu_target.target_context)  # the process has Numba's symbols then
    if any(llvm.address_of_symbol(name) is None for name in function.needs):
        return 0
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(function.code))
    engine.finalize_object()
    _LINKED.append(engine)
    return int(engine.get_function_address(function.symbol))


def pack(functions: Functions) -> bytes:
    """As a file: a ZIP archive after its SHA-256."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        index = {name: [f.symbol, *f.needs] for name, f in functions.items()}
        archive.writestr("index.json", json.dumps(index))
        for name, function in functions.items():
            archive.writestr(name, function.code)
    return hashlib.sha256(file.getvalue()).digest() + file.getvalue()


def unpack(data: bytes) -> Functions | None:
    """The functions of a file, or None if it is damaged."""
    file = data[_DIGEST_BYTES:]
    if hashlib.sha256(file).digest() != data[:_DIGEST_BYTES]:
        return None
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        index = json.loads(archive.read("index.json"))
        return {
            name: Function(symbol, tuple(needs), archive.read(name))
            for name, (symbol, *needs) in index.items()
        }
