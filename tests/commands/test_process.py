"""`localkv` as a program: what it imports, signals, pipes and terminals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.program import Process, clean_env, loaded_by, localkv_process, on_terminal

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and terminals of POSIX")


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["--version"], *([c, "--help"] for c in ("complete", "perplexity", "bench"))],
)
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    assert loaded_by(*argv) == []


def test_show_needs_no_torch(tiny_model: Path) -> None:
    assert loaded_by("show", tiny_model) == ["numpy"]


def test_tokenize_needs_no_torch(tiny_model: Path) -> None:
    assert set(loaded_by("tokenize", "-m", tiny_model, "-p", "x")) <= {"numpy", "tokenizers"}


def test_version() -> None:
    from localkv import __version__

    with localkv_process("--version") as process:
        assert process.communicate(timeout=30) == (f"localkv {__version__}\n".encode(), b"")


def test_no_command_shows_the_help_and_is_exit_2() -> None:
    with localkv_process() as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, b"")
    assert err.startswith(b"Usage: localkv ")


def test_a_pipe_from_end_to_end(tiny_model: Path) -> None:
    argv = ("complete", "-q", "-m", tiny_model, "-n", "4", "--temp", "0", "-ngl", "99")
    with localkv_process(*argv) as process:
        out, err = process.communicate(b"The fox\n", timeout=60)
    assert process.returncode == 0
    assert out.endswith(b"\n")
    assert b"The fox" not in out
    assert err.startswith(b"warning: there is no GPU, so ")
    assert err.count(b"\n") == 1
    assert b"\x1b" not in out + err


LOOP = 'while read -r line; do "$@" -p "$line"; done'


def looped(*argv: object) -> tuple[list[str], list[str]]:
    """The lines on stdout and stderr of a shell's loop over two lines that runs localkv for each.

    The loop's stdin is a pipe, which the program shares.
    """
    done = subprocess.run(
        ["sh", "-c", LOOP, "sh", sys.executable, "-m", "localkv", *map(str, argv)],
        env=clean_env(),
        input="The fox\nThe owl\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_a_loop_keeps_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    out, err = looped("complete", "-m", path)
    assert out == []
    assert err == [f"error: {path}: no such file"] * 2


@pytest.mark.slow
def test_a_loop_completes_each_of_its_lines(tiny_model: Path) -> None:
    out, err = looped("complete", "-q", "-m", tiny_model, "-n", "2", "--temp", "0")
    assert (len(out), err) == (2, [])


def endless(tiny_model: Path, *more: object, **popen: object) -> Process:
    """A completion that goes on for as long as a test can take."""
    argv = ("complete", "-m", tiny_model, "-c", 100_000, "-p", "The fox", "--ignore-eos", *more)
    return localkv_process(*argv, **{"stdin": subprocess.DEVNULL, **popen})


def test_ctrl_c_keeps_the_text_and_is_130(tiny_model: Path) -> None:
    with endless(tiny_model) as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (first + out).endswith(b"\n")
    assert b"Traceback" not in err


def test_ctrl_c_ends_the_output_file_too(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with endless(tiny_model, "-o", path) as process:
        while not (path.exists() and path.stat().st_size):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert path.read_bytes().endswith(b"\n")


def test_a_reader_that_goes_away_is_quiet(tiny_model: Path) -> None:
    with endless(tiny_model) as process:
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=60)
    assert process.returncode == 141
    assert err.count(b"\n") == 2  # the memory, and the warning of the long context
    assert b"warning: the context of 100000 tokens is longer" in err


def test_a_full_disk_is_an_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with open("/dev/full", "wb") as full, localkv_process("--help", stdout=full) as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert err == b"error: No space left on device\n"


def test_a_locale_that_can_not_show_the_text(tiny_model: Path) -> None:
    env = clean_env(PYTHONIOENCODING="ascii")
    with localkv_process("detokenize", "-m", tiny_model, "198", "191", "196", env=env) as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")
    assert out.isascii()


def test_a_terminal_without_a_prompt_is_not_waited_for(tiny_model: Path) -> None:
    code, shown = on_terminal("complete", "-m", tiny_model)
    assert code == 2
    assert shown == b"error: there is no prompt: give -p TEXT, -f FILE, or text on stdin\r\n"


def test_the_memory_shows_on_a_terminal_too(tiny_model: Path) -> None:
    code, shown = on_terminal("complete", "-m", tiny_model, "-p", "The fox", "-n", "1")
    assert code == 0
    assert b"memory: weights " in shown  # after the line about loading, if that took long


@pytest.mark.slow
def test_a_terminal_shows_that_a_model_loads(tiny_model: Path) -> None:
    """With the line of the API, which the program's own guard of terminals lets through."""
    patient = (
        "from localkv.system import loading_line; loading_line.PATIENCE = 0.0; "
        "from localkv.__main__ import main; main()"
    )
    argv = ("complete", "-m", tiny_model, "-p", "The fox", "-n", "1")
    code, shown = on_terminal(*argv, command=(sys.executable, "-c", patient))
    assert code == 0
    assert b"\rloading tiny.gguf" in shown
    assert shown.index(b"\rloading") < shown.index(b"\rmemory: weights ")


def test_a_stdin_that_stays_silent_is_spoken_of(tiny_model: Path) -> None:
    """A pipe that nobody writes to: say what is waited for, then go on."""
    argv = ["complete", "-m", str(tiny_model), "-p", "Once {stdin}", "-n", "1"]
    process = localkv_process(*argv, stdin=subprocess.PIPE)
    assert process.stderr is not None
    assert b"waiting for the end of stdin" in process.stderr.readline()
    out, _ = process.communicate()
    assert process.returncode == 0
    assert out
