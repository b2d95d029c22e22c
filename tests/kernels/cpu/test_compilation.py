"""How the CPU's kernels are compiled, kept and found again."""

from __future__ import annotations

import ast
import itertools
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from ctypes import CFUNCTYPE, c_int64
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gguf import GGMLQuantizationType as GGMLType
from numba.core.bytecode import FunctionIdentity

from localkv.kernels.cpu.jit import kernel_folder, kernel_source, machine_code, specialize
from localkv.kernels.cpu.jit.compiler import compile_source
from localkv.kernels.cpu.jit.kernel_source import KernelSource, is_stored, stored
from localkv.kernels.cpu.jit.specialize import specialized
from support.kernel_folder import SOURCES, folder
from support.random_model import RandomModel

__all__ = ["folder"]


def no_compiler(source: KernelSource) -> machine_code.Functions:
    raise AssertionError(f"{source.template} is compiled here")


def test_machine_code_is_restored_from_a_file() -> None:
    functions = SOURCES[0].compile()
    data = machine_code.pack("name", functions)
    assert machine_code.unpack("name", data) == functions
    assert machine_code.unpack("other", data) is None
    assert machine_code.unpack("name", data[:-100]) is None
    assert machine_code.unpack("name", b"") is None


def test_a_file_with_any_byte_changed_is_damaged() -> None:
    function = machine_code.Function("symbol", ("needed",), b"code")
    data = machine_code.pack("name", {"worker": function})
    for i, byte in enumerate(data):
        assert machine_code.unpack("name", data[:i] + bytes([byte ^ 0x55]) + data[i + 1 :]) is None


def test_a_parameter_becomes_a_constant() -> None:
    """Whatever is not given keeps the value in the template."""
    source = """
from numba import cfunc
from localkv.kernels.cpu.jit.parameters import parameter
FIRST, SECOND = parameter("FIRST", 1), parameter("SECOND", 10)
@cfunc("int64()")
def total():
    return FIRST + SECOND
"""
    for given, result in (({}, 11), ({"FIRST": 2}, 12), ({"FIRST": 2, "SECOND": 20}, 22)):
        function = compile_source("parameters", source, given)["total"]
        assert CFUNCTYPE(c_int64)(machine_code.link(function))() == result


def test_a_parameter_that_no_template_asks_for_is_an_error() -> None:
    source = KernelSource("attention/weigh", {"FORMAT": "f16", "ROW": 2})
    with pytest.raises(ValueError, match=r"attention/weigh has no parameter ROW, but .*'ROWS'"):
        source.compile()


@pytest.mark.parametrize("value", ["2", True, 2.0, None])
def test_a_parameter_of_another_type_is_an_error(value: Any) -> None:
    with pytest.raises(TypeError, match=r"ROWS is .*, of another type than 4"):
        KernelSource("attention/weigh", {"ROWS": value}).compile()


def test_parameters_are_part_of_the_name() -> None:
    names = {source.name for source in SOURCES}
    assert len(names | {KernelSource("attention/tiles").name}) == 3


def templates() -> list[str]:
    folder = kernel_source.PACKAGE / "kernels/cpu"
    paths = [path for path in folder.rglob("*.py") if "\n@cfunc" in path.read_text()]
    return [path.relative_to(folder).with_suffix("").as_posix() for path in paths]


