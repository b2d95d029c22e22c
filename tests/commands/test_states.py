"""Saved states on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.tiny_model import write_tiny_model

WORDS = "the quick fox and the lazy dog sat in the old barn and told a tale of long ago "


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model.gguf")


def complete(program: Any, model: Path, *argv: object) -> Any:
    return program("complete", "-m", model, "-c", 64, "-n", 4, "--temp", 0, "--json", *argv)


def cached(result: Any) -> int:
    assert result.code == 0, result.err
    return int(json.loads(result.out)["usage"]["cached_tokens"])


def test_a_prompt_goes_on_from_a_state(program: Any, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "state"
    first = complete(program, model, "-p", WORDS, "--save-state", path)
    n_prompt = json.loads(first.out)["usage"]["prompt_tokens"]
    assert f"saved {n_prompt + 3} tokens to {path}, " in first.err
    again = complete(program, model, "-p", WORDS, "--load-state", path)
    assert f"loaded {n_prompt + 3} tokens from {path} in " in again.err
    assert cached(again) == n_prompt - 1
    assert json.loads(again.out)["text"] == json.loads(first.out)["text"]
    whole = complete(program, model, "-p", "", "--load-state", path, "-q")
    assert json.loads(whole.out)["usage"]["prompt_tokens"] == n_prompt + 3
    assert "loaded" not in whole.err
    other = complete(program, model, "-p", WORDS, "--load-state", path, "-ctk", "q8_0")
    assert cached(other) == n_prompt - 1
    words = "note: K and V were converted from '0-1 f16/f16' to '0-1 q8_0/f16', which changed them"
    assert f"{words} by 0." in other.err


def test_a_prompt_cache(program: Any, model: Path, tmp_path: Path) -> None:
    """It is made, used, left as it is, and written again once the prompt is another one."""
    path = tmp_path / "cache"
    path.touch()  # as llama.cpp, an empty file is none

    def run(prompt: str, *argv: str) -> tuple[int, bytes]:
        result = complete(program, model, "-p", prompt, "--prompt-cache", path, *argv)
        return cached(result), path.read_bytes()

    n_none, first = run(WORDS)
    n_all, same = run(WORDS)
    assert n_none == 0
    assert same == first
    n_some, kept = run(WORDS + " x", "--prompt-cache-ro")
    assert kept == first
    assert n_some > n_all > 0
    n_longer, longer = run(WORDS + " x")
    assert n_longer == n_some
    assert len(longer) > len(first)
    _, with_answer = run(WORDS + " x", "--prompt-cache-all")
    assert len(with_answer) > len(longer)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prompt-cache-ro"], "--prompt-cache-ro is about --prompt-cache FILE"),
        (["--prompt-cache-all"], "--prompt-cache-all is about --prompt-cache FILE"),
        (["--prompt-cache", "x", "--load-state", "y"], "loads and saves a state itself"),
        (["--prompt-cache", "x", "--prompt-cache-ro"], "x: no such file"),
        (["--prompt-cache", "x", "--prompt-cache-all", "--prompt-cache-ro"], "keeps"),
    ],
)
def test_options_that_say_nothing(program: Any, llm: Any, tmp_path: Path, argv, words) -> None:
    result = program("complete", "-m", tmp_path, "-p", "a", *argv)
    assert result.code == 2
    assert words in result.err


def test_files_that_are_no_states(program: Any, model: Path, tmp_path: Path) -> None:
    for argv, words in (
        (["--load-state", tmp_path / "none"], "none: No such file"),
        (["--load-state", tmp_path], "not a regular file"),
        (["--load-state", model], "not a saved state"),
        (["--save-state", tmp_path / "none" / "x"], "cannot be written: No such file"),
    ):
        result = complete(program, model, "-p", WORDS, *argv)
        assert result.code == 2
        assert words in result.err
        assert "Traceback" not in result.err


def test_places_that_cannot_be_written_are_refused_first(
    program: Any, model: Path, tmp_path: Path
) -> None:
    """An hour of a prompt is not evaluated for them, nor is the model loaded."""
    for option in ("--save-state", "--prompt-cache"):
        for path, words in (
            (tmp_path / "none" / "x", "cannot be written: No such file"),
            (model / "x", "cannot be written: Not a directory"),
            (tmp_path, "cannot be written: not a regular file"),
        ):
            if option == "--prompt-cache" and path == tmp_path:
                continue  # it is to be loaded first
            result = complete(program, model, "-p", WORDS, option, path)
            assert result.code == 2
            assert words in result.err
            assert "memory:" not in result.err


def test_a_state_without_use_is_named(program: Any, model: Path, tmp_path: Path) -> None:
    """All prompts begin with the token that begins texts."""
    path, words = tmp_path / "state", "the prompt does not begin like the text of"
    assert words not in complete(program, model, "-p", WORDS, "--save-state", path).err
    assert words not in complete(program, model, "-p", WORDS, "--load-state", path).err
    other = complete(program, model, "-p", "a tale", "--load-state", path)
    assert words in other.err
    assert cached(other) == 1
