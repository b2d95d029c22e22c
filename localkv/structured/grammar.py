"""`Grammar`: what a text has to look like, in the notation of llguidance, and where it holds.

A grammar is compiled once in a process of its own, in which time, memory and stack are limited.
llguidance follows chains of references by recursion, so a chain of a thousand ends the process that
compiles it. Compiled grammars are kept by their content, and so are refusals.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import re
import signal
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import NamedTuple

from localkv.errors import UsageError
from localkv.structured.gbnf import is_gbnf
from localkv.structured.grammar_child import MAX_MEMORY
from localkv.system.limited_process import ChildEndedError, LimitedProcesses

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


COMPILE_SECONDS = 3.0
"""How long a grammar may take; the grammar of a hundred tools takes 0.1 s."""

MAX_TEXT = 1 << 20
"""Most characters of a grammar or a schema, as it is given."""

MOST_KEPT, MOST_KEPT_TEXT = 256, 16 << 20
"""Grammars that are kept, and characters of all of them."""

_HINT = "a smaller one, with fewer rules and shorter chains of references, would work"

processes = LimitedProcesses(
    "localkv.structured.grammar_child",
    does="compiles",
    many="grammars",
    memory=MAX_MEMORY,
    refused=partial(UsageError, hint=_HINT),
)


class _Kept(NamedTuple):
    """A compiled grammar: its source, or why there is none."""

    source: str = ""
    error: str = ""
    hint: str | None = None


_kept = OrderedDict[bytes, _Kept]()
_n_kept_text = 0
_lock = Lock()


def compiled_apart(notation: str, texts: Sequence[str], what: str) -> str:
    """A grammar as llguidance takes it.

    Args:
        notation: one of `grammar_child.NOTATIONS`.
        texts: the grammar; two texts if `notation` joins two.
        what: names it in errors.

    Raises:
        UsageError: it is malformed, no text is one of it, or it takes too much of anything.
        LocalKVError: no process can be started.
    """
    n_characters = sum(map(len, texts))
    if n_characters > MAX_TEXT * (4 if notation == "either" else 1):
        raise UsageError(
            f"the {what} has {n_characters:,} characters; at most {MAX_TEXT:,} are allowed"
        )
    request = (notation, tuple(texts), what)
    digest = hashlib.sha256(marshal.dumps(request)).digest()
    with _lock:
        kept = _kept.get(digest)
        if kept is not None:
            _kept.move_to_end(digest)
    if kept is None:
        kept = _compiled(request, what)
        _keep(digest, kept)
    if kept.error:
        raise UsageError(kept.error, kept.hint)
    return kept.source


def _compiled(request: tuple[str, tuple[str, ...], str], what: str) -> _Kept:
    try:
        return _Kept(**processes.ask(request, f"the {what}", COMPILE_SECONDS))
    except ChildEndedError as error:
        if error.signal == signal.SIGSEGV:
            return _Kept(error=f"the {what} is nested or chained too deeply", hint=_HINT)
        if error.signal == signal.SIGABRT:
            return _Kept(error=f"the {what} takes too much memory", hint=_HINT)
        return _Kept(error=error.message, hint=_HINT)


def _keep(digest: bytes, kept: _Kept) -> None:
    global _n_kept_text
    with _lock:
        if digest in _kept:
            return
        _kept[digest] = kept
        _n_kept_text += len(kept.source)
        while len(_kept) > MOST_KEPT or _n_kept_text > MOST_KEPT_TEXT:
            _, oldest = _kept.popitem(last=False)
            _n_kept_text -= len(oldest.source)


def forget_kept() -> None:
    """Forget all compiled grammars."""
    global _n_kept_text
    with _lock:
        _kept.clear()
        _n_kept_text = 0


MOST_SEARCHED = 512
"""Bytes at the end of a text that are searched for a mark."""


@dataclass(frozen=True)
class Scope:
    """Where a grammar begins to hold, and whether it does so again.

    Attributes:
        before: the text is free up to this, reasoning's end; None if it does not begin so.
        openings: tokens that may come first instead, each with what ends what it opened: reasoning.
            `before` is that, then.
        mark: the grammar holds after each of these, to its end, and the text is free elsewhere.
            With None all of the text keeps to the grammar, and ends with it. What goes on in the
            mark's token and does not keep to the grammar shows that it was no mark.
        skips_space: line breaks may come between `before` and the grammar.
    """

    before: re.Pattern[bytes] | None = None
    openings: dict[int, re.Pattern[bytes]] = field(default_factory=dict)
    mark: re.Pattern[bytes] | None = None
    skips_space: bool = False


EVERYWHERE = Scope()


def text_pattern(text: str) -> re.Pattern[bytes]:
    """A pattern that finds a text."""
    return re.compile(re.escape(text.encode()))
