"""Types of the public API, as mypy sees them in a program that uses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from localkv.sampling.params import SamplingOptions, SamplingParams
from support.paths import ROOT, TESTS

CLIENT = TESTS / "data" / "typed_client.py"
WRONG = """
from localkv import LLM

llm = LLM("model.gguf")
llm.complete("Once", temprature=0.5)
llm.stream("Once", temperature="warm")
llm.stream("Once", max_token=3)
llm.chat([{"role": "user", "content": "Hello"}], enable_thinking="yes")
llm.chat([{"role": "user", "content": "Hello"}], parse_special=True)
llm.complete("Once").usage.tokens
llm.complete(["Once"]).text
LLM("model.gguf", temp=0.5)
llm.embed("Once", pooling="max")
"""
MISTAKES = {
    5: "temprature",
    6: "temperature",
    7: "max_token",
    8: "enable_thinking",
    9: "parse_special",
    10: '"Usage" has no attribute "tokens"',
    11: '"list[Completion]" has no attribute "text"',
    12: '"temp" to "LLM" has incompatible type',
    13: 'No overload variant of "embed"',
}
"""By line, words of mypy's complaint."""


def test_sampling_options_are_the_fields_of_sampling_params() -> None:
    assert get_type_hints(SamplingOptions) == get_type_hints(SamplingParams)


@pytest.mark.slow
def test_a_program_that_uses_the_api_sees_no_any_and_is_checked(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    flags = ["--strict", "--disallow-any-expr", "--follow-imports=silent", "--no-error-summary"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, str(CLIENT), str(wrong)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line for line in errors if CLIENT.name in line] == []
    found: dict[int, str] = {}
    for line in errors:  # an overloaded function has two for a mistake
        number = int(line.split(":")[1])
        found[number] = found.get(number, "") + line
    assert found.keys() == MISTAKES.keys(), errors
    assert all(words in found[number] for number, words in MISTAKES.items()), errors
