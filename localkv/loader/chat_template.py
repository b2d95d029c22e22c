"""Chat templates: a conversation becomes a prompt, and then token ids.

Templates are Jinja programs out of model files, so out of the internet: they run in Jinja's
sandbox, with the settings, filters and functions that Hugging Face's `apply_chat_template` gives
them. What users and models said can't become a control token: rendering tells the template's own
text from everything else (`localkv.loader.template_text`), and only the former may hold any.

This file knows nothing about the messages of any API, and of a tokenizer only what `encode_chat`
asks of one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from localkv.errors import LocalKVError, UsageError
from localkv.loader.template_text import TemplateText, concatenate, format_result, markup, segments
from localkv.loader.vocabulary import bos_and_eos

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes
    from jinja2.parser import Parser

    from localkv.loader.metadata import Metadata

_DEFAULT_KEY = "tokenizer.chat_template"


class ChatTemplateError(LocalKVError):
    """A chat template is malformed, or refuses the conversation."""


class Segment(NamedTuple):
    """A piece of a prompt: its text, and whether the template wrote it itself."""

    text: str
    is_markup: bool


class ChatTemplate:
    """A template, compiled on first use.

    Args:
        source: the Jinja program.
        bos_token, eos_token: texts of these tokens, empty if the model has none.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt as one text; for showing, since it does not tell markup from contents.

        Args:
            messages: the conversation, usually {"role": ..., "content": ...}; JSON values only.
            add_generation_prompt: end with what opens the model's turn.
            tools: descriptions of tools as JSON schemas.
            kwargs: more variables for the template, such as `enable_thinking`.

        Raises:
            ChatTemplateError: the template is malformed or fails on this conversation, which may be
                its intention ("system role not supported").
            UsageError: a message holds something that is not JSON.
        """
        rendered = self.render_segments(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs
        )
        return "".join(segment.text for segment in rendered)

    def render_segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[Segment]:
        """The prompt in pieces; takes and raises what `render` does."""
        variables = {
            "documents": None,
            **{name: _plain(value, name) for name, value in kwargs.items()},
            "messages": [_with_role(message) for message in _plain(messages, "messages")],
            "tools": _plain(tools, "tools"),
            "add_generation_prompt": add_generation_prompt,
            "bos_token": markup(self.bos_token),
            "eos_token": markup(self.eos_token),
        }
        template = self._template
        try:
            rendered = concatenate(template.generate(variables))
        except LocalKVError:
            raise
        except Exception as error:  # a program out of a file can fail in any way
            raise ChatTemplateError(f"the chat template fails: {_one_line(error)}") from None
        return [Segment(*segment) for segment in segments(rendered)]

    @cached_property
    def _template(self) -> Template:
        from jinja2 import TemplateSyntaxError

        environment = _environment()
        try:
            tree = environment.parse(self.source)
            _track_literals(tree, environment)
            code = environment.compile(tree)
            return environment.template_class.from_code(environment, code, environment.globals)
        except TemplateSyntaxError as error:
            where = f"line {error.lineno}: {_one_line(error)}"
            raise ChatTemplateError(f"the chat template is malformed: {where}") from None
        except Exception as error:
            message = f"the chat template is malformed: {_one_line(error)}"
            raise ChatTemplateError(message) from None


def chat_template_from_metadata(metadata: Metadata, name: str | None = None) -> ChatTemplate | None:
    """The chat template of a GGUF file, None if it has none.

    Args:
        metadata: of the file.
        name: which, where there are several (`tokenizer.chat_template.NAME`).

    Raises:
        UsageError: there is none of that name.
        ModelFileError: a key is of the wrong type.
    """
    key = _DEFAULT_KEY if name is None else f"{_DEFAULT_KEY}.{name}"
    source = metadata.string(key, None)
    if source is None and name == "default":
        source = metadata.string(_DEFAULT_KEY, None)
    if source is None:
        if name is None:
            return None
        names = chat_template_names(metadata)
        raise UsageError(
            f"the model has no chat template {name!r}",
            hint=f"it has: {', '.join(names)}" if names else "it has no named ones",
        )
    tokens = metadata.strings("tokenizer.ggml.tokens", [])
    bos, eos = ("" if token is None else tokens[token] for token in bos_and_eos(metadata))
    return ChatTemplate(source, bos_token=bos, eos_token=eos)


def chat_template_names(metadata: Metadata) -> list[str]:
    """Names of the templates that a file has besides the default one."""
    prefix = _DEFAULT_KEY + "."
    return sorted(key.removeprefix(prefix) for key in metadata if key.startswith(prefix))


class ChatTokenizer(Protocol):
    """What `encode_chat` asks of a tokenizer."""

    @property
    def bos_id(self) -> int | None: ...

    @property
    def add_bos(self) -> bool: ...

    def encode_segments(
        self, segments: Iterable[tuple[str, bool]], add_special: bool = True
    ) -> list[int]: ...


def encode_chat(
    tokenizer: ChatTokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> list[int]:
    """Token ids of a conversation, ready for the model to answer.

    Control tokens come from the template alone. Where the model wants BOS there is exactly one,
    whether the template writes it or not; EOS is never added.

    Args:
        tokenizer: the model's.
        template: what to render with.
        messages, add_generation_prompt, tools, kwargs: as for `ChatTemplate.render`.

    Raises:
        ChatTemplateError, UsageError: as `ChatTemplate.render`.
    """
    prompt = template.render_segments(
        messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs
    )
    ids = tokenizer.encode_segments(prompt, add_special=False)
    bos = tokenizer.bos_id
    if tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
        ids.insert(0, bos)
    return ids


_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))


def _with_role(message: Any) -> Any:
    """A message whose role counts as markup: templates build control tokens from these words."""
    if isinstance(message, dict) and message.get("role") in _ROLES:
        return {**message, "role": markup(message["role"])}
    return message


def _plain(value: Any, where: str) -> Any:
    """A copy of a value in plain JSON types: templates see no methods and no markup of ours."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    raise UsageError(f"{where}: a {type(value).__name__} is no value of JSON")


def _one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _environment() -> Environment:
    """Jinja as Hugging Face's `render_jinja_template` sets it up, and tracking markup."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what a model is trained to say; for rendering it is nothing."""

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
    # lose track of markup, and escape what is added to it, which no template means to happen.
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
