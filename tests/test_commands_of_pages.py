"""Every command of README and docs/ is run here, or is named in `NOT_RUN` with the reason.

All `localkv` commands are parsed as the command line parses them, and the options of the programs
in benchmarks/ and docs/ are looked up in their sources.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from localkv.cli import cli
from support.paths import ROOT
from support.program import Program

GENERATED = "docs/commands.md"
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"{folder}/README.md" for folder in ("models", "examples")),
]
PAGES += [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("*.md"))]
PAGES.remove(GENERATED)

NEEDS_A_MODEL = r" (-m )?(?!models/tales)(\S*\.gguf|MODEL)\b"
MEASURES = "it measures for minutes; its options are looked up in its source"
NOT_RUN = {
    r"^localkv chat\b": "it waits for its user; tests/tui",
    r"^localkv serve\b": "it waits for requests; tests/server, tests/commands/test_serve.py",
    rf"^localkv \w+{NEEDS_A_MODEL}": "it needs a model that does not ship; tests/real runs two",
    rf"^localkv \w+ .*{NEEDS_A_MODEL}": "it needs a file that does not ship",
    r"^localkv (complete -hf|pull|rm)\b": "it fetches a model; tests/commands/test_hub.py",
    r"^localkv (doctor|list)\b": "it tells of the machine; tests/doctor",
    r"^localkv calibrate\b": "it measures for minutes; tests/commands/test_calibrate.py",
    r"^localkv bench\b": "it measures for seconds to minutes; tests/bench",
    r"^localkv perplexity\b": "it reads a text for seconds; tests/quality",
    r"^localkv complete .*--kv-scales": "it needs a measured file; tests/cache/test_scales.py",
    r"^localkv plan .*--quality": "it needs a measured file; tests/commands/test_calibrate.py",
    r"^localkv complete .*-n 600": "it takes some seconds; tests/engine/test_degeneration.py",
    r"^python benchmarks/": MEASURES,
    r"^taskset .*python benchmarks/": MEASURES,
    r"^python docs/make_": "tests/test_docs.py compares what it writes",
    r"^python models/": "tests/models calls its functions",
    r"^python -c ": "it writes data of the tests",
    r"^make\b": "it sets up an environment; hosted CI",
    r"^(git|pip|npm|podman)\b": "it fetches from the network",
    r"^serve run\b": "it needs Ray",
    r"^curl\b": "it asks a running server; tests/server",
    r"^(cat|echo)\b": "it is no program of localkv's",
    r"^_LOCALKV_COMPLETE=": "it needs a shell of a user; tests/commands/test_completion.py",
}
"""Commands that no test here runs, by pattern, and why; after a semicolon the tests that do."""

EXACT = r"^localkv (tokenize|detokenize|quantize --dry-run|plan .*--device)\b"
"""Commands whose whole output is the page's on any machine."""


class Example(NamedTuple):
    """A command of a page, and what the page shows below it."""

    page: str
    line: str
    shown: str


def blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Language and lines of the fenced blocks."""
    for found in re.finditer(r"^ *```(\w+)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        yield found[1], found[2].replace("\\\n", " ").splitlines()


def is_whole(line: str) -> bool:
    """Whether all quotes of a command are closed."""
    try:
        words(line)
    except ValueError:
        return False
    return True


def examples(page: str) -> Iterator[Example]:
    """The commands of a page's blocks, joined where quotes go on in the next line."""
    for language, lines in blocks((ROOT / page).read_text()):
        if language not in ("sh", "console"):
            continue
        command, shown = "", list[str]()
        for line in [*lines, "$ end"]:
            begins = language == "sh" or line.startswith("$ ")
            if command and not is_whole(command):
                command += f"\n{line}"
                continue
            if begins and command:
                yield Example(page, command, "\n".join(shown))
            if begins:
                command, shown = line.strip().removeprefix("$ "), []
            else:
                shown.append(line)


