"""The scripts of `examples/` run, each in a process of its own, and print what they promise."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from support.paths import ROOT

EXAMPLES = ROOT / "examples"

PRINTED = {
    "complete.py": r"Once upon a time .+\n\nlength after 60 tokens, \d+ tokens/s, seed 7\n",
    "stream.py": r"\..+\..+\.\n\ncancelled after three sentences\n\d+ tokens\n",
    "chat.py": r"> .+ Anna.+ \[\d+ of 2048 tokens, 0 reused\]\n> .+ Anna.+, [1-9]\d* reused\]\n> ",
    "logprobs.py": r"-\d+\.\d+ +\d+  'purple' .+\nmean log p -\d\.\d+ over 9 tokens\n",
    "embed.py": r"Mia .+ find her drum\.\n 0\.\d{3}  Mia the fox lost her red drum .+(\n.+){3}\n$",
    "sweep.py": r"6 chunks.+q8_0/q8_0  +1\.\d+ .+q4_0/q4_0  +1\.\d+ .+ \d+\.\d%\n",
    "plan.py": r"f16/f16 .+ too much.+q8_0/q8_0 .+ fits.+_k='q8_0', cache_type_v='q8_0'\)",
}


def test_every_script_is_listed_and_tested() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == set(PRINTED)
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"]({name})" in page for name in scripts)


@pytest.mark.parametrize(
    "name",
    [
        name if name != "sweep.py" else pytest.param(name, marks=pytest.mark.slow)
        for name in PRINTED
    ],
)
def test_it_runs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, f"examples/{name}"],
        cwd=ROOT,
        input="My name is Anna.\nWhat is my name?\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(PRINTED[name], done.stdout, re.DOTALL), done.stdout


def test_an_error_of_the_user_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "examples/stream.py", "missing.gguf"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: missing.gguf")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_make_run_tells_a_story_and_finds_a_fact() -> None:
    """What `make run` runs once .venv is there."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    make = subprocess.run(["make", "-n", "run"], cwd=ROOT, capture_output=True, text=True)
    assert make.returncode == 0, make.stderr
    lines = make.stdout.splitlines()
    commands = [line for line in lines if line.startswith(".venv/bin/localkv ")]
    assert len(commands) == 2
    program = f"{shlex.quote(sys.executable)} -m localkv "
    story, fact = (
        subprocess.run(
            line.replace(".venv/bin/localkv ", program), shell=True, cwd=ROOT, capture_output=True
        )
        for line in commands
    )
    assert len(story.stdout.split()) > 20
    assert fact.stdout == b" The code of the owl is 735.\n"
    assert b"tokens/s" in fact.stderr
