"""Where the sources of kernels come from, and where their machine code is kept.

A specialised kernel is an ordinary module, run with other parameters (`jit/parameters.py`). Its
machine code is carried by the package (`jit/carried_kernels.py`), or it is a file in the user's
cache folder. It is named by a hash of the source, its parameters, the modules that it imports,
directly or not, and the CPU; in the user's folder also by the compiler. So machine code follows any
change of what it was made of, without a list to keep.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from localkv.kernels.cpu.jit.carried_kernels import carried, carried_names
from localkv.kernels.cpu.jit.kernel_folder import (
    mark_used,
    read_kernel,
    remove_unused,
    usable_folder,
    write_kernel,
)
from localkv.kernels.cpu.jit.machine_code import Functions, callbacks, pack, toolchain, unpack
from localkv.kernels.cpu.jit.parameters import Value
from localkv.simd.cpu_features import CPU_FEATURES, CPU_NAME

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[3]
_PARAMETER = re.compile(r"parameter\(\"(\w+)\"")
_IMPORT = re.compile(r"\nfrom (localkv[\w.]*) import (\([^)]*\)|[^\n]*)|\nimport (localkv[\w.]*)")
"""An import at the start of a line, which runs with the module; tests compare what this finds with
Python's own parser, which takes 30 times as long."""
COMPILER = "localkv.kernels.cpu.jit.compiler"
BY_NAME = {"localkv.quant_formats.base": ("quant_formats", "cpu")}
"""Modules that import others by a name that they make up: the packages in a folder, and the modules
of these whose names begin with a word."""


@dataclass(frozen=True)
class _Module:
    """A source file of the package: the hash of its name and text, and names that it imports.

    Only names of this package are kept; some may be functions, not modules.
    """

    digest: bytes
    imports: tuple[str, ...]


@functools.cache
def _read(name: str) -> _Module | None:
    """The module of a dotted name, or None if there is none."""
    path = _path(name)
    for file_name in (f"{path}.py", f"{path}/__init__.py"):
        try:
            with open(file_name, "rb", buffering=0) as file:
                content = file.read()
            break
        except (FileNotFoundError, NotADirectoryError):
            continue
    else:
        return None
    names = imported(content.decode())
    if name in BY_NAME:
        names += _named(*BY_NAME[name])
    digest = hashlib.sha256(name.encode() + b"\0" + content)
    return _Module(digest.digest(), tuple(dict.fromkeys(names)))


@functools.cache
def _modules(package: str) -> frozenset[str]:
    """The names of the modules and packages in a package; none in what is no package."""
    try:
        files = os.listdir(_path(package))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    return frozenset(file.removesuffix(".py") for file in files)


def _path(name: str) -> str:
    """Where a module or package is, without a suffix."""
    return f"{PACKAGE}{name.removeprefix('localkv').replace('.', '/')}"


def imported(source: str) -> list[str]:
    """The modules of this package that a module imports when it runs, as names."""
    names = list[str]()
    for origin, items, module in _IMPORT.findall("\n" + source):
        names.append(origin or module)
        if origin and (modules := _modules(origin)):
            found = re.findall(r"\w+", items)
            names += [f"{origin}.{item}" for item in found if item in modules]
    return names


def _named(folder: str, prefix: str) -> list[str]:
    """The packages in `folder`, and the modules in each whose names begin with `prefix`."""
    names = list[str]()
    with os.scandir(PACKAGE / folder) as entries:
        for entry in entries:
            if entry.is_dir() and entry.name != "__pycache__":
                names.append(f"localkv.{folder}.{entry.name}")
                names += [
                    f"localkv.{folder}.{entry.name}.{file_name.removesuffix('.py')}"
                    for file_name in os.listdir(entry.path)
                    if file_name.startswith(prefix) and file_name.endswith(".py")
                ]
    return names


def built_on(*names: str) -> dict[str, bytes]:
    """The modules that some modules import, and those that these import, with their hashes."""
    found, todo = dict[str, bytes](), [*names]
    while todo:
        name = todo.pop()
        if name not in found and (module := _read(name)) is not None:
            found[name] = module.digest
            todo += module.imports
    return found