def words(line: str) -> list[str]:
    """The words of a command as a shell has them, with its operators."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def commands(line: str) -> Iterator[list[str]]:
    """The commands of a pipeline or a list, without the files that they write to."""
    found: list[str] = []
    rest = iter([*words(line), ";"])
    for word in rest:
        if word in ("|", "&&", ";"):
            if found:
                yield found
            found = []
        elif set(word) <= set("<>"):
            next(rest)
        else:
            found.append(word)


ALL = [example for page in PAGES for example in examples(page)]


def test_there_are_commands() -> None:
    assert len(ALL) > 100
    assert len({example.page for example in ALL}) > 15


def error_of(command: list[str]) -> str:
    """What the parser of `localkv` says of a command; nothing if it takes it."""
    above = click.Context(cli, info_name="localkv")
    found = cli.get_command(above, command[1])
    assert found is not None, command
    try:
        found.make_context(command[1], command[2:], parent=above)
    except click.UsageError as error:
        return error.message
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_options_of_commands_are_known(page: str, tmp_path: Path, program: Program) -> None:
    for example in examples(page):
        for command in commands(example.line):
            if command[0] != "localkv" or len(command) < 2:
                continue
            error = error_of(command)
            assert not error or error.partition("\n")[0] in example.shown, example.line


@pytest.mark.parametrize("page", PAGES)
def test_options_of_programs_are_known(page: str) -> None:
    for example in examples(page):
        for command in commands(example.line):
            scripts = [word for word in command if re.fullmatch(r"\w+/\w+\.py", word)]
            if "python" not in command or not scripts:
                continue
            source = (ROOT / scripts[0]).read_text()
            for name in re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE):
                beside = (ROOT / scripts[0]).with_name(f"{name}.py")
                source += beside.read_text() if beside.is_file() else ""
            options = [word for word in command if word.startswith("--")]
            assert [name for name in options if f'"{name}"' not in source] == [], example.line


def why_not(example: Example) -> str:
    """The reason why an example is not run; none if it is. Of a pipeline `localkv` counts."""
    texts = [" ".join(command) for command in commands(example.line)]
    texts = [text for text in texts if text.startswith("localkv ")] or texts
    reasons = (
        reason for text in texts for pattern, reason in NOT_RUN.items() if re.search(pattern, text)
    )
    return next(reasons, "")


RUN = [example for example in ALL if not why_not(example)]


def test_every_reason_is_needed() -> None:
    texts = [" ".join(command) for example in ALL for command in commands(example.line)]
    assert [p for p in NOT_RUN if not any(re.search(p, text) for text in texts)] == []
    named = [path for why in NOT_RUN.values() for path in re.findall(r"tests/[\w/.]+", why)]
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the models that ship, as in a checkout."""
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("example", RUN, ids=lambda example: example.line[:70])
def test_commands_do_what_pages_show(example: Example, folder: Path, program: Program) -> None:
    """An error is the page's, to the letter; other output where it is the same on any machine."""
    stdin, result = b"", None
    for command in commands(example.line):
        if command[0] == "echo":
            stdin = f"{command[1]}\n".encode()
        elif command[0] == "printf":
            stdin = command[1].encode().decode("unicode_escape").encode()
        elif command[0] == "localkv":
            result = program(*command[1:], stdin=stdin)
    assert result is not None, f"neither run nor in NOT_RUN: {example.line}"
    # what a machine has is another one's
    fails = re.search(r"^error: .*?(?=, with scratch|$)", example.shown, re.MULTILINE)
    assert (result.code != 0) == bool(fails), result.err
    if fails:
        assert fails[0] in result.err
    if re.search(EXACT, example.line):
        assert_alike(result.out + result.err if fails else result.out, example.shown)


def assert_alike(text: str, shown: str) -> None:
    """The program prints each line of a page, but for white space; "..." is any lines."""
    have = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    for line in shown.splitlines():
        if line.strip() not in ("", "..."):
            assert " ".join(line.split()) in have


def test_the_makefile_has_what_pages_make() -> None:
    names = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = {
        word
        for example in ALL
        for command in commands(example.line)
        if command[0] == "make"
        for word in command[1:]
        if "=" not in word
    }
    assert made <= names
