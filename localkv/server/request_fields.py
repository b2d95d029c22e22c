"""The fields that requests for a text have in more than one dialect.

`SamplingFields` say how tokens are drawn, and all dialects have them. `RequestFields` add, in
OpenAI's words and llama-server's, the length, what ends a text and what it has to be.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from localkv.sampling.params import (
    MOST_BIAS,
    NUMBERS,
    SamplingParams,
    parse_sampler_sequence,
    parse_samplers,
    shown,
)
from localkv.server import limits
from localkv.server.failures import RequestError, unsupported
from localkv.structured.grammar import Grammar

BANNED = float("-inf")

STRUCTURE = (
    "response_format",
    "json_schema",
    "grammar",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""Fields that say what an answer is, like `structured_outputs`."""

if TYPE_CHECKING:
    from localkv.server.front import Front

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


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's field for what a text has to be: one of these."""

    json: limits.Object | limits.GrammarText | None = None
    regex: limits.GrammarText | None = None
    choice: limits.TextChoices | None = None
    grammar: limits.GrammarText | None = None
    json_object: bool | None = None
    structural_tag: limits.Object | limits.GrammarText | None = None
    whitespace_pattern: limits.GrammarText | None = None


class RequestFields(SamplingFields, kw_only=True):
    """What each API adds fields of its own to; None is the default."""

    model: limits.Name | None = None
    stream: bool | None = None
    max_tokens: limits.Tokens | None = None
    max_completion_tokens: limits.Tokens | None = None
    n_predict: limits.Tokens | None = None
    n: limits.Choices | None = None
    stop: limits.StopString | limits.Stops | None = None
    response_format: limits.Object | None = None
    json_schema: limits.Object | None = None
    grammar: limits.GrammarText | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: limits.Object | limits.GrammarText | None = None
    guided_regex: limits.GrammarText | None = None
    guided_choice: limits.TextChoices | None = None
    guided_grammar: limits.GrammarText | None = None
    cache_prompt: bool | None = None
    id_slot: limits.Int32 | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    lora: limits.AdapterScales | None = None

    @property
    def reuses(self) -> bool:
        """Whether what the cache has of the prompt is taken."""
        return self.cache_prompt is not False


def adapters_of(front: Front, given: list[limits.AdapterScale] | None) -> dict[int, float] | None:
    """The scales of adapters by their numbers, for a `Submit`; None for the server's.

    Raises:
        RequestError: there is no such adapter, or one is named twice.
    """
    if given is None:
        return None
    n, scales = len(front.facts.adapters), dict[int, float]()
    for one in given:
        if one.id >= n:
            there = f"adapters are 0 to {n - 1}" if n else "start the server with --lora"
            raise RequestError(400, f"there is no adapter {one.id}", there, extra={"param": "lora"})
        if one.id in scales:
            raise RequestError(400, f"adapter {one.id} is named twice", extra={"param": "lora"})
        scales[one.id] = one.scale
    return scales


def place_of(front: Front, body: RequestFields) -> int:
    """The place that a text is kept for, to be saved; -1 for the one in which it runs.

    Raises:
        RequestError: there is no such place.
    """
    place, n_places = -1 if body.id_slot is None else body.id_slot, front.facts.n_parallel
    if not -1 <= place < n_places:
        raise RequestError(400, f"id_slot is {place}", f"slots are 0 to {n_places - 1}")
    return place


async def grammar_for(front: Front, body: RequestFields) -> Grammar | None:
    """What the text of an answer has to be; None if it is free.

    Raises:
        RequestError: the request says so in several fields, or there is no grammar for a schema.
    """
    given = {name: getattr(body, name) for name in STRUCTURE}
    if (outputs := body.structured_outputs) is not None:
        if outputs.structural_tag or outputs.whitespace_pattern:
            raise unsupported(
                "structured_outputs: structural_tag or whitespace_pattern", "use tools or a grammar"
            )
        for name, value in msgspec.structs.asdict(outputs).items():
            given[f"structured_outputs.{name}"] = value
    return await front.in_thread(grammar_of, given)


def grammar_of(given: Mapping[str, Any]) -> Grammar | None:
    """The grammar of an answer; None if it is free.

    Args:
        given: fields by name. `response_format` is OpenAI's: text, json_object or json_schema. Its
            schema may be in `json_schema`, or in `schema`, as some clients have it. `json_schema`
            and `grammar` are llama-server's, the others vLLM's; one that is null says nothing.

    Raises:
        RequestError: several fields are given, or one is malformed.
        UsageError: there is no grammar for a schema.
    """
    wanted = {
        name: value
        for name, value in given.items()
        if value not in (None, "", False)
        and not (name == "response_format" and (not value or _schema_of(value) is None))
    }
    if len(wanted) > 1:
        names = " and ".join(wanted)
        raise RequestError(400, f"{names} say what the answer is: give one of them")
    for name, value in wanted.items():
        match name.rpartition("guided_")[2].rpartition(".")[2]:
            case "response_format":
                return Grammar.json_schema(_schema_of(value) or {})
            case "json_schema" | "json":
                return Grammar.json_schema(value or {"type": "object"})
            case "json_object":
                return Grammar.json_object()
            case "regex":
                return Grammar.regex(value)
            case "choice":
                texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
                # one lexeme: as rules, each text would be an item of the parser's
                return Grammar.lark(f"start: TEXT\nTEXT: {texts}", "list of choices")
            case "grammar":
                return Grammar.of_text(value)
    return None


def _schema_of(response_format: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The JSON schema that it asks for; None for any text."""
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise RequestError(
            400, f"response_format has type {kind!r:.60}", "use text, json_object or json_schema"
        )
    wrapped = response_format.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
    if schema is None:
        schema = response_format.get("schema")
    if schema is None and kind == "json_schema":
        raise RequestError(400, "response_format: json_schema has no schema")
    if schema is not None and not isinstance(schema, Mapping):
        raise RequestError(400, "response_format: the schema is not an object")
    return schema or {"type": "object"}


async def text_fields(front: Front, body: RequestFields) -> dict[str, Any]:
    """Fields of a `Submit` that goes on from plain text.

    Raises:
        RequestError: as `grammar_for`, `place_of` and `adapters_of`.
    """
    return {
        "stop": stop_strings(body.stop),
        "grammar": await grammar_for(front, body),
        "reuses": body.reuses,
        "place": place_of(front, body),
        "lora": adapters_of(front, body.lora),
    }
