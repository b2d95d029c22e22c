"""Completion in real shells: what they list, and what TAB makes of a line."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localkv.quant_formats import KV_FORMATS
from support.program import HEAVY, clean_env

pytestmark = pytest.mark.skipif(os.name != "posix", reason="shells of POSIX")

REPO = "org/tiny-GGUF"


@pytest.fixture
def env(tmp_path: Path, tiny_model: Path) -> dict[str, str]:
    """A machine with `localkv` on its path, a model in the cache and another in the folder."""
    program = tmp_path / "bin" / "localkv"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m localkv "$@"\n')
    program.chmod(0o755)
    snapshot = tmp_path / "hub" / f"models--{REPO.replace('/', '--')}" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"):
        shutil.copy(tiny_model, snapshot / name)
    work = tmp_path / "work"
    (work / "models").mkdir(parents=True)
    (work / "models" / "mine.gguf").touch()
    (work / "models" / "README.md").touch()
    (work / "notes.txt").touch()
    home = tmp_path / "home"
    home.mkdir()
    return clean_env(
        PATH=f"{program.parent}:{os.environ['PATH']}",
        PYTHONPATH=os.pathsep.join(filter(None, map(os.path.abspath, sys.path))),
        HF_HUB_CACHE=str(tmp_path / "hub"),
        HOME=str(home),
        TERM="dumb",
        PS1="",
        PWD=str(work),
    )


def needs(shell: str) -> str:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"no {shell}")
    return path


def source(shell: str) -> str:
    return f'eval "$(_LOCALKV_COMPLETE={shell}_source localkv)"'


def run(env: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        command, env=env, cwd=env["PWD"], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return done.stdout


def listed_by_bash(env: dict[str, str], line: str) -> list[str]:
    """What bash is given for a line, with its words cut as bash cuts them."""
    words = line.replace("=", " = ").replace(":", " : ").split(" ")
    quoted = " ".join(map(shlex.quote, words))
    script = f"""{source("bash")}
compopt() {{ :; }}  # it works in a completion that readline asked for only
COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)} COMP_WORDS=({quoted})
COMP_CWORD={len(words) - 1}
_localkv_completion localkv
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    return run(env, needs("bash"), "--norc", "-c", script).split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("localkv d", ["detokenize", "doctor"]),
        (
            "localkv chat --kv-",
            [
                *("--kv-tail", "--kv-sink", "--kv-rotation", "--kv-k-before-rope"),
                *("--kv-scales", "--kv-profile", "--kv-bits", "--kv-budget", "--kv-ladder"),
                "--kv-offload",
            ],
        ),
        ("localkv chat -ctk q8", ["q8_0", "q8_t", "q8_0c"]),
        ("localkv complete --cache-type-v=q5", ["q5_1", "q5_0"]),
        ("localkv complete -ctk ", list(KV_FORMATS)),
        ("localkv chat -hf org", [f"{REPO}:Q4_K_M", f"{REPO}:Q8_0"]),
        ("localkv chat -hf org/tiny-GGUF:Q8", ["Q8_0"]),
        ("localkv rm org/tiny-GGUF:", ["Q4_K_M", "Q8_0"]),
        ("localkv complete -m org", [f"{REPO}:Q4_K_M", f"{REPO}:Q8_0"]),
        ("localkv complete -m models/", ["models/mine.gguf"]),
        ("localkv complete -m ", [f"{REPO}:Q4_K_M", f"{REPO}:Q8_0", "models"]),
        ("localkv plan ", [f"{REPO}:Q4_K_M", f"{REPO}:Q8_0", "models"]),
        ("localkv bench -m mod", ["models"]),
        ("localkv show -m no", []),
        ("localkv complete -f no", []),  # readline lists the files
        ("localkv chat -sys 'You are", []),
        ("localkv chat --device=cp", ["cpu"]),
    ],
)
def test_bash_lists(env: dict[str, str], line: str, expected: list[str]) -> None:
    assert listed_by_bash(env, line) == expected


def typed(env: dict[str, str], command: list[str], setup: str, line: str) -> str:
    """What a line has become after TAB, in a shell on a terminal of its own.

    Whatever is typed too soon would end the completion, so a line that has not changed is typed
    once more, and the shell gets more time.
    """
    became = _typed(env, command, setup, line, seconds=0.5)
    return became if became != line else _typed(env, command, setup, line, seconds=6.0)


