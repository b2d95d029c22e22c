"""The fields of a request that say how tokens are drawn; all dialects take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from localkv.sampling.chain import parse_sampler_sequence, parse_samplers
from localkv.sampling.params import MOST_BIAS, NUMBERS, SamplingParams, shown
from localkv.server import limits
from localkv.server.failures import RequestError, unsupported

BANNED = float("-inf")


if TYPE_CHECKING:

    class _Numbers(msgspec.Struct, kw_only=True):
        """The numbers that the code of a dialect names."""

        seed: limits.Seed | None = None
        temperature: limits.Temperature | None = None
        top_k: limits.TopK | None = None
        top_p: limits.TopP | None = None
else:
    _Numbers = msgspec.defstruct(
        "_Numbers",
        [
            (spelling, limits.sampling(name) | None, None)
            for name, number in NUMBERS.items()
            for spelling in (*number.aliases, name)
        ],
        kw_only=True,
        module=__name__,
    )


class SamplingFields(_Numbers, kw_only=True):
    """The numbers of `SamplingParams`, and what is spelled otherwise in requests.

    Names are OpenAI's and llama-server's; None is the default.
    """

    dry_sequence_breakers: limits.Breakers | None = None
    mirostat: limits.Int32 | None = None
    audit: bool | None = None
    samplers: limits.SamplerNames | limits.SamplerLetters | None = None
    logit_bias: limits.Biases | limits.BiasPairs | None = None
    ignore_eos: bool | None = None


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
        name: value
        for name, number in NUMBERS.items()
        for spelling in (name, *number.aliases)
        if (value := getattr(fields, spelling)) is not None
    }
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
                if abs(amount) > MOST_BIAS:
                    raise _no_bias(pair)
                bias = BANNED if amount is False else float(amount)
            case _:
                raise _no_bias(pair)
        if isinstance(token, int):
            biases[token] = bias
        elif len(token) > 64:
            raise _no_bias(pair)
        elif token.removeprefix("-").isdecimal() and isinstance(given, Mapping):
            biases[int(token)] = bias
        else:
            biases.update(dict.fromkeys(tokens_of(token), bias))
    return biases


def _no_bias(pair: object) -> RequestError:
    token, *amounts = pair if isinstance(pair, list | tuple) and pair else (pair,)
    return RequestError(
        400,
        f"logit_bias: {shown(token)} with {', '.join(map(shown, amounts)) or 'nothing'} is no "
        f"token with a number from {-MOST_BIAS:g} to {MOST_BIAS:g}, or false",
        'as in {"15043": -1}',
    )


def stop_strings(given: str | list[str] | None) -> tuple[str, ...]:
    """The strings that end a text."""
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    return tuple(stop for stop in stops if stop)
