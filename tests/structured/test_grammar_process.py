"""Grammars of strangers are compiled within limits, whatever they ask for, and once."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localkv.errors import UsageError
from localkv.loader.tokenizer import load_tokenizer
from localkv.structured import constraint, grammar
from localkv.structured.constraint import Constraint, GrammarTokens
from localkv.structured.grammar import Grammar
from localkv.system.limited_process import OverTimeError, Pace, at_pace
from support.paths import ROOT

NESTS: dict[str, Callable[[str], object]] = {
    "array": lambda ref: {"type": "array", "items": {"$ref": ref}},
    "object": lambda ref: {"type": "object", "properties": {"a": {"$ref": ref}}},
    "anyOf": lambda ref: {"anyOf": [{"$ref": ref}, {"type": "null"}]},
    "ref": lambda ref: {"$ref": ref},
}


def chain(kind: str, n: int) -> str:
    """A schema of `n` definitions, each of which names the next."""
    nest = NESTS[kind]
    defs = {f"d{i}": nest(f"#/$defs/d{i + 1}") for i in range(n)}
    return json.dumps({"$defs": {**defs, f"d{n}": {"type": "integer"}}, "$ref": "#/$defs/d0"})


def rules(n: int) -> str:
    return "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(n)) + f'r{n} ::= "a"'


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    grammar.forget_kept()


@pytest.mark.parametrize("kind", NESTS)
def test_a_chain_of_references_ends_nothing(kind: str) -> None:
    with pytest.raises(UsageError, match="too deeply"):
        Grammar.json_schema(chain(kind, 3000))
    assert Grammar.json_schema(chain(kind, 100)).source


def test_a_chain_of_rules_ends_nothing() -> None:
    with pytest.raises(UsageError, match="too deeply"):
        Grammar.gbnf(rules(2000))
    with pytest.raises(UsageError, match="too deeply"):
        Grammar.lark("".join(f"r{i}: r{i + 1}\n" for i in range(5000)) + 'r5000: "a"\nstart: r0')
    assert Grammar.gbnf(rules(200)).source


def test_what_is_accepted_can_be_followed() -> None:
    """Chains up to the longest that is accepted compile for a model, too."""
    tokens = GrammarTokens(load_tokenizer(ROOT / "models/tales-4M-Q8_0.gguf"))
    accepted = 0
    for n in range(100, 1400, 100):
        for make in (Grammar.gbnf, Grammar.json_schema):
            try:
                grammar = make(rules(n) if make == Grammar.gbnf else chain("array", n))
            except UsageError:
                continue
            constraint = Constraint(tokens, grammar, n_logits=tokens.vocabulary.n_vocab)
            assert constraint.allowed().any()
            accepted += 1
    assert accepted > 4


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"},
        {"$ref": "#"},
    ],
)
def test_a_schema_that_nothing_satisfies(schema: object) -> None:
    with pytest.raises(UsageError, match="nothing satisfies it"):
        Grammar.json_schema(schema)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="nothing satisfies it"):
        Grammar.gbnf("root ::= root")


def test_large_grammars_leave_no_memory_behind() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for n in (700_000, 50_000):
        with pytest.raises(UsageError, match=r"characters|takes more than|too large"):
            Grammar.gbnf("root ::= " + "|".join(f'"{i}"' for i in range(n)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 0.2)
    slow = 'root ::= "a"\n' + "".join(f'r{i} ::= "b" | "c"\n' for i in range(20_000))
    with pytest.raises(UsageError, match=r"takes more than 0\.2 s"):
        Grammar.gbnf(slow)
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 3.0)
    with at_pace(Pace(0.1)), pytest.raises(OverTimeError):
        Grammar.gbnf(slow)
    assert Grammar.gbnf('root ::= "a"').source


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    n_asked = 0
    ask = grammar.processes.ask

    def counted(*arguments: object) -> object:
        nonlocal n_asked
        n_asked += 1
        return ask(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(grammar.processes, "ask", counted)
    for _ in range(3):
        Grammar.json_schema({"type": "integer"})
        with pytest.raises(UsageError, match="no rule 'x'"):
            Grammar.gbnf("root ::= x")
    assert n_asked == 2


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MOST_KEPT_TEXT", 800)
    for i in range(20):
        assert Grammar.json_schema({"const": i}).source
    assert 0 < len(grammar._kept) < 6


def test_a_process_that_was_killed_is_replaced() -> None:
    Grammar.gbnf('root ::= "b"')
    process = grammar.processes.idle[-1]
    os.kill(process.pid, signal.SIGKILL)
    assert Grammar.gbnf('root ::= "c"').source


def test_tokens_that_a_grammar_names_are_none_of_its_process() -> None:
    assert Grammar.lark('start: <[7]> "a" <[100-120,300]> <|end|>').source


def test_all_grammars_of_a_turn_have_a_bound_together() -> None:
    started = time.monotonic()

    def many() -> None:
        for i in range(1000):
            Grammar.gbnf(f'root ::= "{i}"\n' + "".join(f'r{j} ::= "b"\n' for j in range(500)))

    with at_pace(Pace(0.3)), pytest.raises(OverTimeError, match=r"more than 0\.3 s"):
        many()
    assert time.monotonic() - started < 5


def test_what_takes_ever_more_at_each_token_ends() -> None:
    """A text that can be read in many ways has an item for each place where a part may begin."""
    tokens = GrammarTokens(load_tokenizer(ROOT / "models/tales-4M-Q8_0.gguf"))
    grammar = Grammar.gbnf('root ::= root root root | root root | "a" | ""')
    constraint = Constraint(tokens, grammar, n_logits=tokens.vocabulary.n_vocab)
    (token,) = tokens.vocabulary.encode_within("a")

    def go_on() -> None:
        for _ in range(1000):
            constraint.accept(token)

    with pytest.raises(UsageError, match="can't be followed any further"):
        go_on()


def test_what_takes_too_much_at_the_first_token_is_refused() -> None:
    many = "".join(f'r{i} ::= "a" r{(i * 7 + 1) % 1500}? "b"?\n' for i in range(1500))
    with pytest.raises(UsageError, match="items"):
        Grammar.gbnf("root ::= (" + "|".join(f"r{i}" for i in range(1500)) + ")*\n" + many)


def test_five_hundred_tools_are_not_too_many() -> None:
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": f"tool_{i}"}, "arguments": {"type": "object"}},
            "required": ["name", "arguments"],
        }
        for i in range(512)
    ]
    assert Grammar.json_schema({"anyOf": calls}).source


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--json-schema-file", "--grammar-file"])
def test_the_command_line_says_so_in_one_line(tmp_path: Path, option: str) -> None:
    file = tmp_path / "chain"
    file.write_text(chain("array", 3000) if "schema" in option else rules(2000))
    command = [sys.executable, "-m", "localkv", "complete", "-p", "a", option, str(file), "-n", "1"]
    done = subprocess.run(
        [*command, "-m", str(ROOT / "models/tales-4M-Q8_0.gguf")], capture_output=True, text=True
    )
    assert done.returncode == 2
    error, hint = done.stderr.strip().splitlines()[-2:]
    assert error.startswith("error: the ")
    assert "too deeply" in error
    assert hint.startswith("hint: ")


def test_a_matcher_that_is_held_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = GrammarTokens(load_tokenizer(ROOT / "models/tales-4M-Q8_0.gguf"))
    monkeypatch.setattr(constraint, "MOST_MATCHERS", 1)
    grammars = [Grammar.regex(text) for text in "ab"]
    refused = Grammar.lark("start: <|nosuch|>")
    for one in (*grammars, refused):
        tokens.hold(one)
    made = [tokens.matcher(one) for one in grammars]
    monkeypatch.setattr(constraint, "_with_stack", None)
    assert [tokens.matcher(one) for one in grammars] == made
    with pytest.raises(UsageError, match="unknown special token"):
        tokens.matcher(refused)
    for one in (*grammars, refused):
        tokens.release(one)
    assert [tokens.has_matcher(one) for one in (*grammars, refused)] == [False, True, False]


def test_errors_are_short_whatever_they_are_about() -> None:
    for text in ("root ::= " + "x" * 100_000, "start: " + "x" * 100_000):
        with pytest.raises(UsageError) as refused:
            Grammar.of_text(text)
        assert len(refused.value.message) <= 500
