"""Prompts that are long in odd ways, or no text at all."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from localkv.loader.pre_tokenizers import PRE_TOKENIZERS
from localkv.loader.tokenizer import Tokenizer, tokenizer_from_metadata
from support.program import Program, clean_env, localkv_process
from support.tiny_vocabulary import bpe_metadata, spm_metadata, spm_model

SECONDS = 60.0
"""Longest time for 200,000 characters there and back, on a busy machine; one to two are usual."""

TEXTS = {
    "combining characters": "e" + "\u0301" * 200_000,
    "nothing to combine with": "\u0301" * 200_000,
    "letters with accents": "a\u0301 " * 66_000,
    "joiners": "\u200d" * 200_000,
    "families": "👩\u200d👩\u200d👧" * 30_000,
    "spaces": " " * 200_000,
    "line feeds": " \n" * 100_000,
    "letters": "a" * 200_000,
    "digits": "1" * 200_000,
    "apostrophes": "'s" * 100_000,
    "exclamation marks": "!" * 200_000,
    "no spaces": "한" * 200_000,
    "NUL": "\0" * 200_000,
}


def check_texts(tokenizer: Tokenizer) -> None:
    for name, text in TEXTS.items():
        started = time.monotonic()
        ids = tokenizer.encode(text, add_special=False)
        back = tokenizer.decode(ids)
        assert time.monotonic() - started < SECONDS, name
        assert back.strip() == text.strip(), name


@pytest.mark.slow
def test_long_texts_of_one_kind() -> None:
    check_texts(tokenizer_from_metadata(bpe_metadata("llama-bpe")))


@pytest.mark.attack
@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_long_texts_with_every_pre_tokenizer(pre: str) -> None:
    if pre == "default":
        check_texts(tokenizer_from_metadata(spm_metadata(spm_model())))
    check_texts(tokenizer_from_metadata(bpe_metadata(pre)))


@pytest.mark.parametrize(
    ("data", "at"),
    [
        (b"Once \xff upon", "0xff at offset 5"),
        (b"Once \xc3", "0xc3 at offset 5"),
        ("Once \ud800".encode(errors="surrogatepass"), "0xed at offset 5"),
        ("Once".encode("utf-16"), "0xff at offset 0"),
        (b"\xc0\x80", "0xc0 at offset 0"),
        (b"a" * 100_000 + b"\x80", "0x80 at offset 100000"),
    ],
)
def test_files_that_are_no_text(
    program: Program, tiny_model: Path, tmp_path: Path, data: bytes, at: str
) -> None:
    path = tmp_path / "prompt\x1b[31m.txt"
    path.write_bytes(data)
    for argv in (
        ("tokenize", "-f", path),
        ("complete", "-f", path),
        ("perplexity", "-f", path),
        ("complete", "-p", "x", "--chat-template-file", path),
    ):
        result = program(*argv, "-m", tiny_model)
        assert result.code == 1
        (line,) = result.err_lines
        assert line.endswith(f"is not valid UTF-8: byte {at}")
        assert "\\x1b[31m" in line
    result = program("tokenize", "-m", tiny_model, stdin=data)
    assert (result.code, result.out) == (1, "")


def test_a_file_with_nul(program: Program, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"a\0b\0")
    result = program("tokenize", "-m", tiny_model, "-f", path)
    assert result.code == 0
    assert result.out.count("'\\x00'") == 2


@pytest.mark.slow
def test_ctrl_c_while_a_template_is_rendered(tiny_model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4)
    argv = ("complete", "-m", tiny_model, "-p", "x", "--chat-template-file", template)
    started = time.monotonic()
    with localkv_process(*argv, env=clean_env(), stdin=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"memory:")  # rendering comes next
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=10)
        rest = process.stderr.read()
    assert (process.returncode, rest) == (130, b"")
    assert time.monotonic() - started < SECONDS


@pytest.mark.slow
def test_a_template_that_takes_too_long_is_one_line(tiny_model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ 'a' * 10**10 }}")
    argv = ("complete", "-m", tiny_model, "-p", "x", "-q", "--chat-template-file", template)
    with localkv_process(*argv, env=clean_env()) as process:
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (1, b"")
    assert err.decode().splitlines() == [
        "error: the chat template takes more than 1.00 GiB of memory",
        "hint: use another template (--chat-template-file)",
    ]