@functools.cache
def _foundation(template: str) -> bytes:
    """A hash of a template, of all that it imports, and of the code that compiles it."""
    digest = hashlib.sha256()
    name = f"localkv.kernels.cpu.{template.replace('/', '.')}"
    digest.update(b"".join(sorted(built_on(name, COMPILER).values())))
    return digest.digest()


@dataclass(frozen=True)
class KernelSource:
    """A module of `localkv.kernels.cpu` with other constants.

    Attributes:
        template: the path of a module of C callbacks below `kernels/cpu`, without its suffix.
        parameters: values for those that the template asks for; the others keep its own.

    Raises:
        ValueError: (on first use) the template has no such parameter.
    """

    template: str
    parameters: Mapping[str, Value] = field(default_factory=dict, hash=False)

    @functools.cached_property
    def text(self) -> str:
        path = PACKAGE / "kernels" / "cpu" / f"{self.template}.py"
        text = path.read_text(encoding="utf-8")
        known = _PARAMETER.findall(text)
        for name in self.parameters:
            if name not in known:
                raise ValueError(f"{self.template} has no parameter {name}, but {known}")
        return text

    @functools.cached_property
    def carried_name(self) -> str:
        """Unique for what the source says and is built on, and for the CPU's level."""
        parameters = json.dumps(dict(self.parameters), sort_keys=True)
        content = (parameters, CPU_NAME, CPU_FEATURES, self.text)
        digest = hashlib.sha256(_foundation(self.template) + "\0".join(content).encode())
        return f"localkv_{self.template.replace('/', '_')}_{digest.hexdigest()[:16]}"

    @functools.cached_property
    def name(self) -> str:
        """`carried_name` for the compiler at hand, too."""
        digest = hashlib.sha256(f"{self.carried_name} {toolchain()}".encode())
        return f"localkv_{self.template.replace('/', '_')}_{digest.hexdigest()[:16]}"

    @property
    def callbacks(self) -> list[str]:
        """The names of its functions."""
        return callbacks(self.text)

    def compile(self) -> Functions:
        from localkv.kernels.cpu.jit.compiler import compile_source  # imports Numba

        return compile_source(self.name, self.text, self.parameters)


def is_stored(source: KernelSource) -> bool:
    """Whether the package carries it, or an earlier process has compiled it."""
    if source.carried_name in carried_names():
        return True
    folder = usable_folder()
    return folder is not None and (folder / source.name).exists()


def stored(source: KernelSource) -> Functions | None:
    """What the package carries or an earlier process has compiled, if it is there and whole."""
    data = carried(source.carried_name)
    if data is not None:
        if (functions := _whole(source, source.carried_name, data)) is not None:
            return functions
        logger.warning("a kernel that the package carries is damaged: %s", source.carried_name)
    folder = usable_folder()
    if folder is None:
        return None
    try:
        data = read_kernel(folder / source.name)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("cannot read a compiled kernel: %s", error)
        return None
    if (functions := _whole(source, source.name, data)) is None:
        logger.warning("a compiled kernel is damaged and compiled anew: %s", folder / source.name)
        return None
    mark_used(folder / source.name)
    return functions


def _whole(source: KernelSource, name: str, data: bytes) -> Functions | None:
    """The packed functions of a kernel; None if they are damaged or not all there."""
    functions = unpack(name, data)
    if functions is None or sorted(functions) != sorted(source.callbacks):
        return None
    return functions


def store(source: KernelSource, functions: Functions) -> None:
    """Keep machine code for later processes, if the folder can be written.

    What no process has taken for long is removed then: each version adds files.
    """
    folder = usable_folder()
    if folder is None:
        return
    try:
        write_kernel(folder / source.name, pack(source.name, functions))
        remove_unused(folder)
    except OSError as error:
        _said(folder, error.strerror or str(error))


_one_says_it = threading.Lock()
"""Threads store kernels at the same time, and `functools.cache` lets each of them in."""


def _said(folder: Path, reason: str) -> None:
    """Once, and not for each of a model's kernels."""
    with _one_says_it:
        _say_once(folder, reason)


@functools.cache
def _say_once(folder: Path, reason: str) -> None:
    logger.warning("compiled kernels are not kept in %s: %s", folder, reason)
