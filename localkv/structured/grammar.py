"""`Grammar`: what a text has to look like, in the notation of llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from localkv.errors import UsageError
from localkv.structured.gbnf import is_gbnf
from localkv.structured.grammar_process import compiled_apart

Schema = Mapping[str, object] | bool | str
"""A JSON schema, as a value or as JSON text."""


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
        """JSON that a schema of draft 4 to 2020-12 describes; all of the schema holds.

        White space is as `json.dumps` writes it. Properties come in the order in which the schema
        lists them, and no others unless it says so (`additionalProperties`). Keywords that
        describe, such as `title`, and keywords that no draft knows, say nothing about a text.

        Raises:
            UsageError: it is no schema, has a keyword without a grammar (`not`, `uniqueItems`,
                `if`), names a missing schema, takes too much, or nothing satisfies it.
        """
        what = "JSON schema"
        try:
            text = schema if isinstance(schema, str) else json.dumps(_plain(schema))
        except RecursionError:
            raise UsageError(f"the {what} is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise UsageError(f"the {what} is not JSON: {error}") from None
        return cls._compiled("json_schema", text, what=what)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def gbnf(cls, text: str) -> Grammar:
        """A grammar as llama.cpp has them.

        Raises:
            UsageError: it is malformed, no text is one of it, or it takes too much.
        """
        return cls._compiled("gbnf", text)

    @classmethod
    def lark(cls, text: str, what: str = "grammar") -> Grammar:
        """A grammar in llguidance's dialect of Lark, whose lexemes are as long as they can be.

        Tokens that it names are looked up when a model is to write by it, so an error about those
        comes only then (`Constraint`).

        Raises:
            UsageError: it is malformed, no text is one of it, or it takes too much.
        """
        return cls._compiled("lark", text, what=what)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """All of the text matches a regular expression of Rust's `regex`.

        Raises:
            UsageError: it is malformed, looks ahead or back, or takes too much.
        """
        return cls._compiled("regex", pattern, what="regular expression")

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
        what = f"{one.what} or the {other.what}"
        return cls._compiled("either", one.source, other.source, what=what)

    @classmethod
    def _compiled(cls, notation: str, *texts: str, what: str = "grammar") -> Grammar:
        return cls(compiled_apart(notation, texts, what), what)


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


def _plain(value: object) -> object:
    """A copy of a schema whose mappings are dictionaries."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
