"""`localkv tokenize` and `localkv detokenize`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localkv.loader.tokenizer import Tokenizer, load_tokenizer
from support.program import Program

TEXT = "The fox said hello.\n\tGrüße 🦊"


@pytest.fixture
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(tiny_model)


def test_ids(program: Program, tiny_model: Path, tokenizer: Tokenizer) -> None:
    result = program("tokenize", "-m", tiny_model, "-p", TEXT, "--ids")
    assert (result.code, result.err) == (0, "")
    assert result.out == f"{tokenizer.encode(TEXT)}\n"
    assert json.loads(result.out)[0] == tokenizer.bos_id


def test_one_line_per_token(program: Program, tiny_model: Path) -> None:
    result = program("tokenize", "-m", tiny_model, "-p", "fox\\n\\xe2\\x82\\xac", "--show-count")
    lines = result.out.splitlines()
    assert lines[0] == "     1 -> '<s>'"
    assert lines[1].endswith(" -> ' fox'")
    pieces = [line.split(" -> ")[1] for line in lines[2:-1]]
    assert pieces == ["'\\n'", "'\\xe2'", "'\\x82'", "'\\xac'"]
    assert lines[-1] == f"Total number of tokens: {len(lines) - 1}"


def test_text_from_stdin_and_file_is_taken_as_it_is(
    program: Program, tiny_model: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    text = "fox\\n owl\n"
    path = tmp_path / "text"
    path.write_text(text)
    expected = f"{tokenizer.encode(text)}\n"
    run = ("tokenize", "-m", tiny_model, "--ids")
    assert program(*run, stdin=text.encode()).out == expected
    assert program(*run, "--stdin", stdin=text.encode()).out == expected
    assert program(*run, "-f", path).out == expected
    assert program(*run, "-f", "-", stdin=text.encode()).out == expected
    assert program(*run, "--no-escape", "-p", text).out == expected


def test_no_bos(program: Program, tiny_model: Path, tokenizer: Tokenizer) -> None:
    result = program("tokenize", "-m", tiny_model, "-p", "fox", "--ids", "--no-bos")
    assert json.loads(result.out) == tokenizer.encode("fox", add_special=False)


def test_control_tokens_are_read_unless_told_otherwise(
    program: Program, tiny_model: Path, tokenizer: Tokenizer
) -> None:
    text = "<|user|>fox"
    run = ("tokenize", "-m", tiny_model, "--ids", "-p", text)
    special = tokenizer.token_to_id("<|user|>")
    assert special in json.loads(program(*run).out)
    assert special not in json.loads(program(*run, "--no-parse-special").out)


def test_json(program: Program, tiny_model: Path, tokenizer: Tokenizer) -> None:
    facts = json.loads(program("tokenize", "-m", tiny_model, "-p", "fox 🦊", "--json").out)
    assert facts["ids"] == tokenizer.encode("fox 🦊")
    assert facts["count"] == len(facts["ids"]) == len(facts["pieces"])
    assert facts["pieces"][:2] == ["<s>", " fox"]


def test_round_trip(program: Program, tiny_model: Path) -> None:
    ids = program("tokenize", "-m", tiny_model, "-p", TEXT, "--ids", "--no-bos").out
    run = ("detokenize", "-m", tiny_model)
    assert program(*run, stdin=ids.encode()).out == TEXT + "\n"
    assert program(*run, ids).out == TEXT + "\n"
    assert program(*run, *ids.split()).out == TEXT + "\n"
    assert program(*run, *ids.strip("[]\n").split(", ")).out == TEXT + "\n"
    facts = json.loads(program(*run, "--json", ids).out)
    assert facts == {"text": TEXT, "ids": json.loads(ids)}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("5 x", "'x' is not a token id"),
        ("5 1.5", "'1.5' is not a token id"),
        ("99999", "token 99999 is not in the vocabulary of 380"),
    ],
)
def test_wrong_ids(program: Program, tiny_model: Path, ids: str, message: str) -> None:
    result = program("detokenize", "-m", tiny_model, ids)
    assert (result.code, result.out, result.err) == (2, "", f"error: {message}\n")


def test_nothing_to_work_on(program: Program, tiny_model: Path) -> None:
    result = program("tokenize", "-m", tiny_model, stdin=None)
    assert result.code == 2
    assert result.err == "error: there is no text: give -p TEXT, -f FILE, or text on stdin\n"
    result = program("detokenize", "-m", tiny_model, stdin=None)
    assert result.code == 2
    assert program("tokenize", "-m", tiny_model, "-p", "a", "-f", "b").code == 2
    assert program("tokenize", "-m", tiny_model, "--ids", stdin=b"").out == "[1]\n"
    assert program("detokenize", "-m", tiny_model, stdin=b"").out == "\n"


def test_a_file_without_a_tokenizer(program: Program, tmp_path: Path) -> None:
    from support.tiny_model import write_tiny_model

    path = write_tiny_model(tmp_path / "m.gguf", tokenizer=False)
    result = program("tokenize", "-m", path, "-p", "fox")
    assert (result.code, result.err) == (1, "error: this file holds no tokenizer\n")


def test_a_pre_tokenizer_that_is_not_named_is_warned_of(program: Program, tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    result = program("tokenize", "-m", tmp_path / "m.gguf", "-p", "a", "--ids")
    assert (result.code, result.out) == (0, "[0]\n")
    assert result.err_lines[0].startswith("warning: the file does not name its pre-tokenizer")


def test_text_that_is_not_utf8(program: Program, tiny_model: Path) -> None:
    result = program("tokenize", "-m", tiny_model, stdin=b"ab\xffc")
    assert result.code == 1
    assert result.err == "error: the text on stdin is not valid UTF-8: byte 0xff at offset 2\n"
