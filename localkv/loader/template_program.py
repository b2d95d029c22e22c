"""A chat template as a Jinja program: compiled and run, with markup kept separate from other text.

A prompt is made of markup, whose control tokens count, and of users' and models' text, in which
`<|im_end|>` is just text. Rendered, both are one string. Trust is tracked here. The template's own
literals are markup, and they stay markup through operations of templates on strings. Everything
else is not, be it a message or the result of an operation that is not followed here. So a string
that gets lost on the way loses rights and gains none. (llama.cpp's `common/jinja/string.h` tracks
the opposite, which strings are input.)

The program runs in Jinja's sandbox, with the settings, filters and functions that Hugging Face's
`apply_chat_template` gives templates. The sandbox keeps a program from touching anything; it does
not keep it from taking all memory and time: `'a' * 10**10` is one step of C code that no check in
Python can interrupt, and so is comparing two lists that each hold the next one twice, sixty deep.
So this runs as a process of its own, `python -m localkv.loader.template_program`, the child of
`template_process`. It may have `MAX_MEMORY` and no more, and its parent ends it when time is up.
"""

from __future__ import annotations

import json
import marshal
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

from localkv.errors import ChatTemplateError
from localkv.system.limited_child import run

if TYPE_CHECKING:
    from jinja2 import Environment, nodes
    from jinja2.parser import Parser


_RUNS = re.compile(rb"\x00+|\x01+")


class TemplateText(str):
    """Text and, for each character, whether it is markup; to everything else it is a `str`.

    Args:
        text: the text.
        is_markup: a byte for each character, 1 for markup; without it nothing is.
    """

    __slots__ = ("_is_markup",)
    _is_markup: bytes

    def __new__(cls, text: str = "", is_markup: bytes | None = None) -> TemplateText:
        made = super().__new__(cls, text)
        made._is_markup = bytes(len(made)) if is_markup is None else is_markup
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        # Jinja's HTML strings (from its `escape` filter) have their own idea of `+`.
        if type(other) not in (str, TemplateText):
            return NotImplemented
        return TemplateText(str.__add__(self, other), self._is_markup + _flags(other))

    def __radd__(self, other: str) -> str:
        if type(other) is not str:
            return NotImplemented
        return TemplateText(str.__add__(other, self), _flags(other) + self._is_markup)

    def __mul__(self, count: SupportsIndex) -> str:
        return TemplateText(str.__mul__(self, count), self._is_markup * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        text = str.__mod__(self, values)
        return format_result(self, text, values if isinstance(values, tuple) else (values,))

    def __getitem__(self, index: SupportsIndex | slice) -> str:
        flags = self._is_markup[index]
        return TemplateText(
            str.__getitem__(self, index), flags if isinstance(flags, bytes) else bytes((flags,))
        )

    def join(self, parts: Iterable[str], /) -> str:
        parts = list(parts)
        return TemplateText(str.join(self, parts), self._is_markup.join(map(_flags, parts)))

    def strip(self, chars: str | None = None, /) -> str:
        start = len(self) - len(str.lstrip(self, chars))
        return self[start : start + len(str.strip(self, chars))]

    def lstrip(self, chars: str | None = None, /) -> str:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._located(str.splitlines(self, True), "")
        return lines if keepends else [line[: len(str.splitlines(line)[0])] for line in lines]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._located(list(str.partition(self, sep)), "")
        return before, found, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._located(list(str.rpartition(self, sep)), "")
        return before, found, after

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return str.replace(self, old, new, count)
        return TemplateText(new, _flags(new)).join(self.split(old, count))

    def upper(self) -> str:
        return self._recased(str.upper(self))

    def lower(self) -> str:
        return self._recased(str.lower(self))

    def title(self) -> str:
        return self._recased(str.title(self))

    def capitalize(self) -> str:
        return self._recased(str.capitalize(self))

    def _recased(self, text: str) -> str:
        # No character's other case is shorter, so in a text that keeps its length all stay put.
        return TemplateText(text, self._is_markup) if len(text) == len(self) else text

    def _located(self, parts: list[str], sep: str | None) -> list[str]:
        """The parts, cut out of this text: in order, with `sep` (None: spaces) between."""
        located = []
        end = 0
        for part in parts:
            start = str.find(self, part, end) if sep is None else end
            end = start + len(part)
            located.append(self[start:end])
            end += len(sep or "")
        return located


def markup(text: str) -> TemplateText:
    """Text that is all markup."""
    return TemplateText(text, b"\1" * len(text))


def concatenate(parts: Iterable[object]) -> TemplateText:
    """`"".join(map(str, parts))`."""
    texts = [str(part) for part in parts]
    return TemplateText("".join(texts), b"".join(map(_flags, texts)))


def format_result(template: str, text: str, values: Iterable[object]) -> str:
    """A formatted text: markup if all of the template and of the values is (numbers are)."""
    for value in (template, *values):
        if not isinstance(value, int | float) and b"\0" in _flags(value):
            return text
    return markup(text)


def segments(text: str) -> Iterator[tuple[str, bool]]:
    """Cut a text where markup begins or ends.

    Returns:
        the pieces, plain strings, each with whether it is markup.
    """
    flags = _flags(text)
    for match in _RUNS.finditer(flags):
        yield str.__getitem__(text, slice(*match.span())), bool(flags[match.start()])


def _flags(value: object) -> bytes:
    if isinstance(value, TemplateText):
        return value._is_markup
    return bytes(len(value)) if isinstance(value, str) else b"\0"


_MAX_WORDS = 300
"""Characters of an error that are shown: it may quote the template or the conversation."""

_DATES = {"date_string": "%d %b %Y", "datetime": "%b %d %Y"}

_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))


