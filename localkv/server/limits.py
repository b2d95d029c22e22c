"""What a request may be: the type, range and length of each kind of field, for all dialects.

Fields of bodies have these types, so msgspec checks them while it reads a body, and
`/openapi.json` shows them. `FURTHER_LIMITS` has what a type can't say. `docs/server-operation.md`
shows all of it as a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, inspect

from localkv.sampling.params import (
    LEAST_TEMPERATURE,
    LONGEST_BREAKER,
    MOST_BIAS,
    MOST_BREAKERS,
    NUMBERS,
    SAMPLER_ORDER,
    Range,
)
from localkv.server.failures import RequestError


def sampling(name: str) -> Any:
    """The type of a number in `SamplingParams`, with its range."""
    least, most = NUMBERS[name].range
    return Annotated[type(least), Meta(ge=least, le=most)]


if TYPE_CHECKING:
    Seed: TypeAlias = int
    Temperature: TypeAlias = float
    TopK: TypeAlias = int
    TopP: TypeAlias = float
else:
    Seed, Temperature = sampling("seed"), sampling("temperature")
    TopK, TopP = sampling("top_k"), sampling("top_p")

MOST_ADAPTERS, MOST_SCALE = 256, 1e4
"""Adapters of a model, and the scale of one (`loader.adapter_file`, `kernels.low_rank`)."""
MOST_CHOICES = 128
MOST_LOGPROBS = 100
MOST_TOKENS = 2**53 - 1
"""Largest integer that every JSON library keeps; clients send it for "no limit"."""

Int32: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""A number whose range depends on the server, or that is refused unless it is 0."""
Milliseconds: TypeAlias = Annotated[float, Meta(ge=-1e15, le=1e15)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Tokens: TypeAlias = Annotated[int, Meta(ge=-2, le=MOST_TOKENS)]
"""Most tokens of an answer; negative ones set no limit."""
SomeTokens: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
Budget: TypeAlias = Annotated[int, Meta(ge=-1, le=MOST_TOKENS)]
"""Most tokens of reasoning; -1 sets no limit."""
Choices: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_CHOICES)]
Logprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]

