"""`Family`: how the models of a family write calls; `CallReader` finds the calls in an answer.

The families' files share what follows them: parts of parsers, and terms of grammars.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localkv.errors import UsageError
from localkv.structured.schema import styled
from localkv.tool_calls.source import CallArguments, CallEvent, Content, Source, Steps
from localkv.tool_calls.tools import Tool, Tools

Term = Callable[[str], str]
"""A text as a term of Lark: a control token by its id, else a literal."""

MOST_NAME = 200
"""Most characters of a name with the mark after it; a longer text is not taken as a name."""


@dataclass(frozen=True)
class CallRules:
    """Lark's rules for calls.

    Attributes:
        mark: the text that calls begin with; "" if there is none.
        one: what follows the mark where there is one call.
        many: what follows where there may be several.
        rules: that these two name, a line each.
        before: what may come before the mark, where a call is required.
        mark_term: the mark as a term of Lark; "" if that is `term(mark)`.
    """

    mark: str
    one: str
    many: str
    rules: Sequence[str]
    before: str = ""
    mark_term: str = ""


@dataclass(frozen=True)
class Family:
    """How calls are written.

    Attributes:
        name: of the family.
        parse: takes all of a text.
        rules: of calls of some tools.
        id_size: characters of an id; 0 for any.
    """

    name: str
    parse: Callable[[Source, Tools], Steps[None]]
    rules: Callable[[Sequence[Tool], Term], CallRules]
    id_size: int = 0


_LETTERS = string.ascii_letters + string.digits
_ID_SIZE = 24


class CallReader:
    """Splits an answer into text and calls.

    How the text is cut into pieces changes nothing but where deltas end. Text that is no call stays
    text. Reasoning has to be taken out before. A server makes one for each answer::

        reader = CallReader(family_of(template), tools)
        for piece in answer:
            send(reader.push(piece))
        send(reader.end())

    Args:
        family: of the model (`detection.family_of`).
        tools: of the request; with none, all is text.
        new_id: makes the ids of calls; None makes random ones, as the family takes them.

    Attributes:
        n_calls: that have begun.
    """

    def __init__(
        self, family: Family, tools: Tools, *, new_id: Callable[[], str] | None = None
    ) -> None:
        self._source = Source(new_id or (lambda: _new_id(family.id_size)))
        self._steps = family.parse(self._source, tools) if tools else None

    @property
    def n_calls(self) -> int:
        return self._source.n_calls

    def push(self, piece: str) -> list[CallEvent]:
        """What a piece of text adds."""
        if self._steps is None:
            return [Content(piece)] if piece else []
        self._source.text += piece
        return self._news()

    def end(self, *, is_cut: bool = False) -> list[CallEvent]:
        """What is left at the end of the text.

        Args:
            is_cut: the text was cut. What belongs to a call, or may become one, is no text then,
                and arguments end where they are.
        """
        if self._steps is None:
            return []
        self._source.is_all = not is_cut
        return self._news(is_cut=is_cut)

    def _news(self, *, is_cut: bool = False) -> list[CallEvent]:
        source = self._source
        if is_cut:
            source.end_call(is_whole=False)
        elif self._steps is not None:
            next(self._steps, None)
        if source.is_all:
            source.say(source.text[source.at :])
            source.finish()
        news, source.events = _joined(source.events), []
        return news


def _new_id(size: int) -> str:
    letters = "".join(secrets.choice(_LETTERS) for _ in range(size or _ID_SIZE))
    return letters if size else f"call_{letters}"


def _joined(events: list[CallEvent]) -> list[CallEvent]:
    """Events with neighbours of a kind as one."""
    joined: list[CallEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            joined[-1] = CallArguments(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined


def everything_between(source: Source, mark: str, call: Callable[[], Steps[bool]]) -> Steps[None]:
    """Take all of a text, with a call after each mark. A mark without one is text.

    Args:
        call: takes what follows the mark; False if that is no call, and the source may be anywhere.
    """
    while (yield from source.text_up_to(mark)):
        begin, n_calls = source.at, source.n_calls
        if not (yield from call()) and source.n_calls == n_calls:
            source.at = begin
            source.say(mark)


def calls_in_sections(
    source: Source, section: str, mark: str, call: Callable[[], Steps[bool]], end: str
) -> Steps[None]:
    """Take all of a text, with calls in sections.

    Args:
        section: the mark that a section begins with.
        mark: the mark that a call in it begins with.
        call: takes what follows the call's mark; False if that is no call, and the source may be
            anywhere.
        end: of a section.
    """
    yield from everything_between(source, section, lambda: _section(source, mark, call, end))


def _section(source: Source, mark: str, call: Callable[[], Steps[bool]], end: str) -> Steps[bool]:
    """Take calls and the end of their section; False if there is none."""
    n_calls, at = source.n_calls, source.at
    while True:
        yield from source.spaces()
        if not (yield from source.follows(mark)) or not (yield from call()):
            break
        at = source.at
    if source.n_calls > n_calls:
        source.at = at
        yield from after(source, end)
    return source.n_calls > n_calls


def call_of_object(source: Source, name: str) -> Steps[None]:
    """Hand on a call whose arguments are the JSON value that follows."""
    source.begin_call(name)
    value = yield from source.value(source.argue)
    source.end_call(is_whole=value is not None)


def after(source: Source, *closing: str) -> Steps[None]:
    """Take texts that should follow, with white space before each, as far as they do."""
    for text in closing:
        at = source.at
        yield from source.spaces()
        if not (yield from source.follows(text)):
            source.at = at


def quoted(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def json_of(schema: object, what: str, tool: Tool) -> str:
    """JSON of a schema, as a term of Lark.

    Args:
        what: names the schema in errors.
        tool: whose schema it is in.

    Raises:
        UsageError: there is no grammar for it.
    """
    return f"%json {json.dumps(styled(schema, what, tool.parameters, tool.room))}"


def arguments_of(tool: Tool) -> str:
    """A tool's arguments as a term of Lark: JSON of an object in any case.

    Raises:
        UsageError: there is no grammar for them.
    """
    what = f"the schema of the tool {tool.name!r}"
    kind = tool.parameters.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise UsageError(
            f"{what} can't be used: its type is {kind!r:.60}, and arguments are objects"
        )
    return json_of({**tool.parameters, "type": "object"}, what, tool)


def text_rule(name: str, mark: str, term: Term) -> str:
    """A rule for any text up to a mark, with it.

    A control token is no text, so it ends one. Else the text ends where the mark is there first.
    """
    closing = term(mark)
    if closing != quoted(mark):
        return f"{name}: {name.upper()}? {closing}\n{name.upper()}: /(.|\\n)+/"
    escaped = re.sub(r"([\\^$.|?*+()\[\]{}/])", r"\\\1", mark)
    return f"{name}[lazy]: /(.|\\n)*?{escaped}/"


def alternatives(terms: Sequence[str]) -> str:
    """Any of some terms."""
    return "(" + " | ".join(terms) + ")"


def any_call(tools: Sequence[Tool]) -> str:
    """The term of a call of any tool, where `call_0` is the rule of the first, and so on."""
    return alternatives([f"call_{i}" for i in range(len(tools))])
