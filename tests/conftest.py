"""Fixtures that many tests share."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from localkv.chat.store import Store
    from support.fake_hub import FakeHub
    from support.program import Program
    from support.summary import Summary

# an assertion that fails in a helper shows its values, too
pytest.register_assert_rewrite("support")

# which gguf-py does not know yet, or does not decode
from support import newer_ggml  # noqa: E402, F401

# in an emulator (`make test-arm64`)
if "LOCALKV_COMPILER" in os.environ:
    from support import cross_compiled  # noqa: F401

# the same examples on every run and machine, however busy it is
hypothesis.settings.register_profile("reproducible", derandomize=True, deadline=None)
hypothesis.settings.load_profile("reproducible")

# the tests themselves run in parallel; set before torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")

# what a script runs in its background inherits that Ctrl-C does nothing, and would hand it down to
# the programs that tests interrupt
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_random_tensors() -> None:
    """Seed torch, whichever tests came before; a test may seed its own generator."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(20_000)


@pytest.fixture(scope="session")
def conformance() -> Path:
    """The folder of models and logits that llama.cpp and gguf-py made (LOCALKV_CONFORMANCE)."""
    default = TESTS.parents[1] / "shared" / "conformance"
    folder = Path(os.environ.get("LOCALKV_CONFORMANCE", default))
    if not folder.is_dir():
        pytest.skip(f"no conformance data at {folder}; set LOCALKV_CONFORMANCE")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete model file of 650 KiB: random weights, a tokenizer and a chat template."""
    from support.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Program:
    """The command line in this process, away from the user's variables and configuration; without
    the line about kernels, which whoever compiles them first would see."""
    from localkv.commands import model
    from support.program import Program

    monkeypatch.setattr(model, "_telling_of_kernels", lambda on_progress: on_progress)
    return Program(monkeypatch, tmp_path)


@pytest.fixture
def store() -> Iterator[Store]:
    """Sessions of the chat, in memory; none yet."""
    from localkv.chat.store import Store

    with closing(Store(":memory:")) as store:
        yield store


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """Hugging Face on loopback, with an empty cache in `tmp_path`; retries do not wait."""
    from huggingface_hub import close_session, constants

    from localkv.loader.hub import download
    from support.fake_hub import FakeHub

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with FakeHub().running() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(download, "FIRST_WAIT", 0.0)
        yield server
        close_session()


@pytest.fixture
def summary(record_property: Callable[[str, object], None]) -> Summary:
    """Takes a title and figures by name, which are printed at the end of the run."""

    def add(title: str, figures: Mapping[str, float]) -> None:
        line = ", ".join(f"{name} {value:.1e}" for name, value in figures.items())
        record_property("summary", f"{title}: {line}")

    return add


TESTS = Path(__file__).parent
INTERPRETER, ATTACK = TESTS / "interpreter", TESTS / "attack"


def _asked(config: pytest.Config) -> list[Path]:
    """The files and folders that the command line names, or all tests."""
    return [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]


def _leaves_out_interpreter(config: pytest.Config) -> bool:
    return not any(path.is_relative_to(INTERPRETER) for path in _asked(config))


ASKED_FOR = {
    "attack": "long searches for hostile input: pytest -m attack tests/attack",
    "exhaustive": "the rest of long lists of cases: make test-all",
}
"""Marks of tests that run only where `-m` names the mark, and how to run them."""


def _left_out(config: pytest.Config) -> set[str]:
    return {mark for mark in ASKED_FOR if mark not in config.option.markexpr}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/interpreter out unless it is asked for: see there."""
    return (collection_path == INTERPRETER and _leaves_out_interpreter(config)) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked so unless `-m` names the mark, and begin with what takes long."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    marks = _left_out(config)
    left_out = [item for item in items if any(map(item.get_closest_marker, marks))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def not_run(config: pytest.Config) -> list[str]:
    """What a run leaves out of the folders that it was asked for, and how to run it."""
    lines = []
    if _leaves_out_interpreter(config) and _is_asked(config, INTERPRETER):
        lines.append("tests/interpreter (a process of its own): pytest tests/interpreter")
    for mark in sorted(_left_out(config)):
        if mark != "attack" or _is_asked(config, ATTACK):
            lines.append(ASKED_FOR[mark])
    return lines


def _is_asked(config: pytest.Config, folder: Path) -> bool:
    return any(folder.is_relative_to(path) for path in _asked(config))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what `summary` was given, also in the processes that pytest-xdist started."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    lines = [line for r in reports for name, line in r.user_properties if name == "summary"]
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)
    for line in not_run(config):
        terminalreporter.write_line(f"not run here: {line}")
