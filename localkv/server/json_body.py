"""A request's JSON body as a typed value, within limits, and the fields in it of other servers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from localkv.server.failures import RequestError, unsupported
from localkv.server.limits import type_error
from localkv.server.request_record import warn

if TYPE_CHECKING:
    from localkv.server.front import Front
    from localkv.server.models import Models


MOST_NESTED = 64
"""Levels of objects and lists in a body."""
MOST_PARTS = 100_000
"""Most objects, lists and strings in a body, names of fields included."""
MOST_ITEMS = 1_100_000
"""Most commas in a body outside of strings, so most numbers in lists."""
MOST_ODD = 1_000
"""Most numbers in a body with an exponent or more than 24 digits. Such a number takes up to 13 us,
as long as a thousand others, and no other thread goes on meanwhile. A number of 17 digits takes as
long as fifteen."""
PART_BYTES, ITEM_BYTES = 96, 40
"""Bytes of memory for an object, a list or a string, and for a number with its place in a list."""
PIECE = 64 << 10
"""Bytes that are read before other threads get a turn."""

_WHOLE_WANTED = re.compile(r"Expected `(.* )?int( .*)?`, got `float`")
_LARGEST_WHOLE = 2**53

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_kinds = list[type]()
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}
_making = Lock()
"""Held while a decoder is made. msgspec keeps what it knows of a type with the type, before that is
complete, so a second thread that meets the type in another decoder crashes the process."""


def takes(kind: type) -> Callable[[F], F]:
    """Mark an endpoint with the type of its body, for the API's description."""

    _kinds.append(kind)

    def marked(endpoint: F) -> F:
        endpoint.body_type = kind  # type: ignore[attr-defined]
        return endpoint

    return marked


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    if kind not in _decoders:
        with _making:
            if kind not in _decoders:
                _decoders[kind] = msgspec.json.Decoder(with_others(kind))
    return _decoders[kind]


def make_decoders() -> None:
    """Make the decoders of all bodies now, so that no request waits for one."""
    for kind in _kinds:
        _decoder(kind)


def decoded(body: bytes, kind: type[T]) -> T:
    """A body whose `nesting` is right. Unknown fields pass; others must have their types.

    Raises:
        RequestError: 400, with the path of what is wrong.
    """
    if not body:
        raise RequestError(400, "the body is empty", "send JSON")
    decoder = _decoder(kind)
    try:
        value: T = decoder.decode(body)
    except msgspec.ValidationError as error:
        if not _WHOLE_WANTED.match(str(error)):
            raise type_error(error, kind, body) from None
        try:
            fields: Any = kind
            read: Any = msgspec.convert(_whole(msgspec.json.decode(body)), with_others(fields))
            value = read
        except msgspec.ValidationError as other:
            raise type_error(other, kind, body) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    if isinstance(value, msgspec.Struct):
        check_others(value, kind)
    return value


def _whole(value: Any) -> Any:
    """A value in which floats without a fraction, such as 20.0, are integers: in JSON they are, and
    ollama's clients send them."""
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_WHOLE
    return int(value) if is_whole else value


async def received(front: Front | Models, request: Request, kind: type[T]) -> T:
    """The body of a request, read off the event loop if it is large. It is read once: whoever asks
    again gets the same.

    Raises:
        RequestError: it does not come, or exceeds a limit; or as `decoded`.
    """
    state, work = request.scope["state"], front.work
    if "body" in state:
        known: T = state["body"]
        return known
    record, parts = state["record"], list[bytes]()
    async for part in request.stream():
        work.keep(record, len(part))
        record.n_body += len(part)
        parts.append(part)
    body = b"".join(parts)
    parts.clear()
    found = await work.for_body(nesting, body)
    work.keep(record, found.n_bytes)
    value: T = await work.for_body(decoded, body, kind)
    state["body"] = value
    return value


class Nesting(NamedTuple):
    """What a text of JSON holds.

    Attributes:
        levels: how deep its objects and lists are nested.
        n_bytes: bytes of memory that its values take, about, on top of the text.
    """

    levels: int
    n_bytes: int


