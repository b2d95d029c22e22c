"""The documentation says what the program does."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest

from localkv import __version__
from localkv.arch import ARCHS
from localkv.arch.examples import EXAMPLES
from support.paths import ROOT


def script(name: str) -> ModuleType:
    """A program of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_commands_page_is_current() -> None:
    written = (ROOT / "docs" / "commands.md").read_text()
    assert written == script("make_commands").page(), "run python docs/make_commands.py"


def test_drawings_are_current() -> None:
    for name, draw in script("make_drawings").DRAWINGS.items():
        written = (ROOT / "docs" / name).read_text()
        assert written == draw(), "run python docs/make_drawings.py"


def test_the_limits_of_requests_are_those_that_hold():
    for path, text in script("make_limits").pages().items():
        assert path.read_text() == text, "run python docs/make_limits.py"


def test_tables_of_models_are_current() -> None:
    tables = script("make_models_tables")
    assert set(EXAMPLES) == set(ARCHS)
    for page in tables.PAGES:
        text = page.read_text()
        assert text == tables.with_tables(text), "run python docs/make_models_tables.py"


def test_what_llama_cpp_runs_is_supported_or_named() -> None:
    """Every architecture of llama.cpp b11434 (`LLM_ARCH_NAMES`)."""
    names = json.loads((ROOT / "tests" / "data" / "llama_cpp_architectures.json").read_text())
    page = (ROOT / "docs" / "models.md").read_text()
    left_out = page[page.index("these are left\nout:") : page.index("Keys that would change")]
    named = set(re.findall(r"`([^`]+)`", left_out))
    assert set(ARCHS) <= set(names)
    assert set(names) - set(ARCHS) == named & set(names)


def test_tables_of_speed_are_current() -> None:
    tables = script("make_speed_tables")
    for page in tables.PAGES:
        text = page.read_text()
        assert text == tables.with_tables(page), "run python docs/make_speed_tables.py"


PAGES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("", "benchmarks", "docs", "examples", "models")
    for path in sorted((ROOT / folder).glob("*.md"))
]


OF_ITS_TIME = ("CHANGELOG.md", "docs/commands.md")
"""Pages that name files of other versions, or of users."""
FOLDERS = ("localkv", "tests", "docs", "examples", "benchmarks", "models", ".github", ".ci")
FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder, *(ROOT / folder).rglob("*"))
] + [path.name for path in ROOT.iterdir()]


def exists(name: str) -> bool:
    """Whether a path from the root, or the last parts of one, is a file's; <type> is any name.
    The site is there once it is built."""
    pattern = re.sub(r"<\w+>", "*", name).rstrip("/").removesuffix("_build").rstrip("/")
    return any(fnmatch(path, p) for path in FILES for p in (pattern, f"*/{pattern}"))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    path = ROOT / page
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    assert missing == []


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OF_ITS_TIME])
def test_paths_exist(page: str) -> None:
    text = without_code((ROOT / page).read_text())
    missing = []
    for name in re.findall(r"`([\w<>*/.-]+)`", text):
        if not re.search(r"\.(py|yml)$|^(localkv|tests|docs|examples|benchmarks)/", name):
            continue
        if not exists(name):
            missing.append(name)
    assert missing == []


PROGRAMS = [
    path.relative_to(ROOT).as_posix()
    for folder in ("benchmarks", "docs", "examples", "models", ".ci")
    for path in sorted((ROOT / folder).iterdir())
    if path.suffix in (".py", "") and path.is_file()
]


@pytest.mark.parametrize("program", [*PROGRAMS, "Makefile"])
def test_programs_name_paths_that_exist(program: str) -> None:
    text = (ROOT / program).read_text()
    folders = "localkv|tests|docs|examples|benchmarks|models"
    names = re.findall(rf"(?<![\w/.-])(?:{folders})/[\w<>*./-]*[\w*]", text)
    assert [name for name in names if not exists(name)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OF_ITS_TIME])
def test_examples_of_pages_name_programs_that_exist(page: str) -> None:
    blocks = re.findall(r"^```.*?^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    names = re.findall(r"(?<![\w/.-])[\w.-]+/[\w/.-]+\.py\b", "".join(blocks))
    assert [name for name in names if not exists(name)] == []


RECIPES = (
    *("cache type", "weight type", "architecture", "sampler", "command", "endpoint", "kernel"),
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_names_files(recipe: str) -> None:
    """That they exist is a test of all pages' paths."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    _, _, text = page.partition(f"\n### Add a{'n' if recipe[0] in 'aeiou' else ''} {recipe}\n")
    rows = re.findall(r"^\| `.+` \| .+ \|$", text.partition("\n### ")[0], re.MULTILINE)
    assert len(rows) >= 3


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_the_index_names_every_page_once(page: str) -> None:
    """Once in its tables, so that a reader has to look in one place, and the site has it once."""
    name = page.removeprefix("docs/")
    index = (ROOT / "docs" / "README.md").read_text()
    rows = re.findall(r"^\| \[[^\]]+\]\(([^)]+)\)", index, re.MULTILINE)
    assert name == "README.md" or rows.count(name) == 1


def test_the_changelog_has_a_section_for_this_version() -> None:
    versions = re.findall(r"^## \[(\S+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[:2] == ["Unreleased", __version__]


def test_hosted_ci_runs_every_python_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = (name.rpartition(":: ")[2] for name in project["classifiers"] if "Python :: 3." in name)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    matrix = re.search(r"python: \[(.+)\]", workflow)
    assert matrix is not None
    assert matrix[1] == ", ".join(f'"{name}"' for name in names)


def test_type_checkers_may_read_the_package() -> None:
    assert (ROOT / "localkv" / "py.typed").is_file()


def without_code(text: str) -> str:
    """A page without its fenced blocks, in which neither links nor headings count."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.+)$", without_code(path.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.strip().replace(" ", "-") for title in plain}


def test_chat_page_has_every_key_and_command() -> None:
    from localkv.tui.dialogs import KEYS, MESSAGE_KEYS
    from localkv.tui.slash_commands import COMMANDS

    page = (ROOT / "docs" / "chat.md").read_text()
    for key, _ in (*KEYS, *MESSAGE_KEYS):
        assert f"| {key} |" in page
    for command in COMMANDS:
        assert f"| `{command.usage}` | {command.description} |" in page
