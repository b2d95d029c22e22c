"""The sampler flags, named as llama.cpp's, and the `SamplingParams` that they stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import click

from localkv.cli.options import option
from localkv.cli.parsing.escapes import unescape
from localkv.cli.parsing.option_types import Text, Whole
from localkv.cli.parsing.parameters import Option
from localkv.errors import UsageError
from localkv.sampling.chain import parse_sampler_sequence, parse_samplers
from localkv.sampling.params import SamplingParams
from localkv.sampling.table import SAMPLER_LETTERS, SAMPLER_ORDER

_SAMPLING = "Sampling"
_DEFAULTS = SamplingParams()
_LOGIT_BIAS = re.compile(r"\s*(\d+)\s*([+-])\s*(\S+)\s*")


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


def _number(field: str, *names: str, help: str, llama_env: str | None = None) -> Option:
    """The option of a numeric field; its range is checked by `SamplingParams`."""
    default = getattr(_DEFAULTS, field)
    return option(
        field,
        *names,
        panel=_SAMPLING,
        llama_env=llama_env,
        type=type(default),
        default=default,
        show_default=True,
        metavar="N",
        help=help,
    )


def sampling_options() -> list[click.Parameter]:
    """Options named like the fields of `SamplingParams`; `sampling_params` reads them."""
    return [
        option(
            "-s",
            "--seed",
            panel=_SAMPLING,
            type=Whole(-1),
            default=-1,
            metavar="SEED",
            help="Of the random generator; -1 draws one, which --json and --stats show. "
            "[default: -1]",
        ),
        _number("temperature", "--temp", "--temperature", help="0 takes the likeliest token."),
        _number("top_k", "--top-k", llama_env="TOP_K", help="Keep the N likeliest, 0 for all."),
        _number("top_p", "--top-p", help="Keep the likeliest that add up to N, 1 for all."),
        _number("min_p", "--min-p", help="Keep those at least N times as likely as the likeliest."),
        _number("typ_p", "--typical", "--typical-p", help="Locally typical sampling, 1 for off."),
        _number(
            "top_n_sigma",
            "--top-nsigma",
            "--top-n-sigma",
            help="Keep logits within N standard deviations of the largest, -1 for off.",
        ),
        _number("xtc_probability", "--xtc-probability", help="How often XTC runs, 0 for off."),
        _number("xtc_threshold", "--xtc-threshold", help="XTC drops all but one above this."),
        _number("dynatemp_range", "--dynatemp-range", help="Temperature varies by N, 0 for off."),
        _number("dynatemp_exponent", "--dynatemp-exp", help="Exponent of its entropy."),
        _number(
            "repeat_last_n",
            "--repeat-last-n",
            help="Tokens that the penalties look back on, -1 for the whole context.",
        ),
        _number("repeat_penalty", "--repeat-penalty", help="Divides repeated logits, 1 for off."),
        _number("presence_penalty", "--presence-penalty", help="Off a repeated token's logit."),
        _number("frequency_penalty", "--frequency-penalty", help="The same, per repetition."),
        _number("dry_multiplier", "--dry-multiplier", help="DRY repetition penalty, 0 for off."),
        _number("dry_base", "--dry-base", help="DRY grows by this with each repeated token."),
        _number("dry_allowed_length", "--dry-allowed-length", help="Repetitions DRY lets pass."),
        _number(
            "dry_penalty_last_n",
            "--dry-penalty-last-n",
            help="Tokens that DRY looks back on, -1 for the whole context.",
        ),
        option(
            "dry_sequence_breakers",
            "--dry-sequence-breaker",
            panel=_SAMPLING,
            multiple=True,
            metavar="TEXT",
            help='DRY does not look past this; replaces \\n : " *, may be given again; '
            '"none" for no breakers.',
        ),
        option(
            "-l",
            "--logit-bias",
            panel=_SAMPLING,
            type=LogitBias(),
            multiple=True,
            metavar="ID(+/-)BIAS",
            help="Add to a token's logit, e.g. 15043+1; -inf bans it. May be given again.",
        ),
        option(
            "--samplers",
            panel=_SAMPLING,
            metavar="NAMES",
            help="The samplers to run, in order, with ; between them. "
            f"[default: {';'.join(SAMPLER_ORDER)}]",
        ),
        option(
            "sampling_seq",
            "--sampler-seq",
            "--sampling-seq",
            panel=_SAMPLING,
            metavar="LETTERS",
            help=f"The same by letters. [default: {SAMPLER_LETTERS}]",
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