class TemplateProgram:
    """A compiled template.

    Args:
        source: the Jinja program.
        bos_token, eos_token: texts of these tokens.

    Raises:
        ChatTemplateError: the program is malformed.
    """

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        from jinja2 import TemplateSyntaxError

        environment = _environment()
        try:
            tree = environment.parse(source)
            _track_literals(tree, environment)
            code = environment.compile(tree)
            self._template = environment.template_class.from_code(
                environment, code, environment.globals
            )
        except MemoryError:
            raise
        except TemplateSyntaxError as error:
            where = f"line {error.lineno}: {_one_line(error)}"
            raise ChatTemplateError(f"the chat template is malformed: {where}") from None
        except Exception as error:
            message = f"the chat template is malformed: {_one_line(error)}"
            raise ChatTemplateError(message) from None
        self._tokens = {"bos_token": markup(bos_token), "eos_token": markup(eos_token)}

    def render(self, variables: Mapping[str, Any], max_chars: int) -> list[tuple[str, bool]]:
        """The prompt in pieces, each with whether the template wrote it itself.

        Args:
            variables: JSON values, `messages` among them.
            max_chars: how long the prompt may be.

        Raises:
            ChatTemplateError: the program fails on this conversation, refuses it, or writes more.
        """
        try:
            messages = [_with_role(message) for message in variables["messages"]]
            every = {**_dates(), **variables, **self._tokens, "messages": messages}
            parts = self._template.generate(every)
            return list(segments(concatenate(_at_most(max_chars, parts))))
        except (ChatTemplateError, MemoryError):
            raise
        except Exception as error:  # a program out of a file can fail in any way
            raise ChatTemplateError(f"the chat template fails: {_one_line(error)}") from None


def _at_most(max_chars: int, parts: Iterable[str]) -> Iterator[str]:
    n_chars = 0
    for part in parts:
        n_chars += len(part)
        if n_chars > max_chars:
            raise ChatTemplateError(
                f"the chat template makes more than {max_chars:,} characters of this conversation"
            )
        yield part


def _with_role(message: Any) -> Any:
    """A message whose role counts as markup: templates build control tokens from these words."""
    role = message.get("role") if isinstance(message, dict) else None
    if isinstance(role, str) and role in _ROLES:
        return {**message, "role": markup(role)}
    return message


def _one_line(error: object) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _MAX_WORDS else f"{words[:_MAX_WORDS]} ..."


def _environment() -> Environment:
    """Jinja as Hugging Face's `render_jinja_template` sets it up, and tracking markup."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks text that a model is trained to say; rendering ignores it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return Scope(body, lineno=line)

    class TrackingEnvironment(ImmutableSandboxedEnvironment):
        concat = staticmethod(concatenate)

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            wrapped = super().wrap_str_format(value)
            if wrapped is None or not isinstance(value.__self__, TemplateText):
                return wrapped

            def formatted(*args: Any, **kwargs: Any) -> str:
                text = str.__str__(wrapped(*args, **kwargs))
                return format_result(value.__self__, text, (*args, *kwargs.values()))

            return formatted

    environment = TrackingEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _tojson
    # Nothing is escaped for HTML, so nothing needs to be exempt. Jinja's own type for that would
    # lose track of markup, and escape text that is added to it, which no template intends.
    environment.filters["safe"] = str
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _track_literals(tree: nodes.Template, environment: Environment) -> None:
    """Make each string that the template spells out markup, and `~` and `join` keep track of it.

    The literals become attributes of the environment, which is this template's own.
    """
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    class Literals(NodeTransformer):
        n_literals = 0

        def literal(self, text: str, node: nodes.Node) -> nodes.Node:
            name = f"literal_{self.n_literals}"
            self.n_literals += 1
            setattr(environment, name, markup(text))
            return nodes.EnvironmentAttribute(name, lineno=node.lineno)

        def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
            return self.literal(node.data, node)

        def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
            return self.literal(node.value, node) if isinstance(node.value, str) else node

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
            self.generic_visit(node)
            parts = nodes.Tuple(node.nodes, "load", lineno=node.lineno)
            concat = nodes.EnvironmentAttribute("concat", lineno=node.lineno)
            return nodes.Call(concat, [parts], [], None, None, lineno=node.lineno)

        def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
            if node.name == "join" and not node.args and not node.kwargs:
                node.args.append(nodes.Const("", lineno=node.lineno))
            return self.generic_visit(node)

    Literals().visit(tree)
    tree.set_environment(environment)


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(f"the chat template refuses the conversation: {_one_line(message)}")


def _dates() -> dict[str, str]:
    """Today, as llama.cpp tells templates that can't call `strftime_now`."""
    return {name: _strftime_now(format) for name, format in _DATES.items()}


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


MAX_MEMORY = 1 << 30
"""Bytes of address space: 40 MiB are Python and Jinja."""

_program = lru_cache(maxsize=4)(TemplateProgram)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The prompt's segments, or the error."""
    try:
        rendered = _program(*request["template"]).render(
            marshal.loads(request["variables"]), request["max_chars"]
        )
    except ChatTemplateError as error:
        return {"error": error.message}
    return {"segments": rendered}


if __name__ == "__main__":
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401

    run(answer, memory=MAX_MEMORY)
