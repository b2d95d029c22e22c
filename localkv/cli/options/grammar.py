"""The options that keep a text to a grammar or a JSON schema: llama.cpp's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from localkv.cli.options import option
from localkv.cli.parsing.prompt import read_file
from localkv.errors import UsageError

if TYPE_CHECKING:
    from localkv.structured.grammar import Grammar

_STRUCTURED = "Structured output"
_JSON_BEGINS = ("{", "[", "true", "false")


def grammar_options() -> list[click.Parameter]:
    """What the text has to be."""
    return [
        option(
            "-j",
            "--json-schema",
            panel=_STRUCTURED,
            metavar="JSON",
            help="The text is JSON that this JSON schema describes: the schema itself, such as "
            '\'{"type": "object"}\' for any object, or a file. With --chat it comes after the '
            "reasoning.",
        ),
        option(
            "-jf",
            "--json-schema-file",
            panel=_STRUCTURED,
            metavar="FILE",
            help="The same, with the schema in a file; - is stdin.",
        ),
        option(
            "--grammar",
            panel=_STRUCTURED,
            metavar="TEXT",
            help="The text is one of this grammar: GBNF, as llama.cpp has it, or llguidance's "
            "Lark.",
        ),
        option(
            "--grammar-file",
            panel=_STRUCTURED,
            metavar="FILE",
            help="The same, with the grammar in a file; - is stdin.",
        ),
    ]


def grammar_of_options(values: Mapping[str, Any]) -> Grammar | None:
    """The grammar that one of the options asks for.

    Raises:
        UsageError: several do, or the one is malformed, or needs what there is no grammar for.
    """
    names = ("json_schema", "json_schema_file", "grammar", "grammar_file")
    given = [name for name in names if values[name] is not None]
    if not given:
        return None
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise UsageError(f"{flags} say what the text has to be: give one of them")
    from localkv.structured.grammar import Grammar

    [name] = given
    value = str(values[name])
    if name == "json_schema_file":
        value = read_file(value, "the JSON schema")
    elif name == "grammar_file":
        value = read_file(value, "the grammar")
    elif name == "json_schema" and not value.lstrip().startswith(_JSON_BEGINS):
        if not os.path.exists(value):
            raise UsageError(f"{value!r} is neither a JSON schema nor a file of one")
        value = read_file(value, "the JSON schema")
    return Grammar.of_text(value) if "grammar" in name else Grammar.json_schema(value)
