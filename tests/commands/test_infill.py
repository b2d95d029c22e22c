"""`localkv complete` with a gap to fill in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localkv import LLM
from support.tiny_model import FIM, write_tiny_model

PREFIX, SUFFIX = "Once upon a time\n", "near the river.\n"
GREEDY = ("-n", "4", "--temp", "0", "--ignore-eos", "-q")


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tokens for it."""
    return write_tiny_model(tmp_path_factory.mktemp("fim") / "fim.gguf", control=FIM)


def _filled(path: Path, **options: object) -> str:
    with LLM(path) as llm:
        options = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, **options}
        return llm.infill(PREFIX, SUFFIX, **options).text


def test_texts_and_files(program, coder: Path, tmp_path: Path) -> None:
    """Files are taken unchanged, to the last line break."""
    texts = ("--prefix", r"Once upon a time\n", "--suffix", r"near the river.\n")
    done = program("complete", "-m", coder, *texts, *GREEDY, "--json")
    assert json.loads(done.out)["text"] == _filled(coder)
    before, after = tmp_path / "before.txt", tmp_path / "after.txt"
    before.write_text(PREFIX)
    after.write_text(SUFFIX)
    files = ("--prefix-file", before, "--suffix-file", after)
    again = program("complete", "-m", coder, *files, *GREEDY, "--json")
    assert json.loads(again.out)["text"] == _filled(coder)
    assert json.loads(again.out)["usage"] == json.loads(done.out)["usage"]


def test_other_files(program, coder: Path, tmp_path: Path) -> None:
    other = tmp_path / "fox.txt"
    other.write_text("The fox said hello.")
    texts = ("--prefix", PREFIX, "--suffix", SUFFIX, "--extra-file", other, "--spm-infill")
    done = program("complete", "-m", coder, *texts, *GREEDY, "--json", "-c", "3000")
    with LLM(coder) as llm:
        extra = [("fox.txt", "The fox said hello.")]
        ids = llm.infill_prompt(PREFIX, SUFFIX, extra=extra, n_ctx=3000, suffix_first=True)
    assert json.loads(done.out)["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prefix", "a", "-p", "b"], "-p, -f, --chat and --parse-special have no place"),
        (["--suffix", "a", "--chat"], "-p, -f, --chat and --parse-special have no place"),
        (["--prefix", "a", "--prefix-file", "b"], "both give the prefix, use one"),
        (["--suffix-file", "nowhere"], "the suffix nowhere: No such file"),
        (["--spm-infill", "-p", "a"], "there is nothing to fill in"),
    ],
)
def test_what_is_refused(program, coder: Path, argv: list[str], message: str) -> None:
    done = program("complete", "-m", coder, *argv)
    assert done.code != 0
    assert message in done.err


def test_a_model_without_tokens_for_it(program, tiny_model: Path) -> None:
    done = program("complete", "-m", tiny_model, "--prefix", "a", "--suffix", "b")
    assert done.code == 2
    assert "can't fill in the middle" in done.err
