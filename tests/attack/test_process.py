"""The process around a command: its standard streams, and Ctrl-C at any moment."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

import localkv
from support.program import clean_env

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and descriptors of POSIX")

PACKAGE = str(Path(localkv.__file__).parent)

INSTALLED = [sys.executable, "-c", "from localkv.__main__ import main; main()"]
"""What the installed script does."""

MODULE = [sys.executable, "-m", "localkv"]

FAST_DELAYS = range(2, 120, 5)
SLOW_DELAYS = {"--help": range(1, 150), "show": range(1, 200), "complete": range(1, 2000, 7)}
"""Milliseconds from the start to Ctrl-C."""


def commands(model: Path, text: Path) -> dict[str, list[str]]:
    """A command line for each command that ends by itself and changes nothing."""
    m = ["-m", str(model)]
    return {
        "help": ["--help"],
        "show": ["show", str(model)],
        "tokenize": ["tokenize", *m, "-p", "The fox"],
        "detokenize": ["detokenize", *m, "198", "191"],
        "plan": ["plan", *m],
        "list": ["list"],
        "complete": ["complete", *m, "-p", "The fox", "-n", "4", "--temp", "0", "--stats"],
        "perplexity": ["perplexity", *m, "-f", str(text), "-c", "16", "--chunks", "1"],
        "bench": ["bench", *m, "-p", "4", "-n", "2", "-r", "1"],
    }


QUICK = ("help", "show", "tokenize")
SAME_TWICE = ("help", "show", "tokenize", "detokenize", "complete", "perplexity")
"""Commands whose output has no figures of the machine in it."""


@pytest.fixture
def argvs(tiny_model: Path, tmp_path: Path) -> dict[str, list[str]]:
    text = tmp_path / "text.txt"
    text.write_text("The fox said hello to the owl, and the owl said hello. " * 4)
    return commands(tiny_model, text)


def through_shell(argv: Sequence[str], redirections: str) -> tuple[int, bytes, bytes]:
    """The exit code, stdout and stderr of a command that sh starts with redirections."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", *MODULE, *argv],
        env=clean_env(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def check_streams(name: str, argv: Sequence[str]) -> None:
    """A result that can be written comes, one that can't is an error."""
    expected_code, expected, _ = through_shell(argv, "")
    assert expected_code == 0
    assert expected
    for lost in ("2>/dev/full", "2>&-", "<&-", "2>&- <&-"):
        code, out, err = through_shell(argv, lost)
        assert code == 0, (lost, err)
        assert len(out) > 0.8 * len(expected)
        if name in SAME_TWICE:
            assert out == expected, lost
        assert b"Traceback" not in err
        assert b"Exception ignored" not in err
    for lost, line in ((">/dev/full", "No space left on device"), (">&-", "stdout is closed")):
        code, _, err = through_shell(argv, lost)
        assert code == 1, (lost, err)
        assert err.decode().splitlines()[-1] == f"error: {line}"
        assert b"Traceback" not in err
    code, _, _ = through_shell(argv, ">/dev/full 2>/dev/full")
    assert code == 1
    code, _, _ = through_shell(argv, ">&- 2>&- <&-")
    assert code == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_lost_streams(name: str, argvs: dict[str, list[str]]) -> None:
    check_streams(name, argvs[name])


@pytest.mark.attack
@pytest.mark.parametrize("name", ["detokenize", "plan", "list", "complete", "perplexity", "bench"])
def test_lost_streams_of_the_others(name: str, argvs: dict[str, list[str]]) -> None:
    check_streams(name, argvs[name])


@pytest.mark.slow
def test_a_reader_of_notes_that_goes_away(argvs: dict[str, list[str]]) -> None:
    """A closed pipe on stderr doesn't count as one on stdout."""
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen(
        [*MODULE, *argvs["complete"]],
        env=clean_env(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=writing,
    )
    os.close(writing)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out
    assert through_shell(argvs["complete"], "2>/dev/full") == (0, out, b"")


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    """What libraries print to stderr must not end up in the file that was opened next."""
    path = tmp_path / "opened.txt"
    code = (
        "import os, sys\n"
        "from localkv.commands.process import prepare_streams\n"
        "prepare_streams()\n"
        f"file = os.open({str(path)!r}, os.O_CREAT | os.O_WRONLY)\n"
        "os.write(file, b'%d' % file)\n"
        "os.write(2, b'from a library')\n"
    )
    shell = 'exec "$@" >&- 2>&- <&-'
    subprocess.run(["sh", "-c", shell, "sh", sys.executable, "-c", code], check=True, timeout=60)
    assert path.read_bytes() == b"3"


_FRAME = re.compile(r'  File "([^"]+)", line \d+, in (\S+)')


def own_frames(stderr: str) -> list[str]:
    """Functions of the package that a traceback names; what runs before `main` is no function."""
    return [
        f"{file}: {name}"
        for file, name in _FRAME.findall(stderr)
        if file.startswith(PACKAGE)
        and (name != "<module>" or Path(file).name not in ("__init__.py", "__main__.py"))
    ]


def interrupted(command: Sequence[str], milliseconds: float) -> tuple[int, str]:
    """The exit code and stderr of a program that is interrupted after a time."""
    with subprocess.Popen(
        command,
        env=clean_env(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        time.sleep(milliseconds / 1000)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    return process.returncode, err.decode()


def sweep(command: Sequence[str], delays: Sequence[int]) -> Counter[int]:
    """How often each exit code came; tracebacks are from Python's own first steps."""
    codes: Counter[int] = Counter()
    for delay in delays:
        code, err = interrupted(command, delay)
        assert own_frames(err) == [], f"after {delay} ms: {err}"
        if "Traceback" not in err:
            assert code in (0, 130, -signal.SIGINT), f"after {delay} ms: {code}, {err}"
            assert "error" not in err, f"after {delay} ms: {err}"
        codes[code] += 1
    return codes


@pytest.mark.parametrize("program", [INSTALLED, MODULE], ids=["installed", "module"])
def test_ctrl_c_while_it_starts(program: list[str], argvs: dict[str, list[str]]) -> None:
    codes = sweep([*program, *argvs["show"]], FAST_DELAYS)
    assert codes[-signal.SIGINT] + codes[130] > len(FAST_DELAYS) // 2


@pytest.mark.attack
@pytest.mark.parametrize("name", ["--help", "show", "complete"])
def test_ctrl_c_at_every_moment(name: str, argvs: dict[str, list[str]]) -> None:
    argv = argvs["help" if name == "--help" else name]
    if name == "complete":
        argv = [*argv, "--ignore-eos", "-n", "-1", "-c", "100000"]
    codes = sweep([*INSTALLED, *argv], SLOW_DELAYS[name])
    assert codes[-signal.SIGINT] + codes[130] > len(SLOW_DELAYS[name]) // 4


def test_ctrl_c_in_the_middle_of_an_import_ends_it(tmp_path: Path) -> None:
    """A library that takes it for a missing part goes on, or blames something else."""
    (tmp_path / "swallows.py").write_text(
        "import signal\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    for _ in range(1000): pass\n"
        "except BaseException:\n"
        "    pass\n"
    )
    code = (
        "import signal\n"
        "from localkv.commands.process import interrupt\n"
        "signal.signal(signal.SIGINT, interrupt)\n"
        "import swallows\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=60, check=False,
        env={**clean_env(), "PYTHONPATH": str(Path(PACKAGE).parent)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, b"")


def test_ctrl_c_in_a_finaliser_ends_it() -> None:
    code = (
        "import signal\n"
        "from localkv.commands.process import end_unseen, interrupt\n"
        "signal.signal(signal.SIGINT, interrupt)\n"
        "end_unseen()\n"
        "class Finalised:\n"
        "    def __del__(self):\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "thing = Finalised()\n"
        "del thing\n"
        "print('went on')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_env(), capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_ctrl_c_stays_ignored_where_it_was(argvs: dict[str, list[str]]) -> None:
    """Ctrl-C is ignored under nohup, or in the background of a script."""
    command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *MODULE, *argvs["show"]]
    for delay in (40, 70, 100):
        assert interrupted(command, delay) == (0, "")