Name: TypeAlias = Annotated[str, Meta(max_length=512)]
"""A model, tool, file or field."""
KeepAlive: TypeAlias = (
    Annotated[float, Meta(ge=-1e15, le=1e15)] | Annotated[str, Meta(max_length=64)]
)
"""Seconds, or a duration as Go has it: "1h30m". A negative one has no end."""
Word: TypeAlias = Annotated[str, Meta(max_length=64)]
"""One of a few words, such as the effort of reasoning."""
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model reasons; `answer_tags.EFFORTS`."""
StopString: TypeAlias = Annotated[str, Meta(max_length=512)]
Stops: TypeAlias = Annotated[list[StopString], Meta(max_length=16)]
Breaker: TypeAlias = Annotated[str, Meta(max_length=LONGEST_BREAKER)]
Breakers: TypeAlias = Annotated[list[Breaker], Meta(max_length=MOST_BREAKERS)]
SamplerLetters: TypeAlias = Annotated[str, Meta(max_length=len(SAMPLER_ORDER))]
SamplerNames: TypeAlias = Annotated[list[Word], Meta(max_length=len(SAMPLER_ORDER))]
Bias: TypeAlias = Annotated[float, Meta(ge=-MOST_BIAS, le=MOST_BIAS)]
Biases: TypeAlias = Annotated[dict[Word, Bias | bool], Meta(max_length=4096)]
BiasPairs: TypeAlias = Annotated[
    list[Annotated[list[Any], Meta(min_length=2, max_length=2)]], Meta(max_length=4096)
]
Choice: TypeAlias = Annotated[str, Meta(max_length=4096)]
TextChoices: TypeAlias = Annotated[list[Choice], Meta(min_length=1, max_length=1024)]
"""Texts to choose an answer from."""
GrammarText: TypeAlias = Annotated[str, Meta(max_length=1 << 19)]

Object: TypeAlias = Annotated[dict[Name, Any], Meta(max_length=512)]
"""An object that is read elsewhere: a schema, a format, the choice of a tool."""
MANY = Meta(max_length=10_000)
TOOLS = Meta(max_length=512)
Messages: TypeAlias = Annotated[list[dict[str, Any]], MANY]
Blocks: TypeAlias = Annotated[list[dict[str, Any]], MANY]
Tools: TypeAlias = Annotated[list[dict[str, Any]], TOOLS]
Names: TypeAlias = Annotated[list[Name], Meta(max_length=64)]
Refused: TypeAlias = Annotated[list[Any], Meta(max_length=10_000)]
"""A list that must be empty, since the server has no such thing."""


class AdapterScale(msgspec.Struct, kw_only=True):
    """An adapter by its number, and how much of it is applied."""

    id: Annotated[int, Meta(ge=0, le=MOST_ADAPTERS - 1)]
    scale: Annotated[float, Meta(ge=-MOST_SCALE, le=MOST_SCALE)]


AdapterScales: TypeAlias = Annotated[list[AdapterScale], Meta(max_length=MOST_ADAPTERS)]
Variables: TypeAlias = Annotated[dict[Name, Any], Meta(max_length=64)]
"""Variables of a template."""
Metadata: TypeAlias = Annotated[
    dict[Word, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
TokenIds: TypeAlias = Annotated[list[TokenId], Meta(max_length=1 << 19)]
TextParts: TypeAlias = Annotated[list[Any], Meta(max_length=1 << 19)]
"""Texts and token ids in turn."""

MOST_INPUTS = 2048
Inputs: TypeAlias = str | TextParts | Object
"""A text, its token ids, an object with a text, or a list of such."""
Documents: TypeAlias = Annotated[list[Any], Meta(max_length=MOST_INPUTS)]
"""Texts, or objects with one in `text`."""
MOST_PROMPTS = 256
MOST_VARIABLES_BYTES = 64 << 10


class FurtherLimit(NamedTuple):
    """A limit of a field that its type can't express.

    Attributes:
        field: its name.
        wanted: what it has to be, in a few words.
        inside, outside: values just within the limit and just beyond it; None for no value.
    """

    field: str
    wanted: str
    inside: Any
    outside: Any


FURTHER_LIMITS = (
    FurtherLimit(
        "temperature",
        f"0 or less, or at least {LEAST_TEMPERATURE:g}",
        LEAST_TEMPERATURE,
        LEAST_TEMPERATURE / 2,
    ),
    FurtherLimit(
        "logit_bias",
        f"pairs: a token and a number from {-MOST_BIAS:g} to {MOST_BIAS:g}, or false",
        [[5, MOST_BIAS]],
        [[5, 2 * MOST_BIAS]],
    ),
    FurtherLimit("samplers", "each sampler once", "kt", "ktk"),
    FurtherLimit("samplers", "each sampler once", ["top_k", "temperature"], ["top_k", "top-k"]),
    FurtherLimit(
        "chat_template_kwargs",
        f"up to {MOST_VARIABLES_BYTES >> 10} KiB of JSON",
        {"a": "x" * (MOST_VARIABLES_BYTES - 8)},
        {"a": "x" * (MOST_VARIABLES_BYTES - 7)},
    ),
    FurtherLimit("prompt", f"up to {MOST_PROMPTS} prompts", None, ["a"] * (MOST_PROMPTS + 1)),
)
"""Each is checked where the field is read."""


def check_variables(variables: Mapping[str, Any] | None) -> None:
    """Refuse variables of a template that are too large.

    Raises:
        RequestError: the variables have more than `MOST_VARIABLES_BYTES`.
    """
    n_bytes = len(msgspec.json.encode(variables)) if variables else 0
    if n_bytes > MOST_VARIABLES_BYTES:
        raise RequestError(
            400,
            f"chat_template_kwargs must be up to {MOST_VARIABLES_BYTES} bytes of JSON, "
            f"not {n_bytes}",
        )


_AT = re.compile(r" - at `(?P<key>key` in `)?\$\.?(?P<path>.*)`$")
_STEP = re.compile(r"[^.\[\]]+|\[[^\]]*\]")
_LONGEST_SHOWN = 1 << 16
"""Most bytes of a body whose error shows the wrong value."""


def type_error(error: msgspec.ValidationError, kind: type, body: bytes) -> RequestError:
    """The error about a body with a value outside its limits.

    Args:
        kind: what the body should have been.
    """
    at = _AT.search(text := str(error))
    if at is None or not at["path"] or text.startswith("Object"):
        return RequestError(400, text)
    path = at["path"]
    steps = _STEP.findall(path)
    wanted = _type_at(kind, steps)
    if wanted is None:
        return RequestError(400, text)
    if isinstance(wanted, inspect.AnyType):
        message = f"{path}: {text[: at.start()].lower()}"
    elif at["key"]:
        key = next((one for one in _members(wanted) if isinstance(one, inspect.DictType)), None)
        message = f"names in {path} must be {described(key.key_type if key else wanted)}"
    else:
        message = f"{path} must be {described(wanted)}"
        if len(body) <= _LONGEST_SHOWN:
            message += _found(body, steps)
    names = [step for step in steps if not step.startswith("[")]
    return RequestError(400, message, extra={"param": names[-1] if names else path})


def _found(body: bytes, steps: list[str]) -> str:
    """The value at a place of a body, if it is short enough to be shown."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return ""  # a number with too many digits: only decoding to a type reports it
    for step in steps:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and step[1:-1].isdecimal():
            value = value[int(step[1:-1])]
        else:
            return ""
    names: dict[type, str] = {dict: "fields", list: "items", str: "characters"}
    what = names.get(type(value), "")
    if what and (len(value) > 60 or (what == "items" and value)):
        return f", not {len(value):,} {what}"
    return f", not {msgspec.json.encode(value).decode():.60}"