def nesting(body: bytes) -> Nesting:
    """What a text of JSON holds, whether it is valid or not.

    It is read in pieces, so that other threads go on. Each byte is read a fixed number of times:
    escapes are removed first, and then every quotation mark begins or ends a string.

    Raises:
        RequestError: it is nested too deeply, or its values would take much more time and room than
            their text.
    """
    depth = deepest = n_parts = n_items = 0
    n_odd = 0.0
    within = 0  # a string, at the beginning of the piece
    rest = b""
    for start in range(0, len(body), PIECE):
        piece = rest + body[start : start + PIECE]
        rest = piece[-1:] if (len(piece) - len(piece.rstrip(b"\\"))) % 2 else b""
        piece = piece[: len(piece) - len(rest)]
        texts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(texts[within::2])
        n_parts += len(texts) // 2
        within ^= (len(texts) - 1) & 1
        n_items += outside.count(b",")
        n_odd += sum(map(_oddness, _ODD.findall(outside)))
        brackets = outside.translate(None, delete=_OTHERS)
        n_parts += brackets.count(b"{") + brackets.count(b"[")
        depths = list(accumulate(map(_DEEPER.__getitem__, brackets), initial=depth))
        depth, deepest = depths[-1], max(deepest, *depths)
        if deepest > MOST_NESTED:
            raise RequestError(400, f"the body is nested more than {MOST_NESTED} levels deep")
        if n_parts > MOST_PARTS or n_items > MOST_ITEMS:
            raise RequestError(
                400,
                f"the body has more than {MOST_PARTS:,} objects, lists and strings, or "
                f"{MOST_ITEMS:,} commas between others",
            )
        if n_odd > MOST_ODD:
            raise RequestError(
                400,
                f"the body has more than {MOST_ODD:,} numbers with exponents or more than 24 "
                "digits",
            )
    n_bytes = PART_BYTES * n_parts + ITEM_BYTES * n_items + len(body) * (_width(body) - 1)
    return Nesting(deepest, n_bytes)


def _width(body: bytes) -> int:
    """Bytes that a character of a string takes: as many as the widest of the string."""
    if _WIDEST.search(body):
        return 4
    return 1 if body.isascii() and b"\\u" not in body else 2


_WIDEST = re.compile(rb"[\xf0-\xf4]|\\u[dD][89abAB]")


def _oddness(number: bytes) -> float:
    """How many odd numbers a long one counts as, or the beginning of an exponent."""
    return 0.05 if 17 <= len(number) <= 24 and b"e" not in number.lower() else 1 + len(number) / 64


_ODD = re.compile(rb"[0-9.eE+-]{17,}|[0-9.][eE][0-9+-]")
_DEEPER = {**dict.fromkeys(b"{[", 1), **dict.fromkeys(b"}]", -1)}
_OTHERS = bytes(c for c in range(256) if c not in b"{}[]")


# Fields of other servers. A field that promises something about the answer is refused where the
# promise can't be kept. A field that only says how another server should work is ignored, with a
# warning if somebody may miss it. The names are OpenAI's, Anthropic's, ollama's, vLLM's and
# SGLang's. A field that one dialect has is also here, for the dialects without it.
# `docs/server-apis.md` lists them.

_STRUCTURE = (
    "say what the answer is in this API's field: response_format (chat, completions), text.format "
    "(responses), output_config.format (messages) or format (ollama)"
)
_TOOLS = "use tools, tool_choice and messages of the role tool"
_NO_STORE = "this server stores nothing: send the whole conversation"
_MASKS = "use logit_bias, or a grammar"

