"""The fields of a request that say how tokens are drawn; all dialects take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from localkv.errors import UsageError
from localkv.sampling.chain import parse_sampler_sequence, parse_samplers
from localkv.sampling.params import SamplingParams
from localkv.server.failures import RequestError, unsupported

BANNED = float("-inf")


class SamplingFields(msgspec.Struct, kw_only=True):
    """Names are OpenAI's and llama-server's; None is the default (`SamplingParams`)."""

    seed: int | None = None
    temperature: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    typ_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    min_keep: int | None = None
    repeat_last_n: int | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    mirostat: int | None = None
    audit: bool | None = None
    samplers: list[str] | str | None = None
    logit_bias: dict[str, float | bool] | list[list[Any]] | None = None
    ignore_eos: bool | None = None


_SAME = tuple(
    name
    for name in SamplingFields.__struct_fields__
    if name in SamplingParams.__dataclass_fields__
    and name not in ("samplers", "logit_bias", "dry_sequence_breakers")
)


def sampling_params(
    fields: SamplingFields, defaults: SamplingParams, tokens_of: Callable[[str], list[int]]
) -> SamplingParams:
    """How the tokens of a request are drawn.

    Args:
        defaults: where the request says nothing.
        tokens_of: ids of a text, as `logit_bias` may name tokens so.

    Raises:
        UsageError: a value makes no sense.
        RequestError: it is one that is not supported.
    """
    if fields.mirostat:
        raise unsupported("mirostat", "use top_p, min_p or typical_p")
    if fields.audit:
        raise unsupported("audit", "use localkv complete --audit, or audit=True in Python")
    changes: dict[str, Any] = {
        name: value for name in _SAME if (value := getattr(fields, name)) is not None
    }
    if fields.typical_p is not None:
        changes["typ_p"] = fields.typical_p
    if fields.dry_sequence_breakers is not None:
        changes["dry_sequence_breakers"] = tuple(fields.dry_sequence_breakers)
    if fields.samplers is not None:
        changes["samplers"] = (
            parse_sampler_sequence(fields.samplers)
            if isinstance(fields.samplers, str)
            else parse_samplers(";".join(fields.samplers))
        )
    if fields.logit_bias is not None:
        changes["logit_bias"] = logit_bias(fields.logit_bias, tokens_of)
    return replace(defaults, **changes)


def logit_bias(
    given: Mapping[str, float | bool] | list[list[Any]], tokens_of: Callable[[str], list[int]]
) -> dict[int, float]:
    """The bias of each token, spelled as by OpenAI ({"15043": 1}) or llama-server ([[15043, 1]],
    where false bans a token, and a text stands for its tokens).

    Raises:
        RequestError: it is neither.
    """
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    biases = dict[int, float]()
    for pair in pairs:
        match pair:
            case [int() | str() as token, bool() | int() | float() as amount]:
                if isinstance(token, bool) or amount is True:
                    raise _no_bias(pair)
                bias = BANNED if amount is False else float(amount)
            case _:
                raise _no_bias(pair)
        if isinstance(token, int):
            biases[token] = bias
        elif token.lstrip("-").isdecimal() and isinstance(given, Mapping):
            biases[int(token)] = bias
        else:
            biases.update(dict.fromkeys(tokens_of(token), bias))
    return biases


def _no_bias(pair: object) -> RequestError:
    return RequestError(
        400, f"logit_bias: {pair!r:.80} is not a token with a number", 'as in {"15043": -1}'
    )


def stop_strings(given: str | list[str] | None) -> tuple[str, ...]:
    """The strings that end a text.

    Raises:
        UsageError: there are more than any API allows.
    """
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > 16:
        raise UsageError(f"stop has {len(stops)} strings", hint="up to 16 are possible")
    return tuple(stop for stop in stops if stop)
