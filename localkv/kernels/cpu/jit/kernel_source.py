"""Where the sources of kernels come from, and where their machine code is kept.

A specialised kernel is an ordinary module, run with other parameters (`jit/parameters.py`). Its
machine code is a file in the user's cache folder, named by a hash of the source, its parameters,
everything it is built on, the compiler and the CPU.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from localkv.kernels.cpu.jit.kernel_folder import (
    mark_used,
    read_kernel,
    remove_unused,
    usable_folder,
    write_kernel,
)
from localkv.kernels.cpu.jit.machine_code import (
    Functions,
    callbacks,
    pack,
    toolchain,
    unpack,
)
from localkv.kernels.cpu.jit.parameters import Value

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[3]
_PARAMETER = re.compile(r"parameter\(\"(\w+)\"")
_BUILT_ON = (
    "simd/*.py",
    "quant_formats/*/__init__.py",
    "quant_formats/*/cpu.py",
    "quant_formats/shared/cpu/*.py",
    "kernels/cpu/attention/channel_digits.py",
    "kernels/cpu/attention/fetch.py",
    "kernels/cpu/attention/job.py",
    "kernels/cpu/attention/latent_job.py",
    "kernels/cpu/attention/latent_sizes.py",
    "kernels/cpu/attention/outliers.py",
    "kernels/cpu/attention/queries.py",
    "kernels/cpu/attention/read_job.py",
    "kernels/cpu/attention/sizes.py",
    "kernels/cpu/attention/softmax.py",
    "kernels/cpu/attention/weigh_digits.py",
    "kernels/cpu/jit/compiler.py",
    "kernels/cpu/jit/helper_state.py",
    "kernels/cpu/jit/machine_code.py",
    "kernels/cpu/jit/parameters.py",
    "kernels/cpu/linear/activation_job.py",
    "kernels/cpu/linear/blocks.py",
    "kernels/cpu/linear/embedding_job.py",
    "kernels/cpu/linear/guess_job.py",
    "kernels/cpu/linear/head_job.py",
    "kernels/cpu/linear/in_place.py",
    "kernels/cpu/linear/job.py",
    "kernels/cpu/linear/late_job.py",
    "kernels/cpu/linear/latent_step_job.py",
    "kernels/cpu/linear/norm_row.py",
    "kernels/cpu/linear/packing.py",
    "kernels/cpu/linear/pair_tiles.py",
    "kernels/cpu/linear/panel_bytes.py",
    "kernels/cpu/linear/read_*.py",
    "kernels/cpu/linear/row_tiles.py",
    "kernels/cpu/linear/rows.py",
    "kernels/cpu/linear/tiles.py",
    "kernels/cpu/linear/turn_row.py",
    "kernels/cpu/linear/units.py",
    "kernels/cpu/linear/unpacked.py",
    "kernels/cpu/moe/job.py",
    "kernels/cpu/moe/read_job.py",
    "kernels/cpu/recurrent/job.py",
    "kernels/cpu/recurrent/read_job.py",
    "kernels/cpu/store/job.py",
    "kernels/cpu/store/page_row.py",
    "kernels/cpu/store/read_job.py",
    "kernels/cpu/store/rotation.py",
    "quant_formats/__init__.py",
    "quant_formats/base.py",
    "quant_formats/shared/*.py",
    "arch/spec.py",
    "cache/ladder.py",
    "cache/layout.py",
    "config.py",
    "option_names.py",
    "errors.py",
)


@functools.cache
def _foundation() -> bytes:
    """A hash of the sources that every kernel may be built on, and of what compiles them."""
    digest = hashlib.sha256(toolchain().encode())
    for name, content in _files(PACKAGE, _BUILT_ON):
        digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.digest()


def _files(folder: Path, patterns: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """The files whose names below `folder` match patterns, and what is in them.

    As `Path.glob` would find them, which takes as long as to link all kernels of a model.
    """
    listed = dict[str, list[str]]()

    def names(pattern: str) -> Iterator[str]:
        before, star, after = pattern.partition("*")
        if not star:
            yield pattern
            return
        parent, _, prefix = before.rpartition("/")
        suffix, slash, rest = after.partition("/")
        if parent not in listed:
            listed[parent] = sorted(os.listdir(folder / parent))
        for name in listed[parent]:
            if name.startswith(prefix) and name.endswith(suffix):
                yield f"{parent}/{name}{slash}{rest}"

    for pattern in patterns:
        for name in names(pattern):
            try:
                with open(f"{folder}/{name}", "rb", buffering=0) as file:
                    content = file.read()
            except (FileNotFoundError, NotADirectoryError):  # not every format has all files
                continue
            yield name, content


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
    def name(self) -> str:
        """Unique for what the source says and is built on, and for the CPU."""
        parameters = json.dumps(dict(self.parameters), sort_keys=True)
        content = _foundation() + parameters.encode() + b"\0" + self.text.encode()
        key = hashlib.sha256(content).hexdigest()[:16]
        return f"localkv_{self.template.replace('/', '_')}_{key}"

    @property
    def callbacks(self) -> list[str]:
        """The names of its functions."""
        return callbacks(self.text)

    def compile(self) -> Functions:
        from localkv.kernels.cpu.jit.compiler import compile_source  # imports Numba

        return compile_source(self.name, self.text, self.parameters)


def is_stored(source: KernelSource) -> bool:
    """Whether an earlier process has compiled it."""
    folder = usable_folder()
    return folder is not None and (folder / source.name).exists()


def stored(source: KernelSource) -> Functions | None:
    """What an earlier process has compiled, if it is there and whole."""
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
    functions = unpack(source.name, data)
    if functions is None or sorted(functions) != sorted(source.callbacks):
        logger.warning("a compiled kernel is damaged and compiled anew: %s", folder / source.name)
        return None
    mark_used(folder / source.name)
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
