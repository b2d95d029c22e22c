"""`Grammar`: what a text has to look like, in the notation of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localkv.errors import LocalKVError, UsageError
from localkv.structured.gbnf import gbnf_to_lark, is_gbnf

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Schema = Mapping[str, object] | bool | str
"""A JSON schema, as a value or as JSON text."""

WHITE_SPACE = r"( |\n{1,2}[ \t]{0,20})?"
"""Between JSON's tokens, as llama.cpp has it: a small model must not go on with spaces forever."""
_NO_EXTENSION = "NoExtension"
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")


@dataclass(frozen=True)
class Grammar:
    """A grammar whose syntax is right. It is of no model: any may write by it.

    Attributes:
        source: as llguidance takes it.
        what: its kind, for errors.
        after: text is free up to this, then keeps to the grammar to its end, then is free again;
            "" where all of the text keeps to it. (It is of an answer, whose reasoning is free.)
        is_all: reasoning keeps to it, too.
    """

    source: str
    what: str = "grammar"
    after: str = ""
    is_all: bool = False

    @classmethod
    def json_schema(cls, schema: Schema) -> Grammar:
        """JSON that a schema describes: of draft 4 to 2020-12, all of it or an error.

        Properties come in the order in which the schema lists them. Keywords that describe, such as
        `title`, and those that no draft knows, say nothing about a text.

        Raises:
            UsageError: it is no schema, has a keyword that there is no grammar for (`not`,
                `uniqueItems`, `if`), names a schema that is not there, or nothing satisfies it.
        """
        from llguidance import LLMatcher

        what = "JSON schema"
        try:
            text = schema if isinstance(schema, str) else json.dumps(_plain(schema))
            value = json.loads(text)
        except RecursionError:
            raise UsageError(f"the {what} is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise UsageError(f"the {what} is not JSON: {error}") from None
        if value is False or not isinstance(value, bool | dict):
            reason = "nothing satisfies it" if value is False else "it is no object"
            raise UsageError(f"the {what} can't be used: {reason}")
        options: JsonCompileOptions = {"lenient": False, "whitespace_pattern": WHITE_SPACE}
        schema_text = "{}" if value is True else text
        source = _source(
            lambda: LLMatcher.grammar_from_json_schema(schema_text, overrides=options), what
        )
        return cls(source, what)._checked()

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def gbnf(cls, text: str) -> Grammar:
        """A grammar as llama.cpp has them.

        Raises:
            UsageError: it is malformed.
        """
        return cls._of_lark(gbnf_to_lark(text))._checked()

    @classmethod
    def lark(cls, text: str, what: str = "grammar") -> Grammar:
        """A grammar in llguidance's dialect of Lark, whose lexemes are the longest that there are.

        Tokens that it names are looked up when a model is to write by it, so an error about those
        comes only then (`Constraint`).

        Raises:
            UsageError: it is malformed.
        """
        return cls._of_lark(text, what)._checked()

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """All of the text matches a regular expression of Rust's `regex`.

        Raises:
            UsageError: it is malformed, or looks ahead or back.
        """
        from llguidance import LLMatcher

        what = "regular expression"
        return cls(_source(lambda: LLMatcher.grammar_from_regex(pattern), what), what)._checked()

    @classmethod
    def of_text(cls, text: str) -> Grammar:
        """GBNF if it has a rule with `::=`, else Lark.

        Raises:
            UsageError: it is malformed.
        """
        return cls.gbnf(text) if is_gbnf(text) else cls.lark(text)

    @classmethod
    def either(cls, one: Grammar, other: Grammar) -> Grammar:
        """A text is of one of two grammars, all of it.

        Raises:
            UsageError: llguidance refuses them together.
        """
        named = [{**_part(part.source), "name": f"part_{i}"} for i, part in enumerate((one, other))]
        start = {"lark_grammar": "%llguidance {}\nstart: @part_0 | @part_1\n"}
        what = f"{one.what} or the {other.what}"
        return cls(json.dumps({"grammars": [start, *named]}), what)._checked()

    @classmethod
    def _of_lark(cls, text: str, what: str = "grammar") -> Grammar:
        from llguidance import LLMatcher

        return cls(_source(lambda: LLMatcher.grammar_from_lark(text), what), what)

    def _checked(self) -> Grammar:
        from llguidance import LLMatcher

        is_error, messages = LLMatcher.validate_grammar_with_warnings(self.source)
        if is_error:
            raise self.refusal(messages[0])
        return self

    def refusal(self, message: str) -> UsageError:
        """The error about a grammar that llguidance refuses, in one line."""
        found = _UNIMPLEMENTED.search(message)
        if found is None:
            return UsageError(f"the {self.what} can't be used: {one_line(message)}")
        keys = found[1].replace('"', "").split(", ")
        return UsageError(
            f"the {self.what} can't be used: no grammar for {', '.join(keys)}",
            hint="leave it out, and check the finished text",
        )


def grammar_of(schema: Schema | None, grammar: Grammar | str | None) -> Grammar | None:
    """The grammar that a caller asks for with one of two options, or None.

    Raises:
        UsageError: both are there, or the one is malformed.
    """
    if schema is not None and grammar is not None:
        raise UsageError("schema and grammar both say what the text has to be: give one of them")
    if schema is not None:
        return Grammar.json_schema(schema)
    if not isinstance(grammar, str | Grammar | None):
        raise UsageError(f"grammar is a {type(grammar).__name__}, not text or a Grammar")
    return Grammar.of_text(grammar) if isinstance(grammar, str) else grammar


def one_line(message: str) -> str:
    """An error of llguidance: what it says, without the pictures of where."""
    head = message.partition("\n<state>")[0]
    lines = [line.strip() for line in head.splitlines()]
    kept = [line for i, line in enumerate(lines) if i == 0 or line.startswith("error:")]
    return " ".join(kept) or "unknown"


def failure(message: str) -> LocalKVError:
    """The error about a grammar that took too much while a text was written."""
    reason = one_line(message)
    if reason.startswith(_NO_EXTENSION):
        reason = "no text of it goes on here"
    return LocalKVError(f"the grammar can't be followed any further: {reason}")


def _source(make: Callable[[], str], what: str) -> str:
    """What llguidance makes of a text.

    Raises:
        UsageError: it is nested too deeply, or has a number or a character that there is not.
    """
    try:
        return make()
    except ValueError as error:  # UnicodeEncodeError is one
        if "recursion limit" in str(error):
            raise UsageError(f"the {what} is nested too deeply") from None
        raise UsageError(f"the {what} can't be read: {one_line(str(error))}") from None


def _part(source: str) -> dict[str, object]:
    """A grammar as llguidance takes it beside others; what is no JSON is Lark."""
    if not source.startswith("{"):
        return {"lark_grammar": source}
    part: dict[str, object] = json.loads(source)["grammars"][0]
    return part


def _plain(value: object) -> object:
    """A copy of a schema whose mappings are dictionaries."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