REFUSED: Mapping[str, str] = {
    "allowed_token_ids": _MASKS,
    "audio": "this model writes text",
    "bad_words": _MASKS,
    "compaction": "send a request for a summary",
    "ebnf": "use guided_grammar, or this API's field for a schema",
    "format": _STRUCTURE,
    "function_call": _TOOLS,
    "functions": _TOOLS,
    "grammar": _STRUCTURE,
    "guided_choice": _STRUCTURE,
    "guided_grammar": _STRUCTURE,
    "guided_json": _STRUCTURE,
    "guided_regex": _STRUCTURE,
    "guided_whitespace_pattern": "leave it out: white space is as json.dumps has it",
    "height": "this model writes text",
    "include_stop_str_in_output": "a stop string is no part of a text",
    "json_schema": _STRUCTURE,
    "logits_processors": "use logit_bias, samplers or a grammar",
    "logprobs": "ask /v1/chat/completions for them",
    "min_new_tokens": "use ignore_eos with max_tokens, or a grammar",
    "min_tokens": "use ignore_eos with max_tokens, or a grammar",
    "moderation": "this server judges no texts",
    "n": "send as many requests: what the prompt takes is computed once",
    "output_config": _STRUCTURE,
    "output_format": _STRUCTURE,
    "prompt_logprobs": "the texts that are generated have logprobs",
    "regex": "use guided_regex, or this API's field for a schema",
    "response_format": _STRUCTURE,
    "steps": "this model writes text",
    "stop": "use this API's field for strings that end a text, as stop_sequences",
    "stop_token_ids": "use stop, with the tokens' texts",
    "store": _NO_STORE,
    "structural_tag": "use tools, or a grammar",
    "structured_outputs": _STRUCTURE,
    "thread": _NO_STORE,
    "top_logprobs": "ask /v1/chat/completions for them",
    "truncate_prompt_tokens": "shorten the prompt: a prompt that does not fit is refused",
    "use_beam_search": "use n, with logprobs, and choose among the texts",
    "web_search_options": "describe a function that searches, and run it",
    "width": "this model writes text",
}
"""Names of fields that promise something about the answer, and what to do instead."""

ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),
    "min_new_tokens": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "top_logprobs": (0,),
}
"""Values that ask for nothing, as null, false and empty values do."""

NOTED: Mapping[str, str] = {
    "container": "tools run where the client runs them",
    "context_management": "a prompt that does not fit is refused, and nothing of it is left out",
    "diagnostics": "usage says how much of the prompt was in the cache",
    "fallbacks": "there is one model here",
    "mcp_servers": "only functions can be called here",
    "verbosity": "it is up to the model how much it says",
}
"""Names of fields without effect, and why; clients get a warning."""

HARMLESS: Mapping[str, str] = {
    "access_programs": "who may use which of OpenAI's models",
    "background_options": "how long a response in the background is kept; background is refused",
    "betas": "which of Anthropic's fields are there",
    "billing_policy": "who pays",
    "cache_control": "what is cached: all is",
    "fallback_credit_token": "who pays",
    "image": "how images are read; they are refused",
    "inference_geo": "where the server stands",
    "keep_alive": "how long the model stays loaded: in ollama's API it counts",
    "max_tool_calls": "calls of tools that run on the server; there are none",
    "metadata": "words about the request; a response has them again",
    "prediction": "a text that an answer may be like, for speed",
    "prompt_cache_key": "what is cached: all is",
    "prompt_cache_options": "what is cached: all is",
    "prompt_cache_retention": "how long it is cached",
    "safety_identifier": "who asks",
    "service_tier": "how fast, and at which price",
    "speed": "how fast, and at which price",
    "user": "who asks",
    "user_profile_id": "who asks",
    "workspace_id": "who asks",
}
"""Names of fields that say nothing about an answer, and what they say."""


@lru_cache(maxsize=64)
def with_others(kind: Any) -> Any:
    """A kind of body, with the fields of other APIs added if it asks for a text."""
    if "stream" not in getattr(kind, "__struct_fields__", ()):  # nor has a list of objects any
        return kind
    names = [name for name in (*REFUSED, *NOTED) if name not in kind.__struct_fields__]
    fields = [(name, Any, None) for name in names]
    return msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True)


def check_others(body: msgspec.Struct, kind: Any) -> None:
    """Refuse the fields of a body that its API does not have, or warn of them.

    Args:
        body: one of `with_others(kind)`.

    Raises:
        RequestError: a field promises what the server can't keep.
    """
    for name in body.__struct_fields__:
        if name in kind.__struct_fields__:
            continue
        value = getattr(body, name)
        if value in (None, False, "", [], {}) or value in ASKS_NOTHING.get(name, ()):
            continue
        if name == "thread":
            raise _no_thread()
        if name in REFUSED:
            raise unsupported(name, REFUSED[name])
        warn(f"{name} has no effect: {NOTED[name]}")


def _no_thread() -> RequestError:
    """A conversation is to be stored; in Anthropic's words, by which its library sends all of it
    again, and the field no more."""
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return RequestError(
        501, "thread is not supported", REFUSED["thread"], extra={"details": details}
    )
