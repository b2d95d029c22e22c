"""Commands without a model's name: which of them run the model that ships, and what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from localkv.commands.model_file import named_or_shipped
from localkv.loader import local_models
from support.paths import MODELS

SAID = (
    "note: no model is named: using tales-4M-Q8_0, a toy that ships with localkv; "
    "-m FILE or -hf ORG/REPO names another"
)


def test_complete_takes_it_and_says_so(program, llm) -> None:
    result = program("complete", "-p", "x", "-q")
    assert result.code == 0
    assert result.err_lines == [SAID]
    assert Path(llm.loaded["path"]).samefile(MODELS / "tales-4M-Q8_0.gguf")


def test_a_name_from_anywhere_counts(
    program, llm, model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALKV_MODEL", str(model))
    assert SAID not in program("complete", "-p", "x").err_lines
    assert Path(llm.loaded["path"]) == model
    monkeypatch.delenv("LOCALKV_MODEL")
    assert SAID not in program("complete", "-m", model, "-p", "x").err_lines
    # -hff names a file of a repository that is missing
    result = program("complete", "-hff", "x.gguf", "-p", "x")
    assert (result.code, result.err_lines[0]) == (
        2,
        "error: -m/--model is missing (or set LOCALKV_MODEL)",
    )


def test_nothing_is_said_before_other_mistakes(program, llm) -> None:
    result = program("complete")
    assert result.code == 2
    assert result.err_lines[0].startswith("error: there is no prompt")


@pytest.mark.parametrize("command", ["show", "tokenize", "plan", "perplexity", "bench"])
def test_other_commands_want_a_name(program, command: str) -> None:
    result = program(command, *(["text"] if command == "tokenize" else []), stdin=b"")
    assert (result.code, result.out) == (2, "")


def test_a_copy_without_it(program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_models, "PACKAGE", tmp_path / "localkv")
    result = program("complete", "-p", "x")
    assert result.code == 2
    assert result.err_lines[0] == "error: -m/--model is missing (or set LOCALKV_MODEL)"


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside an installed package, beside the package in a checkout."""
    monkeypatch.setattr(local_models, "PACKAGE", tmp_path / "localkv")
    beside, inside = (tmp_path / name / "models" for name in (".", "localkv"))
    beside.mkdir()
    (beside / local_models.SHIPPED).touch()
    assert local_models.shipped_model() is None  # a neighbour in site-packages
    (tmp_path / "pyproject.toml").touch()
    assert local_models.shipped_model() == beside / local_models.SHIPPED
    inside.mkdir(parents=True)
    (inside / local_models.SHIPPED).touch()
    assert local_models.shipped_model() == inside / local_models.SHIPPED


def test_the_chat_takes_it() -> None:
    values = {"model": None, "hf_repo": None, "hf_file": None}
    assert f"note: {named_or_shipped(values)}" == SAID
    assert Path(values["model"]).samefile(MODELS / "tales-4M-Q8_0.gguf")
