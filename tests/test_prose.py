"""The check of sentences in pages, docstrings and helps (`.ci/prose`)."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

PROSE = Path(__file__).parent.parent / ".ci" / "prose"
LONG = "It counts " + "one more word and " * 8 + "then ends."
"""36 words."""


def found(path: Path, text: str) -> list[str]:
    """What the check says of a file, after the file's name."""
    path.write_text(text)
    command = [sys.executable, str(PROSE), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == (1 if done.stdout else 0)
    return [line.removeprefix(f"{path}:") for line in done.stdout.splitlines()]


def test_a_long_sentence_is_found_with_its_line(tmp_path):
    (one,) = found(tmp_path / "page.md", f"# Title\n\nA short one. {LONG}\nAnother one.\n")
    assert one.startswith("3: 36 words: It counts one more word")


def test_a_sentence_of_as_many_words_as_allowed_passes(tmp_path):
    words = ["word"] * 30
    assert not found(tmp_path / "page.md", " ".join(words) + ".\n")
    assert found(tmp_path / "page.md", " ".join([*words, "more"]) + ".\n")


@pytest.mark.parametrize(
    "text",
    [
        f"```\n{LONG}\n```\n",
        f"| {LONG} |\n",
        f"Short `{LONG}` is code.\n",
        f"Short ({LONG[:-1]}) is in brackets.\n",
        f"- {LONG[:70]}\n- {LONG[70:]}\n",
        f"name      {LONG[:70]}\nmore      {LONG[70:]}\n",
        f"Do this::\n\n    {LONG}\n",
        "A URL with `besides` in code.\n",
    ],
)
def test_code_tables_and_items_are_no_sentence(tmp_path, text):
    assert not found(tmp_path / "page.md", text)


def test_a_word_before_a_colon_does_not_end_a_sentence(tmp_path):
    text = LONG.replace("and one", "and\nall of the rest: one", 1)
    assert found(tmp_path / "page.md", text + "\n")


def test_docstrings_are_read_and_comments_are_not(tmp_path):
    text = f'"""Of what it holds."""\n# {LONG}\n\nN = 1\n"""{LONG}"""\n'
    head, attribute = found(tmp_path / "module.py", text)
    assert head.startswith("1: begins with a word that needs another page: Of what")
    assert attribute.startswith("5: 36 words")
    assert not found(tmp_path / "module.py", '"""Offers what it holds."""\n')


def test_a_phrase_comes_with_a_plainer_one(tmp_path):
    (one,) = found(tmp_path / "page.md", "It is read anew.\n")
    assert one.startswith("1: 'anew' (again)")


def test_the_help_of_an_option_is_one_text(tmp_path):
    loader = SourceFileLoader("prose", str(PROSE))
    prose = module_from_spec(spec_from_loader("prose", loader))
    loader.exec_module(prose)
    page = tmp_path / "commands.md"
    page.write_text(
        "Model:\n"
        "  -t, --threads N       CPU threads.\n"
        "  -Cr, --cpu-range A-B  The same as a\n"
        "                        range.\n"
        "  --a-long-name-of-an-option N\n"
        "                        Of a seed.\n"
        "\n"
        "  No option stands here.\n"
    )
    assert [(line, text) for _, line, text in prose.helps(page)] == [
        (2, "CPU threads."),
        (3, "The same as a range."),
        (5, "Of a seed."),
    ]
