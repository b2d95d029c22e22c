"""The options that say how a text is generated: sampling, length, and the chat template.

Names and defaults are llama.cpp's where it has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import click

from localkv.commands.options import Panel
from localkv.commands.parsing import WHOLE, Choice, Option, Text, Whole, distance
from localkv.commands.texts import read_file, unescape, without_final_newline
from localkv.errors import UsageError
from localkv.loader.answer_tags import EFFORTS, PRESERVE
from localkv.loader.named_templates import NAMED_TEMPLATES
from localkv.option_checks import unknown_name
from localkv.sampling.params import (
    NUMBERS,
    SAMPLER_LETTERS,
    SAMPLER_ORDER,
    Number,
    SamplingParams,
    parse_sampler_sequence,
    parse_samplers,
)

_SAMPLING = Panel("Sampling")
_DEFAULTS = SamplingParams()
_LOGIT_BIAS = re.compile(r"\s*(\d+)\s*([+-])\s*(\S+)\s*")

_LENGTH = Panel("Length")


class LogitBias(Text):
    """`TOKEN_ID(+/-)BIAS`, e.g. 15043+1 or 15043-inf."""

    name = "logit bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = super().convert(value, param, ctx)
        try:
            parse_logit_bias(text)
        except ValueError:
            self.fail(f"{text!r} is not TOKEN_ID+BIAS or TOKEN_ID-BIAS", param, ctx)
        return text


def parse_logit_bias(text: str) -> tuple[int, float]:
    """The token and the value added to its logit; raises ValueError if it is neither."""
    match = _LOGIT_BIAS.fullmatch(text)
    if match is None:
        raise ValueError(text)
    token, sign, amount = match.groups()
    return int(token), float(amount) * (-1.0 if sign == "-" else 1.0)


def _number(name: str, number: Number) -> Option:
    """The option of a number; `SamplingParams` checks its range."""
    default = getattr(_DEFAULTS, name)
    return _SAMPLING.option(
        " ".join((name, *number.flags)),
        llama_env=number.llama_env,
        type=type(default),
        default=default,
        metavar="N",
        help=number.help,
    )


def sampling_options() -> list[click.Parameter]:
    """Options named like the fields of `SamplingParams`; `sampling_params` reads them."""
    return [
        _SAMPLING.option(
            "-s --seed",
            type=Whole(-1),
            default=-1,
            metavar="SEED",
            help="The seed of the random generator; -1 draws one, which --json and --stats show. "
            "[default: -1]",
            show_default=False,
        ),
        *(_number(name, number) for name, number in NUMBERS.items() if number.flags),
        _SAMPLING.option(
            "dry_sequence_breakers --dry-sequence-breaker",
            multiple=True,
            metavar="TEXT",
            help='DRY does not look past this; replaces \\n : " *, may be given again; '
            '"none" for no breakers.',
        ),
        _SAMPLING.option(
            "-l --logit-bias",
            type=LogitBias(),
            multiple=True,
            metavar="ID(+/-)BIAS",
            help="Add to a token's logit, e.g. 15043+1; -inf bans it. May be given again.",
        ),
        _SAMPLING.option(
            "--samplers",
            metavar="NAMES",
            help="The samplers to run, in order, with ; between them. "
            f"[default: {';'.join(SAMPLER_ORDER)}]",
        ),
        _SAMPLING.option(
            "sampling_seq --sampler-seq --sampling-seq",
            metavar="LETTERS",
            help=f"The samplers to run, a letter for each. [default: {SAMPLER_LETTERS}]",
        ),
    ]


def sampling_params(values: Mapping[str, Any], *, escape: bool) -> SamplingParams:
    """The parameters that the values of `sampling_options` stand for.

    Raises:
        UsageError: a value is out of range, or a sampler is unknown.
    """
    special = {"dry_sequence_breakers", "logit_bias", "samplers"}
    chosen = {
        field.name: values[field.name]
        for field in fields(SamplingParams)
        if field.name in values and field.name not in special
    }
    bias: dict[int, float] = {}
    for text in values["logit_bias"]:
        token, amount = parse_logit_bias(text)
        bias[token] = bias.get(token, 0.0) + amount
    return SamplingParams(
        **chosen,
        dry_sequence_breakers=_breakers(values["dry_sequence_breakers"], escape),
        logit_bias=bias,
        samplers=_chain(values["samplers"], values["sampling_seq"]),
    )


def _breakers(given: tuple[str, ...], escape: bool) -> tuple[str, ...]:
    if not given:
        return _DEFAULTS.dry_sequence_breakers
    kept: list[str] = []
    for text in given:  # "none" clears those before it, as in llama.cpp
        kept = [] if text == "none" else [*kept, unescape(text) if escape else text]
    return tuple(kept)


def _chain(names: str | None, letters: str | None) -> tuple[str, ...]:
    if names is None and letters is None:
        return SAMPLER_ORDER
    if names is not None and letters is not None:
        raise UsageError("--samplers and --sampling-seq mean the same, give one")
    return parse_samplers(names) if names is not None else parse_sampler_sequence(letters or "")


def length_options() -> list[click.Parameter]:
    """The options that say where a generation ends."""
    return [
        _LENGTH.option(
            "n_predict -n --predict --n-predict",
            llama_env="N_PREDICT",
            type=Whole(-2),
            default=-1,
            help="Most tokens to generate; -1 and -2 go on to the end of the context.",
        ),
        _LENGTH.option(
            "stop -r --reverse-prompt --stop",
            multiple=True,
            metavar="TEXT",
            help="End before this text; may be given again.",
        ),
        _LENGTH.flag("--ignore-eos", help="Never draw a token that ends the generation."),
    ]


_CHAT_OPTIONS = (
    *("chat_template_kwargs", "think", "prefill", "tools"),
    *("reasoning_budget", "reasoning_effort", "reasoning_preserve"),
    *("system_prompt", "system_prompt_file", "chat_template", "chat_template_file"),
)


def system_options(panel: Panel, what: str, implied: str = "") -> list[click.Parameter]:
    """The options for an instruction; `system_text` reads them."""
    return [
        panel.option(
            "-sys --system-prompt",
            metavar="TEXT",
            help=f"An instruction that comes before the {what}{implied}.",
        ),
        panel.option(
            "-sysf --system-prompt-file",
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


def template_options(panel: Panel, *, implied: str = "") -> list[click.Parameter]:
    """The options for another template than the model's; `template_text` reads them."""
    return [
        panel.option(
            "--chat-template",
            llama_env="CHAT_TEMPLATE",
            metavar="NAME",
            help=f"A chat template in place of the model's: a name of llama.cpp's "
            f"({', '.join(NAMED_TEMPLATES)}), or Jinja{implied}.",
        ),
        panel.option(
            "--chat-template-file",
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


def chat_options(panel: Panel, *, implied: str = "") -> list[click.Parameter]:
    """The options; `chat_arguments` reads them.

    Args:
        panel: their heading in the help.
        implied: the end of each option's help.
    """
    return [
        panel.option(
            "--think/--no-think",
            type=bool,
            default=None,
            help="Let the model reason before it answers, or not: the template's variable "
            f"enable_thinking, which Qwen3's family reads{implied}.",
        ),
        panel.option(
            "--reasoning-budget",
            llama_env="THINK_BUDGET",
            type=Whole(-1),
            help="Most tokens of reasoning at the start of an answer; then its end is put there, "
            f"and the answer goes on. -1 for no limit, 0 for none{implied}.",
        ),
        panel.option(
            "--reasoning-effort",
            type=Choice(EFFORTS),
            help="How much the model reasons: none switches it off, the others are for templates "
            f"that read reasoning_effort, as gpt-oss's{implied}.",
        ),
        reasoning_preserve_option(panel, implied),
        panel.option(
            "--prefill", metavar="TEXT", help=f"The answer begins with this text{implied}."
        ),
        panel.option(
            "--tools",
            metavar="FILE",
            help="A JSON list of the tools that the model is told of, as OpenAI's API takes it"
            f"{implied}.",
        ),
        panel.option(
            "--chat-template-kwargs",
            llama_env="CHAT_TEMPLATE_KWARGS",
            metavar="JSON",
            help="More variables for the chat template, an object such as "
            f'{{"reasoning_effort": "high"}}{implied}.',
        ),
    ]


def reasoning_preserve_option(panel: Panel, implied: str = "") -> Option:
    return panel.option(
        "--reasoning-preserve/--no-reasoning-preserve",
        llama_env="REASONING_PRESERVE",
        type=bool,
        default=None,
        help="Keep the reasoning of earlier answers in the prompt, or leave it out, where the "
        f"template has a switch for that{implied}. [default: keep it]",
    )


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
    if values["reasoning_preserve"] is not None:
        variables.setdefault(PRESERVE, values["reasoning_preserve"])
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