@lru_cache(64)
def _fields(kind: type) -> Mapping[str, inspect.Type]:
    """The fields of a struct, with their types."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: field.type for field in info.fields}


def _members(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    """The types that a value may have, without null."""
    several = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return tuple(one for one in several if not isinstance(one, inspect.NoneType))


def _type_at(kind: type, steps: Iterable[str]) -> inspect.Type | None:
    """The type of a place in a body."""
    found: inspect.Type = inspect.type_info(kind)
    for step in steps:
        for one in _members(found):
            if isinstance(one, inspect.StructType) and step in (fields := _fields(one.cls)):
                found = fields[step]
                break
            if isinstance(one, inspect.ListType) and step[1:-1].isdecimal():
                found = one.item_type
                break
            if isinstance(one, inspect.DictType) and step == "[...]":
                found = one.value_type
                break
        else:
            return None
    return found


def described(kind: inspect.Type) -> str:
    """A type with its limits, in words: "a whole number from 1 to 128"."""
    return " or ".join(dict.fromkeys(_described(one, "a ", "") for one in _members(kind)))


def _described(kind: inspect.Type, article: str, plural: str) -> str:
    match kind:
        case inspect.IntType(ge=least, le=most):
            return f"{article}whole number{plural}{_between(least, most)}"
        case inspect.FloatType(ge=least, le=most):
            return f"{article}number{plural}{_between(least, most)}"
        case inspect.StrType(max_length=most):
            return f"{article}text{plural}{_up_to(most, 'characters')}"
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(map(str, values))
        case inspect.ListType(item_type=item, min_length=least, max_length=most):
            items = " or ".join(_described(one, "", "s") for one in _members(item))
            count = "" if most is None else f"{'' if least == most else 'up to '}{most:,} "
            return f"{article}list{plural} of {count}{items}"
        case inspect.DictType(max_length=most):
            start = "an object" if article else "objects"
            return f"{start}{_up_to(most, 'fields')}"
        case inspect.StructType():
            return "an object" if article else "objects"
    return "anything" if article else "items"


def table(kinds: Iterable[type]) -> list[str]:
    """All limits of bodies as a table in Markdown, for the documentation."""
    wanted = dict[str, list[str]]()
    for kind in kinds:
        for name, words in _rows(inspect.type_info(kind)):
            if words not in wanted.setdefault(name, []):
                wanted[name].append(words)
    for one in FURTHER_LIMITS:
        if one.wanted not in wanted[one.field]:
            wanted[one.field].append(one.wanted)
    by_words = dict[str, list[str]]()
    for name, several in sorted(wanted.items()):
        by_words.setdefault("; ".join(several), []).append(f"`{name}`")
    rows = [f"| {', '.join(names)} | {words} |" for words, names in by_words.items()]
    return ["| Field | What it may be |", "|---|---|", *rows]


def _rows(kind: inspect.Type) -> Iterator[tuple[str, str]]:
    """Every field with a limit, in a type and the types in it, and what it may be."""
    for one in _members(kind):
        if isinstance(one, inspect.ListType):
            yield from _rows(one.item_type)
        elif isinstance(one, inspect.StructType):
            for name, of_field in _fields(one.cls).items():
                yield from _rows(of_field)
                if any(_has_limit(member) for member in _members(of_field)):
                    yield name, described(of_field)


def _has_limit(kind: inspect.Type) -> bool:
    names = ("ge", "le", "max_length")
    return any(getattr(kind, name, None) is not None for name in names)


def _between(least: float | None, most: float | None) -> str:
    return "" if least is None or most is None else f" {Range(least, most)}"


def _up_to(most: int | None, what: str) -> str:
    return "" if most is None else f" of up to {most:,} {what}"
