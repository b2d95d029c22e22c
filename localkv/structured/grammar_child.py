"""The process that compiles grammars: `python -m localkv.structured.grammar_child`.

It accepts a grammar that llguidance compiles for a small vocabulary, and that allows a first token.
Its stack is a quarter of `GrammarTokens.matcher`'s. The errors about what llguidance refuses are
here, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from localkv.errors import LocalKVError, UsageError
from localkv.structured.gbnf import gbnf_to_lark
from localkv.structured.schema import NOTHING, styled
from localkv.system.limited_child import run

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer


_NO_EXTENSION = "NoExtension"
_TOO_MUCH = re.compile("max is|fuel|too many|too large|limit", re.IGNORECASE)
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")


def refusal(what: str, message: str) -> UsageError:
    """The error about a grammar that llguidance refuses, in one line."""
    found = _UNIMPLEMENTED.search(message)
    if found is not None:
        keys = found[1].replace('"', "").split(", ")
        return UsageError(
            f"the {what} can't be used: no grammar for {', '.join(keys)}",
            hint="leave it out, and check the finished text",
        )
    if message.startswith("oneOf "):
        return UsageError(
            f"the {what} can't be used: alternatives of oneOf may overlap",
            hint="use anyOf, or a required property with a const of its own in each of them",
        )
    if message.startswith("panic"):
        return UsageError(f"the {what} is too large", hint="a smaller one would work")
    reason = one_line(message)
    if reason.startswith(_NO_EXTENSION):
        reason = NOTHING
    return UsageError(f"the {what} can't be used: {reason}")


def failure(message: str) -> LocalKVError:
    """The error about a grammar that took too much while a text was written, or about a text that
    it does not allow."""
    reason = one_line(message)
    if reason.startswith(_NO_EXTENSION):
        reason = "nothing can follow here"
    words = f"the grammar can't be followed any further: {reason}"
    if _TOO_MUCH.search(reason):
        hint = "fewer alternatives or optional properties at one place would work"
        return UsageError(words, hint)
    return LocalKVError(words)


def one_line(message: str) -> str:
    """An error of llguidance: what it says, without the pictures of where."""
    head = message.partition("\n<state>")[0]
    lines = [line.strip() for line in head.splitlines()]
    kept = [line for i, line in enumerate(lines) if i == 0 or line.startswith("error:")]
    return " ".join(kept) or "unknown"


MAX_MEMORY = 512 << 20
"""Bytes of address space: 60 MiB are Python and llguidance."""

ROW_ITEMS, STEP_ITEMS = 1_000, 5_000
"""Most items of a parser after one byte, and of one token together, which take some milliseconds.
Five hundred tools make five hundred; a rule that can be read in many ways makes some a byte."""

MAX_STACK = 4 << 20
"""Bytes of stack that compiling may take."""

_TOKEN_ID = re.compile(r"<\[([\d, -]*)\]>")
_TOKEN_NAME = re.compile(r"<[^<>\s\[\]\"]+>")
_MOST_NAMES = 1000
_LONGEST_ERROR = 500


def parser_limits() -> LLParserLimits:
    """What a grammar may take at each token, here and in a model's process."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=ROW_ITEMS, step_max_items=STEP_ITEMS, verbose_errors=False
    )


def answer(request: tuple[str, tuple[str, ...], str]) -> dict[str, Any]:
    """The source that llguidance takes, or the error."""
    notation, texts, what = request
    try:
        source = NOTATIONS[notation](*texts, what=what)
        _check(source, what)
    except UsageError as error:
        return {"error": f"{error.message:.{_LONGEST_ERROR}}", "hint": error.hint}
    return {"source": source}


def _of_schema(text: str, what: str) -> str:
    from llguidance import LLMatcher

    try:
        value = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise UsageError(f"the {what} is nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"the {what} is not JSON: {error}") from None
    if not isinstance(value, bool | dict):
        raise UsageError(f"the {what} can't be used: it is no object")
    schema = json.dumps(styled(value, f"the {what}"))
    return _source(lambda: LLMatcher.grammar_from_json_schema(schema), what)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _of_gbnf(text: str, what: str) -> str:
    return _of_lark(gbnf_to_lark(text), what)


def _of_lark(text: str, what: str) -> str:
    from llguidance import LLMatcher

    return _source(lambda: LLMatcher.grammar_from_lark(text), what)


def _of_regex(text: str, what: str) -> str:
    from llguidance import LLMatcher

    return _source(lambda: LLMatcher.grammar_from_regex(text), what)


def _of_two(one: str, other: str, what: str) -> str:
    named = [{**_part(source), "name": f"part_{i}"} for i, source in enumerate((one, other))]
    start = {"lark_grammar": "%llguidance {}\nstart: @part_0 | @part_1\n"}
    return json.dumps({"grammars": [start, *named]})


NOTATIONS: dict[str, Callable[..., str]] = {
    "json_schema": _of_schema,
    "gbnf": _of_gbnf,
    "lark": _of_lark,
    "regex": _of_regex,
    "either": _of_two,
}


def _part(source: str) -> dict[str, object]:
    """A grammar as llguidance takes it beside others; a text that is no JSON is Lark."""
    if not source.startswith("{"):
        return {"lark_grammar": source}
    part: dict[str, object] = json.loads(source)["grammars"][0]
    return part


def _source(make: Callable[[], str], what: str) -> str:
    """What llguidance makes of a text.

    Raises:
        UsageError: it is nested too deeply, or has an impossible number or character.
    """
    try:
        return make()
    except ValueError as error:  # UnicodeEncodeError is one
        if "recursion limit" in str(error):
            raise UsageError(f"the {what} is nested too deeply") from None
        raise UsageError(f"the {what} can't be read: {one_line(str(error))}") from None


def _check(source: str, what: str) -> None:
    """Compile a grammar as for a model, and find a first token.

    Raises:
        UsageError: llguidance refuses it, or no token can be the first.
    """
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(source)
    if is_error:
        raise refusal(what, messages[0])
    names = list(dict.fromkeys(_TOKEN_NAME.findall(source)))[:_MOST_NAMES]
    tokens = _tokens([*names, "<some token>"])
    some = 257 + len(names)
    small = _TOKEN_ID.sub(f"<[{some}]>", source)
    matcher = LLMatcher(tokens, small, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise refusal(what, matcher.get_error())
    first = matcher.compute_bitmask()
    if matcher.is_error():
        raise refusal(what, matcher.get_error())
    if not any(first):
        raise UsageError(f"the {what} can't be used: {NOTHING}")


def _tokens(names: list[str]) -> LLTokenizer:
    """A vocabulary of all bytes, an end, and control tokens."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes(names)), n_vocab=257 + len(names), eos_token=256)


class _Bytes:
    """What llguidance asks of a tokenizer."""

    def __init__(self, names: list[str]) -> None:
        self.eos_token_id, self.bos_token_id = 256, None
        self.special_token_ids = range(256, 257 + len(names))
        self.tokens = [bytes((i,)) for i in range(256)]
        self.tokens += [name.encode() for name in ("<end>", *names)]

    def __call__(self, data: bytes) -> list[int]:
        return list(data)


if __name__ == "__main__":
    import llguidance.gbnf_to_lark  # noqa: F401

    run(answer, memory=MAX_MEMORY, stack=MAX_STACK)