def module_path(name: str) -> Path:
    path = kernel_source.PACKAGE.joinpath(*name.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def localkv_imports(path: Path) -> Iterator[str]:
    """The modules of the package that a file imports when it runs, as its syntax tree has them."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names if item.name.startswith("localkv"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("localkv"):
            yield str(node.module)
            names = (f"{node.module}.{item.name}" for item in node.names)
            yield from (name for name in names if module_path(name).exists())


def test_what_a_template_imports_is_found_as_python_would() -> None:
    names = [f"localkv.kernels.cpu.{name.replace('/', '.')}" for name in templates()]
    found = kernel_source.built_on(*names, kernel_source.COMPILER)
    assert len(names) > 9
    assert {*names, "localkv.simd.memory", "localkv.quant_formats.base"} <= set(found)
    assert set(kernel_source._named("quant_formats", "cpu")) <= set(found)
    for name in found:
        path = module_path(name)
        assert set(kernel_source.imported(path.read_text())) >= set(localkv_imports(path)), name
        if name not in kernel_source.BY_NAME:
            assert "import_module" not in path.read_text(), name


def test_the_name_of_machine_code_follows_all_that_it_is_built_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that a template imports is changed: the template's name changes, and no other's."""
    name = "attention/score"
    foundation = kernel_source._foundation.__wrapped__
    known = foundation(name)
    read = kernel_source._read
    found = kernel_source.built_on(f"localkv.kernels.cpu.{name.replace('/', '.')}")
    assert len(found) > 9
    for changed in found:

        def other(module: str, changed: str = changed) -> Any:
            was = read(module)
            return was and (replace(was, digest=b"other") if module == changed else was)

        monkeypatch.setattr(kernel_source, "_read", other)
        assert foundation(name) != known, changed
        monkeypatch.setattr(kernel_source, "_read", read)
    assert foundation(name) == known
    assert "localkv.kernels.cpu.attention.score" not in kernel_source.built_on(
        "localkv.kernels.cpu.jit.helpers", kernel_source.COMPILER
    )


def test_a_changed_file_has_another_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_source, "PACKAGE", tmp_path)
    read = kernel_source._read.__wrapped__
    path = tmp_path / "simd" / "memory.py"
    path.parent.mkdir()
    path.write_text("ONE = 1\n")
    before = read("localkv.simd.memory")
    path.write_text("ONE = 2\n")
    assert read("localkv.simd.memory").digest != before.digest
    assert read("localkv.simd.none") is None


def test_code_that_lacks_a_symbol_is_not_linked() -> None:
    (function,) = SOURCES[0].compile().values()
    assert machine_code.link(function) != 0
    lacking = machine_code.Function(function.symbol, ("no_such_symbol",), function.code)
    assert machine_code.link(lacking) == 0


HELPER = """
from numba import njit
@njit
def value(x):
    return value(x - 1) if x > 5 else {result}
"""
CALLER = """
from numba import cfunc
from helper_of_both import value
@cfunc("int64(int64)")
def call(x):
    return value(x)
"""


def test_two_files_may_have_different_functions_of_one_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processes that have counted other functions before compile them so."""
    addresses = []
    for result in (1, 2):
        module = ModuleType("helper_of_both")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(FunctionIdentity, "_unique_ids", itertools.count(50_000))
        exec(HELPER.format(result=result), module.__dict__)
        addresses.append(machine_code.link(compile_source(f"caller{result}", CALLER)["call"]))
    assert [CFUNCTYPE(c_int64, c_int64)(address)(7) for address in addresses] == [1, 2]


def test_a_damaged_file_is_compiled_anew(folder: Path) -> None:
    source = SOURCES[0]
    folder.mkdir()
    (folder / source.name).write_bytes(b"PK nonsense")
    assert stored(source) is None
    assert specialized(source)["decode_tile"] != 0
    assert stored(source) is not None


@pytest.mark.usefixtures("folder")
def test_a_helper_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialize, "FEWEST", 1)
    monkeypatch.setattr(KernelSource, "compile", no_compiler)
    said = list[tuple[int, int]]()
    on_kernel = lambda done, total: said.append((done, total))  # noqa: E731
    with specialize.compiling_ahead(SOURCES, n_cores=2, on_kernel=on_kernel):
        helpers = specialize._current
        assert helpers is not None
        for thread in helpers.threads:
            thread.join(timeout=100)
        assert helpers.pending == []
        assert all(specialized(source)["decode_tile"] for source in SOURCES)
    assert all(is_stored(source) for source in SOURCES)
    assert specialize._current is None
    assert said == [(0, 2), (2, 2)]
    assert all(process.returncode is not None for process in helpers.processes)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("program", ["pass", "import sys; sys.stdin.readline(); print('short')"])
def test_without_a_helper_that_works_kernels_are_compiled_here(
    monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(specialize, "FEWEST", 1)
    monkeypatch.setattr(specialize, "child_command", lambda _: [sys.executable, "-c", program])
    with specialize.compiling_ahead(SOURCES, n_cores=2):
        assert all(specialized(source)["decode_tile"] for source in SOURCES)


@pytest.mark.usefixtures("folder")
def test_after_the_block_all_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By helpers, and by this process."""
    monkeypatch.setattr(specialize, "FEWEST", 1)
    sources = [*SOURCES, KernelSource("store/rotate_rows")]
    for n_cores in (1, 2):
        said = list[tuple[int, int]]()
        on_kernel = lambda done, total: said.append((done, total))  # noqa: E731, B023
        with specialize.compiling_ahead(sources, n_cores=n_cores, on_kernel=on_kernel):
            helpers = specialize._current
            assert helpers is not None
        assert all(is_stored(source) for source in sources)
        assert (said[0], said[-1]) == ((0, 3), (3, 3))
        assert specialize._current is None
        assert all(process.returncode is not None for process in helpers.processes)
        for source in sources:
            (kernel_folder.cache_folder() / source.name).unlink()


