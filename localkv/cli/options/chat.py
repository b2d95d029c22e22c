"""The options that a chat template is rendered with: llama.cpp's names where it has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import click

from localkv.cli.options import option
from localkv.cli.parsing.escapes import unescape
from localkv.cli.parsing.nearness import distance
from localkv.cli.parsing.option_types import WHOLE, Choice, Whole
from localkv.cli.parsing.prompt import read_file, without_final_newline
from localkv.errors import UsageError
from localkv.loader.named_templates import NAMED_TEMPLATES
from localkv.loader.reasoning_tags import EFFORTS
from localkv.option_names import unknown_name

_CHAT_OPTIONS = (
    *("chat_template_kwargs", "think", "prefill", "tools"),
    *("reasoning_budget", "reasoning_effort"),
    *("system_prompt", "system_prompt_file", "chat_template", "chat_template_file"),
)


def system_options(panel: str, what: str, implied: str = "") -> list[click.Parameter]:
    """The options for an instruction; `system_text` reads them."""
    return [
        option(
            "-sys",
            "--system-prompt",
            panel=panel,
            metavar="TEXT",
            help=f"An instruction that comes before the {what}{implied}.",
        ),
        option(
            "-sysf",
            "--system-prompt-file",
            panel=panel,
            metavar="FILE",
            help=f"The instruction, from a UTF-8 file without its last line break; "
            f"- is stdin{implied}.",
        ),
    ]


def system_text(values: Mapping[str, Any], *, escape: bool) -> str | None:
    """The instruction that the values of `system_options` give, if they give one.

    Raises:
        UsageError: there are two, or the file can't be read.
    """
    text, file = nearest(values, "system_prompt", "system_prompt_file")
    if file is not None:
        return without_final_newline(read_file(file, "the system prompt"))
    return unescape(text) if text is not None and escape else text


def template_options(panel: str, *, implied: str = "") -> list[click.Parameter]:
    """The options for another template than the model's; `template_text` reads them."""
    return [
        option(
            "--chat-template",
            panel=panel,
            llama_env="CHAT_TEMPLATE",
            metavar="NAME",
            help=f"A chat template in place of the model's: a name of llama.cpp's "
            f"({', '.join(NAMED_TEMPLATES)}), or Jinja{implied}.",
        ),
        option(
            "--chat-template-file",
            panel=panel,
            llama_env="CHAT_TEMPLATE_FILE",
            metavar="FILE",
            help=f"The template, from a file with Jinja{implied}.",
        ),
    ]


def template_text(values: Mapping[str, Any]) -> str | None:
    """The template that the values of `template_options` give, if they give one.

    Raises:
        UsageError: there are two, there is none of that name, or the file can't be read.
    """
    given, file = nearest(values, "chat_template", "chat_template_file")
    if file is not None:
        return read_file(file, "the chat template")
    if given is None:
        return None
    named = NAMED_TEMPLATES.get(given.lower())
    if named is None and not any(mark in given for mark in ("{{", "{%")):
        hint = f"localkv complete {WHOLE} lists the names"
        if Path(given).is_file():
            hint = f"--chat-template-file {given} takes a file"
        raise unknown_name(
            "--chat-template: there is no chat template called", given, NAMED_TEMPLATES, hint
        )
    return named or given


def nearest(values: Mapping[str, Any], text: str, file: str) -> tuple[str | None, str | None]:
    """A text or a file that means the same: the one that the user gave nearest.

    Raises:
        UsageError: both are as near.
    """
    if values[text] is None or values[file] is None:
        return values[text], values[file]
    ctx = click.get_current_context()
    near, nearer = distance(ctx, text), distance(ctx, file)
    if near == nearer:
        one, other = (f"--{name.replace('_', '-')}" for name in (text, file))
        raise UsageError(f"{one} and {other} exclude each other", hint="give one")
    return (values[text], None) if near < nearer else (None, values[file])


def chat_options(panel: str, *, implied: str = "") -> list[click.Parameter]:
    """The options; `chat_arguments` reads them.

    Args:
        panel: their heading in the help.
        implied: the end of each option's help.
    """
    return [
        option(
            "--think/--no-think",
            panel=panel,
            type=bool,
            default=None,
            help="Let the model reason before it answers, or not: the template's variable "
            f"enable_thinking, which Qwen3's family reads{implied}.",
        ),
        option(
            "--reasoning-budget",
            panel=panel,
            llama_env="THINK_BUDGET",
            type=Whole(-1),
            metavar="N",
            help="Most tokens of reasoning at the start of an answer; then its end is put there, "
            f"and the answer goes on. -1 for no limit, 0 for none{implied}.",
        ),
        option(
            "--reasoning-effort",
            panel=panel,
            type=Choice(EFFORTS),
            help="How much the model reasons: none switches it off, the others are for templates "
            f"that read reasoning_effort, as gpt-oss's{implied}.",
        ),
        option(
            "--prefill",
            panel=panel,
            metavar="TEXT",
            help=f"The answer begins with this text{implied}.",
        ),
        option(
            "--tools",
            panel=panel,
            metavar="FILE",
            help="A JSON list of the tools that the model is told of, as OpenAI's API takes it"
            f"{implied}.",
        ),
        option(
            "--chat-template-kwargs",
            panel=panel,
            llama_env="CHAT_TEMPLATE_KWARGS",
            metavar="JSON",
            help="More variables for the chat template, an object such as "
            f'{{"reasoning_effort": "high"}}{implied}.',
        ),
    ]


def uses_chat_options(values: Mapping[str, Any]) -> bool:
    """Whether one of these options is given."""
    return any(values[name] is not None for name in _CHAT_OPTIONS)


def chat_arguments(values: Mapping[str, Any], *, escape: bool) -> dict[str, Any]:
    """The arguments of `LLM.chat_prompt` that the values of `chat_options` stand for.

    Raises:
        UsageError: JSON is malformed, or of the wrong kind; the file can't be read.
    """
    kwargs, tools, prefill = (values[name] for name in ("chat_template_kwargs", "tools", "prefill"))
    variables: Any = {}
    if kwargs is not None:
        variables = _parsed(kwargs, "--chat-template-kwargs")
        if not isinstance(variables, dict):
            _refuse("--chat-template-kwargs", "an object", variables)
    listed: Any = []
    if tools is not None:
        listed = _parsed(read_file(tools, "--tools"), f"--tools {tools}")
        if not isinstance(listed, list):
            _refuse(f"--tools {tools}", "a list", listed)
        for number, tool in enumerate(listed):
            if not isinstance(tool, dict):
                _refuse(f"--tools {tools}, [{number}]", "an object", tool)
    return {
        "template_kwargs": variables,
        "tools": listed,
        "enable_thinking": values["think"],
        "reasoning_budget": values["reasoning_budget"],
        "reasoning_effort": values["reasoning_effort"],
        "prefill": unescape(prefill) if prefill is not None and escape else prefill or "",
    }


def _parsed(text: str, what: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = (
            f"line {error.lineno}, column {error.colno}"
            if "\n" in text
            else f"column {error.colno}"
        )
        raise UsageError(f"{what} is not JSON: {error.msg} at {where}") from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(f"{what} is not JSON: {reason}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}


def _refuse(what: str, wanted: str, value: object) -> NoReturn:
    got = "null" if value is None else _KINDS.get(type(value), "a number")
    raise UsageError(f"{what} must be {wanted}, not {got}")
