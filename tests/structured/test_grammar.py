"""Grammars of every notation: what they refuse, and that GBNF is read as llama.cpp reads it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from localkv.errors import UsageError
from localkv.loader.tokenizer import load_tokenizer
from localkv.structured.constraint import GrammarTokens
from localkv.structured.grammar import Grammar, grammar_of
from support.paths import ROOT

TOKENS = GrammarTokens(load_tokenizer(ROOT / "models/tales-4M-Q8_0.gguf"))


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether a text is one of the grammar's, and all of one."""
    matcher = LLMatcher(TOKENS.for_llguidance, grammar.source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENS.for_llguidance.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "string"}}, "no grammar for not"),
        ({"type": "array", "uniqueItems": True}, "no grammar for uniqueItems"),
        ({"if": {"const": 1}, "then": {}}, "no grammar for if, then"),
        ({"$ref": "#/$defs/x"}, "'#/$defs/x', which is not in the schema"),
        ({"$ref": "http://example.org/x"}, "which is not in the schema"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "format": "regex"}, "Unknown format: regex"),
        ({"type": "banana"}, "Invalid type: banana"),
        ({"not": {"const": 1}, "x-guidance": {"lenient": True}}, "no grammar for not"),
        (False, "nothing satisfies it"),
        ("{", "is not JSON"),
        ("[1]", "no object"),
        ({"const": {1}}, "is not JSON"),
        ({"const": "\ud800"}, "unexpected end of hex escape"),
        ({"minimum": 10**400}, "no grammar for numbers beyond 2^1328"),
        ('{"items":' * 300 + "{}" + "}" * 300, "nested too deeply"),
        ('{"not":' * 5000 + "{}" + "}" * 5000, "nested too deeply"),
    ],
)
def test_a_schema_without_a_grammar_is_refused_in_one_line(schema: object, reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        Grammar.json_schema(schema)
    assert reason in refused.value.message
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("root ::= x", "no rule 'x'"),
        ('x ::= "a"', "no rule 'root'"),
        ("start: foo", 'unknown name: "foo"'),
        ('root ::= "\ud800"', "surrogates not allowed"),
        ("start: " + "(" * 500 + '"a"' + ")" * 500, "too deeply nested"),
        ('root ::= "a', "Unexpected end of input"),
        ('root ::= "\\', "can't be read"),
        ("root ::= [b-a]", "can't be used"),
        (r'root ::= "\ud83d"', r"a character that does not exist: \ud83d"),
        (r"root ::= [a-\U00110000]", r"a character that does not exist: \U00110000"),
        ("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "nested too deeply"),
    ],
)
def test_malformed_gbnf_is_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        Grammar.of_text(text)
    assert reason in refused.value.message
    assert "\n" not in str(refused.value)


def test_only_one_of_two_options_may_be_given() -> None:
    with pytest.raises(UsageError, match="give one of them"):
        grammar_of({}, 'root ::= "a"')
    assert grammar_of(None, None) is None


@pytest.mark.parametrize(
    ("text", "yes", "no"),
    [
        ('root ::= word "x"\nword ::= [a-z]+', ["abx", "xx"], ["ab", "x"]),
        ('root ::= [a-z]+ "ing"', ["winding", "inging"], ["ing", "win"]),
        ('root ::= [a-z] [a-z] | "abcd"', ["ab", "zz", "abcd"], ["abc"]),
        ('root ::= . "b" | ""', ["\nb", "éb", ""], ["b"]),
        ('root ::= "é\\n" [^a-c]{2,3} "\\x41"?', ["é\nxyA", "é\nzzz"], ["é\nx", "é\nax"]),
        (r'root ::= "\U0001F600" [\U0001F600-\U0001F64F]', ["😀😃"], ["😀a", "😀"]),
        (r'root ::= "\u0041\xe9" [\u0000-\u002f\u00E9]', ["Aé!", "Aéé"], ["Aé0", "A!"]),
        (r"root ::= [a&&~~\]\x2d]+", ["a&~]-", "--"], ["b", "^"]),
        (r'root ::= [^\x00-\x1f"] # "\U0001F600 [', ["a"], ['"', "\n"]),
        ('root ::= a-b # a comment\na-b ::= ("(" a-b ")")*', ["", "(())()"], ["(", ")("]),
    ],
)
def test_gbnf_is_read_character_by_character(text: str, yes: list[str], no: list[str]) -> None:
    grammar = Grammar.of_text(text)
    assert [accepts(grammar, one) for one in yes] == [True] * len(yes)
    assert [accepts(grammar, one) for one in no] == [False] * len(no)


PIECES = st.sampled_from(['"a"', '"ab"', '"ba"', "[ab]", "[^a]", '"b"'])
PARTS = st.tuples(PIECES, st.sampled_from(["", "*", "+", "?", "{2}", "{1,2}"]))


@settings(max_examples=25, deadline=None)
@given(
    sides=st.lists(st.lists(PARTS, min_size=1, max_size=3), min_size=1, max_size=2),
    texts=st.lists(st.text("abc", max_size=6), min_size=4, max_size=4),
)
def test_gbnf_has_the_language_of_its_regular_expression(
    sides: list[list[tuple[str, str]]], texts: list[str]
) -> None:
    gbnf = " | ".join(" ".join(a + b for a, b in side) for side in sides)
    expression = "|".join(
        "".join("(?:" + a.strip('"') + ")" + b for a, b in side) for side in sides
    )
    grammar = Grammar.gbnf(f"root ::= {gbnf}")
    for text in texts:
        assert accepts(grammar, text) == bool(re.fullmatch(expression, text)), (gbnf, text)


def test_a_character_that_the_tokenizer_takes_for_another() -> None:
    """SentencePiece encodes U+2581 as a space; what is forced must be what is written."""
    text = "<\u2581a b\u2581>"
    ids = TOKENS.for_llguidance.tokenize_str(text)
    assert TOKENS.for_llguidance.decode_str(ids) == text
    assert accepts(Grammar.gbnf(f'root ::= "{text}"'), text)


def test_other_notations() -> None:
    assert accepts(Grammar.of_text('start: "a" /[0-9]+/'), "a12")
    assert accepts(Grammar.regex("a|bc"), "bc")
    assert accepts(Grammar.json_object(), '{"a": [1, null]}')
    assert not accepts(Grammar.json_object(), "[]")
    spaced = "{" + "\n" * 30 + "}"
    assert not accepts(Grammar.json_object(), spaced)  # else a model may never come to an end
