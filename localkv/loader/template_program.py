"""A chat template as a Jinja program: compiled and run, with markup kept separate from other text.

It runs in Jinja's sandbox, with the settings, filters and functions that Hugging Face's
`apply_chat_template` gives templates. The sandbox keeps a program from touching anything; it does
not keep it from taking all memory and time. So nothing here may run in a process that matters:
`localkv.loader.template_child` is where it does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from localkv.errors import ChatTemplateError
from localkv.loader.template_text import TemplateText, concatenate, format_result, markup, segments

if TYPE_CHECKING:
    from jinja2 import Environment, nodes
    from jinja2.parser import Parser

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
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