@pytest.mark.usefixtures("folder")
def test_helpers_end_with_a_block_that_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialize, "FEWEST", 1)
    with suppress(KeyboardInterrupt), specialize.compiling_ahead(SOURCES, n_cores=2):
        helpers = specialize._current
        assert helpers is not None
        raise KeyboardInterrupt
    assert specialize._current is None
    assert helpers.processes[0].returncode is not None


@pytest.mark.usefixtures("folder")
def test_whoever_waits_is_told() -> None:
    """How many of the kernels that are missing are there; of what is stored, nothing."""
    other = KernelSource("store/rotate_rows")
    specialized(other)
    said = list[tuple[int, int]]()
    for _ in range(2):
        on_kernel = lambda done, total: said.append((done, total))  # noqa: E731
        with specialize.compiling_ahead([*SOURCES, other], n_cores=1, on_kernel=on_kernel):
            for source in (*SOURCES, other):
                specialized.cache_clear()
                specialized(source)
    assert said == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.usefixtures("folder")
def test_without_processes_kernels_are_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialize, "FEWEST", 1)
    monkeypatch.setattr(specialize, "child_command", lambda _: ["/no/such/program"])
    with specialize.compiling_ahead(SOURCES, n_cores=3):
        assert all(specialized(source)["decode_tile"] for source in SOURCES)


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_machine_code_is_not_taken_from_where_others_may_write(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = SOURCES[0]
    specialized(source)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert stored(source) is not None
    for mode in (0o720, 0o702):
        folder.chmod(mode)
        kernel_folder.usable_folder.cache_clear()
        with caplog.at_level(logging.WARNING):
            assert stored(source) is None
        assert "others may write to it" in caplog.text
        caplog.clear()
    folder.chmod(0o700)
    kernel_folder.usable_folder.cache_clear()
    assert stored(source) is not None


def test_a_file_that_cannot_be_read_is_compiled_anew(folder: Path) -> None:
    source = SOURCES[0]
    (folder / source.name).mkdir(parents=True, mode=0o700)  # an error for root, too
    folder.chmod(0o700)
    assert specialized(source)["decode_tile"] != 0


def test_kernels_that_no_process_takes_are_removed(folder: Path) -> None:
    """When one is compiled, once a day; taking one says that it is in use."""
    first, second = SOURCES
    specialized(first)
    now = time.time()

    def put(name: str, days: float) -> Path:
        path = folder / name
        path.touch()
        os.utime(path, (now - days * 86400,) * 2)
        return path

    unused, recent = put("localkv_retired_0123", 91), put("localkv_scatter_4567", 89)
    interrupted, being_written = put("tmpabc.tmp", 2), put("tmpdef.tmp", 0)
    foreign = put("notes.txt", 1000)
    put(first.name, 89.9)
    assert stored(first) is not None
    kernel_folder.remove_unused(folder)
    assert unused.exists()  # they were looked for a moment ago
    put(kernel_folder.LOOKED, 1.1)
    specialized(second)
    assert stored(first) is not None
    assert [path.exists() for path in (unused, interrupted)] == [False, False]
    assert all(path.exists() for path in (recent, being_written, foreign))
    assert (folder / first.name).stat().st_mtime > now - 86400
    put(kernel_folder.LOOKED, 1.1)
    put(second.name, 91)  # not taken since
    specialized.cache_clear()
    (folder / first.name).unlink()
    specialized(first)
    assert stored(second) is None


def test_of_too_many_kernels_the_longest_unused_go(tmp_path: Path) -> None:
    names = [f"localkv_{name}" for name in "badc"]
    for days, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (time.time() - days * 86400,) * 2)
    (tmp_path / "notes.txt").write_bytes(bytes(1000))
    kernel_folder.remove_unused(tmp_path, most_bytes=250)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*names[:2], "notes.txt", kernel_folder.LOOKED}