def _typed(
    env: dict[str, str], command: list[str], setup: str, line: str, *, seconds: float
) -> str:
    ours, theirs = pty.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen(command, env=env, cwd=env["PWD"], start_new_session=True, **streams) as p:
        os.close(theirs)
        try:
            os.write(ours, f"{setup}; echo READ''Y\n".encode())
            _read_until(ours, "READY")
            os.write(ours, f"{line}\t".encode())
            time.sleep(seconds)
            os.write(ours, b"\x01echo 'BECA''ME<' \x05 '>'\n")
            shown = _read_until(ours, "'>'", "BECAME<", ">\r")
        finally:
            p.kill()
    os.close(ours)
    return shown.rpartition("BECAME<")[2].rpartition(">")[0].strip()


def _read_until(terminal: int, *marks: str, seconds: float = 30.0) -> str:
    """All that is shown until the marks have come, one after the other."""
    shown, end = "", time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
        rest = shown
        for mark in marks:
            _, found, rest = rest.partition(mark)
            if not found:
                break
        else:
            return shown
    raise AssertionError(f"{marks} did not come: {shown!r}")


LINES = [
    ("localkv complete -ctk iq", "localkv complete -ctk iq4_nl"),
    ("localkv rm org/tiny-GGUF:Q8", "localkv rm org/tiny-GGUF:Q8_0"),
    ("localkv rm or", "localkv rm org/tiny-GGUF:Q"),
    ("localkv show -m mod", "localkv show -m models/"),
    ("localkv show models/m", "localkv show models/mine.gguf"),
    ("localkv show models/", "localkv show models/mine.gguf"),
    ("localkv complete -f no", "localkv complete -f notes.txt"),
]


@pytest.mark.parametrize(("line", "expected"), LINES)
def test_tab_in_bash(env: dict[str, str], line: str, expected: str) -> None:
    bash = [needs("bash"), "--norc", "--noprofile", "-i"]
    assert typed(env, bash, source("bash"), line) == expected


@pytest.mark.parametrize(("line", "expected"), LINES)
def test_tab_in_zsh(env: dict[str, str], line: str, expected: str) -> None:
    zsh = [needs("zsh"), "-f", "-i"]
    setup = f"bindkey -e; autoload -U compinit; compinit -D -u; {source('zsh')}"
    # zsh takes a slash at the end back when the line goes on
    assert typed(env, zsh, setup, line) == expected.rstrip("/")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("localkv complete -ctk iq", ["iq4_nl"]),
        ("localkv rm org/tiny-GGUF:Q8", [f"{REPO}:Q8_0"]),
        ("localkv show models/", ["models/mine.gguf"]),
        ("localkv show no", []),
        ("localkv complete -f no", ["notes.txt"]),
    ],
)
def test_fish_lists(env: dict[str, str], line: str, expected: list[str]) -> None:
    script = f"_LOCALKV_COMPLETE=fish_source localkv | source; complete -C '{line}'"
    shown = run(env, needs("fish"), "--no-config", "-c", script)
    assert [item.split("\t")[0] for item in shown.splitlines()] == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_function(env: dict[str, str], shell: str) -> None:
    text = run({**env, "_LOCALKV_COMPLETE": f"{shell}_source"}, "localkv")
    assert f"_LOCALKV_COMPLETE={shell}_complete" in text
    assert "gguf" in text


def test_completion_is_light(env: dict[str, str]) -> None:
    script = f"""
import sys
from localkv.cli import main
try:
    main()
finally:
    print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    variables = {"_LOCALKV_COMPLETE": "bash_complete", "COMP_LINE": "localkv chat -ctk q"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env={**env, **variables}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert "q8_0" in done.stdout


def test_a_failure_is_silent(env: dict[str, str], tmp_path: Path) -> None:
    hub = Path(env["HF_HUB_CACHE"])
    shutil.rmtree(hub)
    hub.write_text("no folder")
    assert listed_by_bash(env, "localkv rm or") == []
    bad = {**env, "_LOCALKV_COMPLETE": "bash_complete"}  # without COMP_LINE
    done = subprocess.run(["localkv"], env=bad, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")
