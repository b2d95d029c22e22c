"""What ollama's `/api/chat` and `/api/generate` take, in the words of the other dialects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from localkv.loader.answer_tags import REASONING_TAGS, writes_channels
from localkv.loader.chat_template import ChatTemplate
from localkv.server import limits
from localkv.server.chat_request import ChatBody
from localkv.server.failures import RequestError, unsupported
from localkv.server.front import Front
from localkv.server.request_fields import SamplingFields
from localkv.server.request_record import warn

LATEST = ":latest"
"""The tag that ollama adds to names that have none."""


class Options(SamplingFields, kw_only=True):
    """The fields of `options`; those that load a model, as `num_gpu`, are ignored."""

    num_ctx: limits.Int32 | None = None
    num_predict: limits.Tokens | None = None
    stop: limits.StopString | limits.Stops | None = None


class Body(msgspec.Struct, kw_only=True):
    """What both have; `model` is the name of the model that is loaded."""

    model: limits.Name
    stream: bool | None = None
    format: limits.Word | limits.Object | None = None
    options: Options | None = None
    think: bool | limits.Effort | None = None
    max_tokens: limits.Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: limits.Logprobs | None = None


class ChatRequest(Body, kw_only=True):
    """A conversation; an empty one only asks for the model."""

    messages: limits.Messages | None = None
    tools: limits.Tools | None = None


class GenerateRequest(Body, kw_only=True):
    """A prompt, which the template makes a conversation of unless it is `raw`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: limits.TokenIds | None = None
    images: limits.Refused | None = None


def known_name(name: str) -> str:
    """A model's name without ollama's tag."""
    return name.removesuffix(LATEST)


def can_think(template: ChatTemplate) -> bool:
    """Whether there is reasoning before answers, or a switch for it."""
    opening = any(tags.open in template.source for tags in REASONING_TAGS)
    return opening or template.think_switch is not None or writes_channels(template.source)


async def check(front: Front, body: Body) -> Options:
    """The options of a request that can be served.

    Raises:
        RequestError: it can't be.
    """
    front.check_model(known_name(body.model))
    options, n_ctx = body.options or Options(), front.facts.engine.n_ctx
    if options.num_ctx is not None and options.num_ctx > n_ctx:
        warn(
            f"num_ctx is {options.num_ctx}, and the context has {n_ctx} tokens: a prompt that does "
            "not fit is refused"
        )
    template = (await front.model()).template
    if body.think not in (None, False, "none") and (template is None or not can_think(template)):
        raise RequestError(400, f"{body.model!r:.100} does not think before it answers")
    if isinstance(body, GenerateRequest):
        if body.suffix:
            raise unsupported("suffix", "write the model's own tokens for filling in, with raw")
        if body.images:
            raise unsupported("images", "this model reads text")
        if body.template:
            raise unsupported("template", "render the prompt, with raw, or use --chat-template")
        if body.context:
            raise unsupported("context", "use /api/chat: what was said before is in the cache")
    return options


def chat_body(body: ChatRequest | GenerateRequest, options: Options) -> ChatBody:
    """Translate a conversation to OpenAI's chat API.

    Raises:
        RequestError: it has a part that is not supported.
    """
    if isinstance(body, ChatRequest):
        messages = [_message(message) for message in body.messages or ()]
        tools = body.tools
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages, tools = [*system, {"role": "user", "content": body.prompt or ""}], None
    fields = {name: getattr(options, name) for name in SamplingFields.__struct_fields__}
    return ChatBody(
        **fields,
        messages=messages,
        tools=tools,
        max_completion_tokens=options.num_predict,
        max_tokens=body.max_tokens,
        stop=options.stop,
        response_format=response_format(body),
        enable_thinking=body.think not in (False, "none") if body.think is not None else None,
        reasoning_effort=body.think if isinstance(body.think, str) else None,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        continue_final_message=bool(messages) and messages[-1].get("role") == "assistant",
    )


def response_format(body: Body) -> dict[str, Any] | None:
    """OpenAI's field for ollama's `format`.

    Raises:
        RequestError: it is neither "json" nor a schema.
    """
    if body.format in (None, ""):
        return None
    if body.format == "json":
        return {"type": "json_object"}
    if isinstance(body.format, Mapping):
        return {"type": "json_schema", "json_schema": {"schema": body.format}}
    raise RequestError(400, f"format is {body.format!r:.40}", 'use "json" or a JSON schema')


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the names that templates know."""
    if message.get("images"):
        raise unsupported("images", "this model reads text")
    shaped = {name: value for name, value in message.items() if name != "images"}
    if thinking := shaped.pop("thinking", None):
        shaped["reasoning_content"] = thinking
    if name := shaped.pop("tool_name", None):
        shaped["name"] = name
    calls = shaped.get("tool_calls")
    if isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
        shaped["tool_calls"] = [{"type": "function", **call} for call in calls]
    return shaped
