"""The recipes of CONTRIBUTING.md, followed in a copy of the tree; the files touched are counted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as GGMLType
from gguf import GGUFReader

from support.paths import ROOT
from support.tiny_model import write_tiny_model

UNUSED_TYPE = 49
"""A type id that ggml has given to none."""
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis")


class Tree:
    """A copy of the project to follow a recipe in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("localkv", "tests", "docs"):
            shutil.copytree(ROOT / name, root / name, ignore=LEFT_OUT)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, root)
        (root / "models").symlink_to(ROOT / "models")
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

    def test(self, *args: str) -> None:
        """Run tests of the tree."""
        self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *args)

    def text_of(self, model: Path, *options: str) -> str:
        """What a model writes, greedily."""
        size = ("-n", "8", "-c", "64", "--temp", "0")
        prompt = ("-m", str(model), "-p", "The fox")
        return self.run("-m", "localkv", "complete", *prompt, *size, *options)

    def changed(self) -> set[str]:
        """The files that are new or not as they were."""
        now = self._contents()
        return {path for path in now if now[path] != self._before.get(path)}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "tree")


def named(recipe: str) -> list[str]:
    """The files that the first column of a recipe's table names."""
    page = (ROOT / "CONTRIBUTING.md").read_text().partition(f"\n### Add {recipe}\n")[2]
    cells = re.findall(r"^\| (`[^|]+) \|", page.partition("\n### ")[0], re.MULTILINE)
    return [path for cell in cells for path in re.findall("`([^`]+)`", cell)]


REGISTRY = "localkv/quant_formats/__init__.py"


def add_type(tree: Tree, old: str, new: str, ggml_type: int | None = None) -> None:
    """A number format with the bytes of another one: a folder, or a part of the other's folder."""
    (line,) = re.findall(rf'^    _format\("{old}".*\n', (tree.root / REGISTRY).read_text(), re.M)
    entry = line.replace(old, new)
    if ggml_type is not None:
        entry = re.sub(r"\d+", str(ggml_type), entry.replace(new, "NAME"), count=1)
    tree.add(REGISTRY, entry.replace("NAME", new), before=line)
    formats = tree.root / "localkv" / "quant_formats"
    if shared := re.search(r'folder="(\w+)"', line):
        for path in (formats / shared[1]).glob("*.py"):
            (own,) = re.findall(rf"^{old} = .*?^(?=\w)", path.read_text() + "end", re.M | re.S)
            path.write_text(path.read_text() + "\n\n" + re.sub(rf"\b{old}\b", new, own))
    else:
        (formats / new).mkdir()
        for path in (formats / old).glob("*.py"):
            (formats / new / path.name).write_text(path.read_text().replace(old, new))


def files_of_type(recipe: str, name: str) -> set[str]:
    return {path.replace("<type>", name) for path in named(recipe) if path.startswith("localkv/")}


@pytest.mark.slow
def test_a_cache_type(tree: Tree) -> None:
    add_type(tree, "q6_0", "q6_9")
    model = ROOT / "models" / "tales-4M-Q8_0.gguf"
    old, new = (tree.text_of(model, "-ctk", name, "-ctv", name) for name in ("q6_0", "q6_9"))
    assert new == old
    assert tree.changed() == files_of_type("a cache type", "q6_9")
    assert len(tree.changed()) == 4


@pytest.mark.slow
def test_a_weight_type(tree: Tree, tmp_path: Path) -> None:
    add_type(tree, "mxfp4", "mxfp4b", UNUSED_TYPE)
    old = write_tiny_model(tmp_path / "old.gguf", weight_type=GGMLType.MXFP4)
    new = Path(shutil.copy(old, tmp_path / "new.gguf"))
    for tensor in GGUFReader(new, "r+").tensors:
        if tensor.tensor_type == GGMLType.MXFP4:
            tensor.field.parts[4][0] = UNUSED_TYPE
    assert tree.text_of(new) == tree.text_of(old)
    assert "mxfp4b" in tree.run("-m", "localkv", "show", str(new))
    assert tree.changed() == files_of_type("a weight type", "fp4")
    assert len(tree.changed()) == 5


TIDAL = '''"""Tidal: a Llama with GELU, whose RoPE pairs the halves of a head, and scaled logits."""

from __future__ import annotations

from localkv.arch import plain
from localkv.arch.facts import Facts
from localkv.arch.spec import ModelSpec


def tidal(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=False)
    layer = plain.layer(facts, attention, plain.mlp(facts, "gelu"))
    scale = facts.number("logit_scale", 1.0)
    return plain.model(facts, layer, logit_scale=scale)
'''


