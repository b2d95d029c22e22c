"""Compiling a kernel with Numba, which this module imports: only a process that compiles needs it.

A kernel is some C callbacks and what they inline. Numba would optimise each of its functions alone,
make machine code of it, and wrap it for Python and for C, before it is inlined into the next. That
takes longer than all the rest, so it is left out here. Functions are lowered to LLVM's language.
Only callbacks, which they are put together in, are optimised and become machine code.
"""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import _dynfunc
from numba.core import cgutils
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from localkv.kernels.cpu.jit.machine_code import (
    FAILED,
    Function,
    Functions,
    callbacks,
    prepare,
    target,
)
from localkv.kernels.cpu.jit.parameters import Value, give
from localkv.simd.vector import choose_cpu
from localkv.system.this_process import uncollected

_REFUSE = ctypes.cast(ctypes.pythonapi.PyErr_NoMemory, ctypes.c_void_p).value
"""Called in place of a function that has no machine code of its own: it raises."""


def compile_source(
    name: str, source: str, parameters: Mapping[str, Value] | None = None
) -> Functions:
    """Run the source of a module with some parameters; its `cfunc`s are compiled by that.

    Raises:
        RuntimeError: Numba compiles for another CPU than `simd/cpu_features.py` says.
    """
    prepare()
    module = types.ModuleType(name)
    give(module, parameters or {})
    sys.modules[name] = module
    with global_compiler_lock, uncollected(), _callbacks_alone(name, callbacks(source)):
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


class _Library(JITCodeLibrary):
    """The code of one function; only a callback's is finished.

    Attributes:
        callback: the C function's name, if it is one.
    """

    callback = ""

    def _optimize_final_module(self) -> None:
        if self.callback:
            super()._optimize_final_module()

    def _finalize_final_module(self) -> None:
        if self.callback:
            self._hide_all_else()
            super()._finalize_final_module()
        else:
            self._finalize_dynamic_globals()
            self._finalized = True

    def _hide_all_else(self) -> None:
        """Leave the callback as the only name that other object files see: processes count
        functions from the start, so that two files could have different functions of one name."""
        module = self._final_module
        for item in (*module.functions, *module.global_variables):
            is_own = item.name == self.callback or item.name.startswith("llvm.")
            if not item.is_declaration and not is_own:
                item.linkage = "internal"


def _context() -> Any:
    """What Numba compiles with, for the CPU that `simd/cpu_features.py` has found."""
    _, name, features = target()
    choose_cpu()
    context = cpu_target.target_context
    found = context.codegen().magic_tuple()[1:]
    if found != (name, features):
        raise RuntimeError(f"Numba compiles for {found[0]} ({found[1]}), not {name} ({features})")
    return context


@contextmanager
def _callbacks_alone(module_name: str, names: list[str]) -> Iterator[None]:
    """Let Numba make machine code of callbacks only, and let them need no symbols of Numba's."""
    context = _context()
    codegen = context.codegen()

    def create_cfunc_wrapper(library: Any, function: Any, env: Any, call_helper: Any) -> None:
        if function.modname == module_name and function.qualname in names:
            library.callback = function.llvm_cfunc_wrapper_name
            library.add_ir_module(_wrapper(context, function))

    def create_cpython_wrapper(*args: Any, **options: Any) -> None:
        pass

    def get_executable(library: Any, function: Any, env: Any) -> Any:
        module, name = function.lookup_module(), function.qualname.rpartition(".")[2]
        return _dynfunc.make_function(module, name, "", _REFUSE, env, (library,))

    overrides = (create_cfunc_wrapper, create_cpython_wrapper, get_executable)
    for override in overrides:
        setattr(context, override.__name__, override)
    codegen._library_class = _Library
    try:
        yield
    finally:
        del codegen._library_class
        for override in overrides:
            delattr(context, override.__name__)


def _wrapper(context: Any, function: Any) -> Any:
    """A C function that calls one of Numba's, and `FAILED` if that ends with an error."""
    module = context.create_module("cfunc_wrapper")
    convention = context.call_conv
    kind = convention.get_function_type(function.restype, function.argtypes)
    callee = ir.Function(module, kind, function.llvm_func_name)
    arguments = [context.get_value_type(kind) for kind in function.argtypes]
    kind = ir.FunctionType(context.get_value_type(function.restype), arguments)
    wrapper = ir.Function(module, kind, function.llvm_cfunc_wrapper_name)
    builder = ir.IRBuilder(wrapper.append_basic_block("entry"))
    status, out = convention.call_function(
        builder, callee, function.restype, function.argtypes, wrapper.args, attrs=("noinline",)
    )
    with builder.if_then(status.is_error, likely=False):
        nothing = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(module, nothing, FAILED), [])
    builder.ret(out)
    return module
