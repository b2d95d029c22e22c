"""A constraint's masks against what the grammar takes, by token; and where in a text it holds."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from localkv.errors import LocalKVError, UsageError
from localkv.loader.tokenizer import load_tokenizer
from localkv.structured.constraint import Constraint, GrammarTokens
from localkv.structured.grammar import Grammar, Scope, text_pattern
from support.paths import ROOT

VOCABULARY = load_tokenizer(ROOT / "models/tales-4M-Q8_0.gguf")
TOKENS = GrammarTokens(VOCABULARY)
N = VOCABULARY.n_vocab
EOS = VOCABULARY.eos_id
ROW = np.linspace(-3, 3, N, dtype=np.float32)
YES_OR_NO = Grammar.gbnf('root ::= "yes" | "no" "pe"?')


def constraint(grammar: Grammar = YES_OR_NO, **options: object) -> Constraint:
    return Constraint(TOKENS, grammar, **{"n_logits": N, **options})


def written(one: Constraint, text: str) -> Constraint:
    for token in VOCABULARY.encode_within(text):
        assert one.n_valid([token]), text
        one.accept(token)
    return one


def test_a_token_is_allowed_where_some_text_of_the_grammar_has_it() -> None:
    texts = ["yes", "no", "nope"]
    for begun in ("", "n", "no", "nop", "ye"):
        rest = [text[len(begun) :].encode() for text in texts if text.startswith(begun)]
        allowed = written(constraint(), begun).allowed()
        fitting = {t for t in range(N) if any(_fits(VOCABULARY.token_bytes(t), r) for r in rest)}
        tokens = {int(token) for token in np.flatnonzero(allowed)} - {EOS}
        assert tokens <= fitting
        firsts = {VOCABULARY.encode_within(end.decode())[0] for end in rest if end}
        assert firsts <= tokens  # where the next bytes are certain, those of other lengths are not
        assert allowed[EOS] == (b"" in rest)


def _fits(data: bytes, text: bytes) -> bool:
    return bool(data) and text.startswith(data)


def test_masked_logits_keep_their_bits_and_the_row_stays_as_it_is() -> None:
    row, one = ROW.copy(), constraint()
    masked, allowed = one.masked(row), one.allowed()
    assert (row == ROW).all()
    assert masked.dtype == np.float32
    assert (masked[allowed] == ROW[allowed]).all()
    assert (masked[~allowed] == -np.inf).all()
    row[5] = np.nan
    assert np.isnan(one.masked(row)[5])  # for the sampler to refuse


def test_it_is_over_where_nothing_can_follow() -> None:
    assert written(constraint(), "yes").is_over
    one = written(constraint(), "no")
    assert not one.is_over
    assert one.allowed()[EOS]
    assert written(one, "pe").is_over


def test_schemas_are_kept_to_whatever_is_drawn() -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 4},
            "n": {"type": "integer", "minimum": -5, "maximum": 77},
            "is": {"type": ["boolean", "null"]},
            "of": {"type": "array", "items": {"enum": ["a", 2]}, "maxItems": 2},
        },
        "required": ["name", "n"],
        "additionalProperties": False,
    }
    rng, grammar = random.Random(3), Grammar.json_schema(schema)
    for _ in range(20):
        one, data = constraint(grammar), b""
        while not one.is_over:
            token = rng.choice([int(t) for t in np.flatnonzero(one.allowed())])
            assert token != EOS, "an object ends with its brace"
            one.accept(token)
            data += VOCABULARY.token_bytes(token)
        value = json.loads(data)
        assert set(value) <= set(schema["properties"])
        assert len(value["name"]) <= 4
        assert -5 <= value["n"] <= 77


def test_guesses_are_cut_where_the_grammar_ends_them() -> None:
    ids = VOCABULARY.encode_within("nope")
    one = constraint()
    assert one.n_valid(ids) == len(ids)
    assert one.n_valid([*ids, 300]) == len(ids)
    assert one.n_valid([*VOCABULARY.encode_within("n"), *VOCABULARY.encode_within("x")]) == 1
    assert one.n_valid([300]) == 0
    written(one, "nope")  # looking ahead changed nothing


def test_a_token_that_is_not_allowed_is_an_error_in_one_line() -> None:
    with pytest.raises(LocalKVError, match="can't be followed") as error:
        constraint().accept(300)
    assert "\n" not in str(error.value)


def test_banned_tokens_stay_banned_and_nothing_left_is_an_error() -> None:
    grammar = Grammar.gbnf('root ::= "a" "b"?')
    b = [token for token in range(N) if VOCABULARY.token_bytes(token) == b"b"]
    one = written(constraint(grammar, banned=[EOS, *b]), "a")
    with pytest.raises(LocalKVError, match="allows no token"):
        one.masked(ROW)


def test_a_model_with_more_logits_than_tokens() -> None:
    assert not constraint(n_logits=N + 100).allowed()[N:].any()


def test_it_holds_after_a_mark_wherever_tokens_end() -> None:
    """After `</think>` and a line break; what comes before it is free."""
    scope = Scope(before=text_pattern("</think>"), skips_space=True)
    for text in ("I think</think>", "so </think>\n", "x</think>\n\n"):
        one = constraint(scope=scope)
        assert not one.holds
        assert one.allowed().all()
        for token in VOCABULARY.encode_within(text):
            one.accept(token)
        assert one.holds
        assert written(one, "yes").is_over


def test_a_token_may_open_what_comes_before_it() -> None:
    opening = VOCABULARY.token_to_id("<|user|>")
    scope = Scope(openings={opening: text_pattern("</think>")}, skips_space=True)
    one = constraint(scope=scope)
    assert one.allowed()[opening]
    one.accept(opening)
    assert not one.holds
    for token in VOCABULARY.encode_within("hm</think>"):
        one.accept(token)
    assert written(one, "no").allowed()[EOS]
    one = written(constraint(scope=scope), "n")
    assert not one.allowed()[opening], "at the beginning only"


def test_it_holds_again_after_each_mark_if_it_repeats() -> None:
    scope = Scope(mark=text_pattern("<c>"))
    one = constraint(Grammar.gbnf('root ::= "yes</c>"'), scope=scope)
    for _ in range(2):
        for token in VOCABULARY.encode_within("well <c>"):
            one.accept(token)
        assert one.holds
        written(one, "yes</c>")
        assert not one.holds
        assert not one.is_over


def test_marks_within_reasoning_are_none() -> None:
    """Neither in reasoning that the prompt opens, nor in one that the answer does."""
    opening = VOCABULARY.token_to_id("<|user|>")
    think = {opening: text_pattern("</think>")}
    mark = text_pattern("<c>")
    grammar = Grammar.gbnf('root ::= "yes</c>"')
    for scope in (Scope(before=think[opening], mark=mark), Scope(openings=think, mark=mark)):
        one = constraint(grammar, scope=scope)
        if scope.openings:
            one.accept(opening)
        for token in VOCABULARY.encode_within("I <c> may</think>so <c>"):
            assert not one.holds
            one.accept(token)
        assert one.holds
        for token in VOCABULARY.encode_within("yes</c>and <c"):
            one.accept(token)
        assert not one.holds


def test_a_token_that_the_model_lacks_is_refused_with_the_model_at_hand() -> None:
    grammar = Grammar.lark("start: <|nobody|> /a/")
    with pytest.raises(UsageError, match="unknown special token"):
        constraint(grammar)