@pytest.mark.slow
def test_an_architecture(tree: Tree, tmp_path: Path) -> None:
    tree.add("localkv/arch/tidal.py", TIDAL)
    tree.add(
        "localkv/arch/__init__.py", '    "tidal": {"tidal": "tidal"},\n', before='    "deepseek": {'
    )
    tree.add(
        "tests/support/traits.py",
        '    "tidal": Traits(halves=True, activation="gelu"),\n',
        before='    "plamo": _beside(',
    )
    tree.add(
        "tests/support/dense_variants.py",
        '    "tidal": _of("tidal", settings={"logit_scale": 0.5}),\n',
        before='    "plamo": _of(',
    )
    tree.add("localkv/arch/examples.py", '    "tidal": "Tidal 4B",\n', before="}\n")
    model = write_tiny_model(tmp_path / "tidal.gguf", architecture="tidal")
    assert tree.text_of(model)
    tree.run("docs/make_models_tables.py")
    assert "Tidal 4B" in (tree.root / "docs/models.md").read_text()
    tree.test("tests/arch/test_dense.py", "tests/arch/test_damaged_headers.py", "-k", "tidal")
    written = {"README.md", "docs/models.md"}
    made = {path.replace("<family>", "tidal") for path in named("an architecture")}
    assert tree.changed() - written < made
    assert len(tree.changed() - written) == 5


COUNT = '''
@takes(DetokenizeBody)
async def count_ids(front: Front, request: Request) -> Response:
    """POST /count: how many ids a list has."""
    body = await received(front, request, DetokenizeBody)
    return json_response({"n": len(body.tokens)})
'''
COUNT_TEST = '''"""`POST /count`."""

from __future__ import annotations

from support.server import RunningServer


def test_it_counts(server: RunningServer) -> None:
    assert server.post("/count", {"tokens": [5, 6, 7]}) == (200, {"n": 3})
    assert server.post("/count", {"tokens": "5"})[0] == 400
    _, api = server.get("/openapi.json")
    assert api["paths"]["/count"]["post"]["summary"] == "POST /count: how many ids a list has."
'''


@pytest.mark.slow
def test_an_endpoint(tree: Tree) -> None:
    dialect, app = "localkv/server/dialects/llama_server.py", "localkv/server/app.py"
    tree.add(dialect, f"{COUNT}\n\n", before="@takes(ChatBody)\nasync def apply_template")
    tree.add(app, "    count_ids,\n", before="    detokenize,\n    infill")
    tree.add(app, '    ("/count", POST, count_ids),\n', before='    ("/detokenize", POST')
    row = "| `POST /count` | localkv | how many ids a list has |\n"
    tree.add("docs/server-apis.md", row, before="| `GET /props`")
    tree.add("tests/server/test_count.py", COUNT_TEST)
    tree.test("tests/server/test_count.py")
    made = {
        "localkv/server/dialects/<api>.py": dialect,
        "tests/server/": "tests/server/test_count.py",
    }
    assert tree.changed() == {made.get(path, path) for path in named("an endpoint")}
    assert len(tree.changed()) == 4


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
        '    SamplerEntry("top_a", "z", lambda p: p.top_a > 0, ("top-a",), keeps_largest=True),\n',
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
    tree.test(*checks)
    written = {"docs/commands.md", "docs/server-apis.md", "docs/server-operation.md"}
    files = {*named("a sampler"), *written} - {"tests/sampling/test_sampler.py"}
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
    tree.add("pyproject.toml", "greet | ", before="local_models | perplexity")
    tree.add("tests/commands/test_greet.py", GREET_TEST)
    tree.run("docs/make_commands.py")
    assert tree.run("-m", "localkv", "greet") == "hello\n"
    assert "  greet       Say hello." in tree.run("-m", "localkv", "--help")
    lint = "from importlinter.cli import lint_imports_command as lint; lint()"
    assert " 0 broken" in tree.run("-c", lint)
    checks = ("tests/commands/test_greet.py", "tests/commands/test_help.py")
    tree.test(*checks)
    made = {"localkv/commands/<command>.py": "localkv/commands/greet.py"}
    made["tests/commands/"] = "tests/commands/test_greet.py"
    assert tree.changed() == {made.get(path, path) for path in named("a command")}
    assert len(tree.changed()) == 5
