"""Fields of other servers: what each would promise, and what becomes of it.

A field that promises something about the answer is refused where the promise can't be kept. A field
that only says how another server should work is ignored, with a warning if somebody may miss it.
The names are OpenAI's, Anthropic's, ollama's, vLLM's and SGLang's. A field that one dialect has is
also here, for the dialects without it. `docs/server-apis.md` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from localkv.server.failures import RequestError, unsupported
from localkv.server.request_record import warn

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
    "keep_alive": "how long the model stays loaded: always",
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
def with_others(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A kind of body, with the fields of other APIs added if it asks for a text."""
    if "stream" not in kind.__struct_fields__:
        return kind
    names = [name for name in (*REFUSED, *NOTED) if name not in kind.__struct_fields__]
    fields = [(name, Any, None) for name in names]
    return msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True)


def check_others(body: msgspec.Struct, kind: type[msgspec.Struct]) -> None:
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
