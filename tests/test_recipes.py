"""The recipes of CONTRIBUTING.md, followed in a copy of the tree; the files touched are counted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis")


class Tree:
    """A copy of the project to follow a recipe in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("localkv", "tests", "docs"):
            shutil.copytree(ROOT / name, root / name, ignore=LEFT_OUT)
        shutil.copy(ROOT / "pyproject.toml", root)
        self._before = self._contents()

    def _contents(self) -> dict[str, bytes]:
        found = (path for path in self.root.rglob("*") if path.suffix in (".py", ".md", ".toml"))
        return {str(path.relative_to(self.root)): path.read_bytes() for path in found}

    def add(self, path: str, text: str, *, before: str = "") -> None:
        """Put text into a file, before the one place that has another text; or make the file."""
        file = self.root / path
        if before:
            whole = file.read_text()
            assert whole.count(before) == 1, f"{path}: {before!r}"
            text = whole.replace(before, text + before)
        file.write_text(text)

    def run(self, *args: str) -> str:
        """Run Python in the tree; returns what it prints."""
        done = subprocess.run(
            [sys.executable, *args],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def changed(self) -> set[str]:
        """The files that are new or not as they were."""
        now = self._contents()
        return {path for path in now if now[path] != self._before.get(path)}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "tree")


def named(recipe: str) -> list[str]:
    """The files that a recipe names, one for each row but those that a script writes."""
    page = (ROOT / "CONTRIBUTING.md").read_text().partition(f"\n### Add a {recipe}\n")[2]
    return re.findall(r"^\| `([^`]+)`", page.partition("\n### ")[0], re.MULTILINE)


TOP_A = '''
def top_a(candidates: Candidates, params: SamplingParams, _: SamplerState) -> Candidates:
    """Keeps tokens with at least top_a times the square of the largest probability."""
    probabilities = softmax(candidates.logits)
    least = params.top_a * probabilities.max() ** 2
    return only(candidates, np.flatnonzero(probabilities >= least))
'''
SEEN = """
from localkv.llm import STREAM_OPTIONS
from localkv.sampling.params import SamplingParams
from localkv.server.dialects.llama_server import generation_settings
from localkv.server.request_fields import SamplingFields
from localkv.tui.slash_commands import _setting_names
import msgspec

assert "top_a" in STREAM_OPTIONS
assert "top_a" in _setting_names()
assert msgspec.json.decode(b'{"top_a": 0.5}', type=SamplingFields).top_a == 0.5
assert generation_settings(SamplingParams(top_a=0.25))["top_a"] == 0.25
"""


@pytest.mark.slow
def test_a_sampler(tree: Tree) -> None:
    tree.add(
        "localkv/sampling/params.py",
        '    SamplerEntry("top_a", "a", lambda p: p.top_a > 0, ("top-a",), keeps_largest=True),\n',
        before='    SamplerEntry("xtc"',
    )
    tree.add("localkv/sampling/samplers.py", f"{TOP_A}\n\n", before="def xtc(")
    tree.add(
        "localkv/sampling/params.py",
        '    top_a: float = _number(0.0, _SHARE, "--top-a", help="Keep those that are likely.")\n',
        before="    min_keep: int = ",
    )
    tree.add("localkv/sampling/params.py", "    top_a: float\n", before="    min_keep: int\n")
    tree.add(
        "tests/sampling/test_table.py", '    "top_a": {"top_a": 0.9},\n', before='    "xtc": {'
    )
    tree.run("docs/make_commands.py")
    tree.run("docs/make_limits.py")
    assert len(re.findall(r"^  --top-a N ", (tree.root / "docs/commands.md").read_text(), re.M)) > 1
    tree.run("-c", SEEN)
    checks = ("tests/sampling/test_table.py", "tests/test_types.py", "-m", "not slow")
    tree.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *checks)
    written = {"docs/commands.md", "docs/server-apis.md", "docs/server-operation.md"}
    files = {*named("sampler"), *written} - {"tests/sampling/test_sampler.py"}
    assert tree.changed() == files, "a sampler is three files, and what scripts write"
    assert len(files - written) == 3


GREET = '''"""`localkv greet`: say hello."""

from __future__ import annotations

from localkv.commands.output import TextOutput
from localkv.commands.parsing import Command


def _run() -> None:
    with TextOutput(None) as out:
        out.write("hello")


greet = Command(
    "greet",
    examples=[("Say hello", "localkv greet")],
    callback=_run,
    help="Say hello.",
)
'''
GREET_TEST = '''"""`localkv greet`."""

from __future__ import annotations

from support.program import Program


def test_it_greets(program: Program) -> None:
    assert program("greet").out == "hello\\n"
'''


@pytest.mark.slow
def test_a_command(tree: Tree) -> None:
    tree.add("localkv/commands/greet.py", GREET)
    tree.add(
        "localkv/cli.py",
        '    "greet": ("localkv.commands.greet", "Say hello."),\n',
        before='    "rm": (',
    )
    tree.add("pyproject.toml", "greet | ", before="list_models | perplexity")
    tree.add("tests/commands/test_greet.py", GREET_TEST)
    tree.run("docs/make_commands.py")
    assert tree.run("-m", "localkv", "greet") == "hello\n"
    assert "  greet       Say hello." in tree.run("-m", "localkv", "--help")
    lint = "from importlinter.cli import lint_imports_command as lint; lint()"
    assert " 0 broken" in tree.run("-c", lint)
    checks = ("tests/commands/test_greet.py", "tests/commands/test_help.py")
    tree.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *checks)
    made = {"localkv/commands/<command>.py": "localkv/commands/greet.py"}
    made["tests/commands/"] = "tests/commands/test_greet.py"
    assert tree.changed() == {made.get(path, path) for path in named("command")}
    assert len(tree.changed()) == 5
