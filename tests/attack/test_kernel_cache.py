"""Damaged and foreign files where compiled kernels are kept: compiled again, and replaced."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from localkv.kernels.cpu.jit import kernel_source
from localkv.kernels.cpu.jit.compiler import compile_source
from localkv.kernels.cpu.jit.kernel_folder import LOOKED
from localkv.kernels.cpu.jit.kernel_source import KernelSource, stored
from localkv.kernels.cpu.jit.machine_code import Functions, pack, unpack
from localkv.kernels.cpu.jit.specialize import specialized
from support.attack.damaged_kernels import (
    code_of_others,
    contents,
    cut,
    flipped,
    sealed,
    strange_places,
)
from support.kernel_folder import SOURCES, folder

FAST, LONG = 300, 20_000
"""Files with bits flipped or parts missing."""
SOURCE = SOURCES[0]

__all__ = ["folder"]


@pytest.fixture(scope="module")
def functions() -> Functions:
    return SOURCE.compile()


@pytest.fixture
def compiled(functions: Functions, monkeypatch: pytest.MonkeyPatch) -> list[KernelSource]:
    """Compiling is quick here, and told."""
    sources = list[KernelSource]()

    def compile_source(source: KernelSource) -> Functions:
        sources.append(source)
        return functions

    monkeypatch.setattr(KernelSource, "compile", compile_source)
    return sources


@pytest.fixture
def check(
    folder: Path, functions: Functions, compiled: list[KernelSource]
) -> Callable[[str, Callable[[Path], None]], None]:
    good = pack(SOURCE.name, functions)
    folder.mkdir(mode=0o700)

    def check(label: str, put: Callable[[Path], None]) -> None:
        """What is put there is compiled again and replaced, and taken the next time."""
        path = folder / SOURCE.name
        path.unlink(missing_ok=True)
        compiled.clear()
        put(path)
        for _ in range(2):
            specialized.cache_clear()
            assert specialized(SOURCE)["decode_tile"] != 0, label
        assert compiled == [SOURCE], label
        assert path.read_bytes() == good, label
        assert path.stat().st_mode & 0o777 == 0o600
        assert {file.name for file in folder.iterdir()} == {SOURCE.name, LOOKED}, label

    return check


def test_contents_under_the_right_checksum(
    check: Callable[..., None], functions: Functions
) -> None:
    labels = []
    for label, content in contents(functions):
        data = sealed(SOURCE.name, content)
        check(label, lambda path, data=data: path.write_bytes(data))
        labels.append(label)
    for label, others in code_of_others(functions):
        data = pack(SOURCE.name, others)
        assert unpack(SOURCE.name, data) == others
        check(label, lambda path, data=data: path.write_bytes(data))
        labels.append(label)
    assert len(labels) > 20


def test_another_kernel_s_file(check: Callable[..., None], functions: Functions) -> None:
    """Same functions, other code: it would be run."""
    data = pack(SOURCES[1].name, functions)
    check("another's", lambda path: path.write_bytes(data))


@pytest.mark.skipif(os.name != "posix", reason="modes, links and pipes are POSIX's")
def test_what_is_no_file(check: Callable[..., None], functions: Functions, tmp_path: Path) -> None:
    places = list(strange_places(pack(SOURCE.name, functions), tmp_path))
    assert len(places) > 8
    for label, put in places:
        if label == "a file that nobody may read" and os.geteuid() == 0:
            continue  # root may
        check(label, put)


def damage(n: int, seed: int, functions: Functions) -> int:
    """How many of `n` damaged files are refused; of the others nothing that counts was changed."""
    rng, good = random.Random(seed), pack(SOURCE.name, functions)
    refused = 0
    for _ in range(n):
        data = rng.choice((flipped, cut))(SOURCE.name, good, rng)
        found = unpack(SOURCE.name, data)
        refused += found is None
        assert found in (None, functions)
    return refused


def test_bits_and_parts(functions: Functions) -> None:
    assert damage(FAST, 0, functions) > FAST // 2


@pytest.mark.attack
def test_many_bits_and_parts(functions: Functions) -> None:
    assert damage(LONG, 1, functions) > LONG // 2


def test_damage_is_compiled_anew(check: Callable[..., None], functions: Functions) -> None:
    rng, good = random.Random(2), pack(SOURCE.name, functions)
    n = 0
    while n < 20:
        data = rng.choice((flipped, cut))(SOURCE.name, good, rng)
        if unpack(SOURCE.name, data) != functions:
            check(f"damage {n}", lambda path, data=data: path.write_bytes(data))
            n += 1


@pytest.mark.usefixtures("folder")
def test_a_folder_that_is_full_leaves_nothing_behind(
    folder: Path, compiled: list[KernelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert specialized(SOURCE)["decode_tile"] != 0
    assert list(folder.iterdir()) == []
    assert compiled == [SOURCE]


def test_the_functions_of_a_source_are_known() -> None:
    """The functions that are found are compared with what the source says that it has."""
    n = 0
    folder = kernel_source.PACKAGE / "kernels/cpu"
    for path in folder.rglob("*.py"):
        if "\n@cfunc" in path.read_text():
            source = KernelSource(path.relative_to(folder).with_suffix("").as_posix())
            assert len(source.callbacks) == source.text.count("\n@cfunc("), path
            n += 1
    assert n > 9
    assert SOURCE.callbacks == ["decode_tile"]
    found = stored(KernelSource("jit/helpers")) or compile_source(
        "helpers", KernelSource("jit/helpers").text
    )
    assert sorted(found) == sorted(KernelSource("jit/helpers").callbacks)