@pytest.mark.usefixtures("folder")
def test_few_kernels_need_no_helper() -> None:
    with specialize.compiling_ahead(SOURCES, n_cores=2):
        assert specialize._current is not None
        assert specialize._current.processes == []


@pytest.mark.parametrize(
    ("kind", "pair"), [("Q4_0", ("f16", "f16")), ("F16", ("q4_0", "fp8_e4m3_token"))]
)
def test_all_that_a_model_needs_is_known_before(
    tmp_path: Path, kind: str, pair: tuple[str, str]
) -> None:
    path = RandomModel().write(tmp_path / "model.gguf", GGMLType[kind])
    program = """
import contextlib
import sys
import time
from localkv import LLM
from localkv.kernels.cpu import cpu_backend
from localkv.kernels.cpu.jit import specialize
from localkv.kernels.cpu.cpu_backend import needed_kernels
ahead = cpu_backend.compiling_ahead
@contextlib.contextmanager
def always_warm_up(*sources, **options):
    with ahead(*sources, **options):
        yield False
cpu_backend.compiling_ahead = always_warm_up
used = []
stored = specialize.stored
specialize.stored = lambda source: used.append(source) or stored(source)
path, type_k, type_v = sys.argv[1:]
llm = LLM(path, cache_type_k=type_k, cache_type_v=type_v, n_ctx=256, device="cpu")
types = [info.format.name for info in llm.gguf.tensors.values() if len(info.shape) > 1]
embedding = llm.gguf.tensors["token_embd.weight"].format.name
prompt, generated = needed_kernels(embedding, types, llm.config, llm.cache)
print(sorted(source.template for source in set(prompt) ^ set(used)))
used.clear()
llm.engine.evaluate([1, 2, 3])
print(sorted(source.template for source in used))
llm.engine.evaluate([4], generated=True)
llm.engine.evaluate(list(range(40)), generated=True)  # as many as run in blocks
print(sorted(source.template for source in set(generated) ^ set(used)))
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(path), *pair]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["[]"] * 3, done.stderr


def test_a_warm_start_does_without_what_it_has_no_use_for(tiny_model: Path) -> None:
    """The second process finds what the first one has compiled; neither makes a request."""
    program = """
import sys
from localkv import LLM
text = LLM(sys.argv[1], device="cpu", n_ctx=256).complete("The fox", max_tokens=2).text
heavy = ("numba", "torch", "triton", "huggingface_hub", "localkv.loader.hub.client")
heavy += ("asyncio", "localkv.quant_formats.i_quants")
print(len(text) > 0, [name for name in heavy if name in sys.modules])
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(tiny_model)]
    for _ in range(2):
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "True []", done.stderr


def test_code_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr: a callback has nobody to raise an exception to."""
    said = list[str]()
    monkeypatch.setattr(sys, "unraisablehook", lambda error: said.append(str(error.exc_value)))
    source = """
from numba import cfunc
@cfunc("int64(int64)")
def share(n):
    return 100 // n
"""
    share = CFUNCTYPE(c_int64, c_int64)(
        machine_code.link(compile_source("failing", source)["share"])
    )
    assert share(7) == 14
    assert said == []
    share(0)
    assert said == ["a kernel ended with an error, and its results are wrong; please report it"]
