"""ollama's API: `/api/chat` and `/api/generate`, and what there is to know of the one model.

Requests are translated into OpenAI's words; answers are lines of JSON.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from localkv import __version__
from localkv.engine.logprobs import TokenLogprob, as_openai
from localkv.engine_process.texts import Ended, Event, Piece
from localkv.loader.answer_tags import REASONING_TAGS, writes_channels
from localkv.loader.chat_template import ChatTemplate
from localkv.loader.metadata import file_type_name
from localkv.server import limits
from localkv.server.answer import AnswerReader, Answers, Delta, Reasoning
from localkv.server.chat_request import ChatBody, begun
from localkv.server.failures import RequestError, unsupported
from localkv.server.front import Front
from localkv.server.json_answer import JsonLists, json_answer, json_response, to_json
from localkv.server.json_body import received, takes
from localkv.server.prompts import PromptModel, infill_prompt, text_prompts
from localkv.server.request_fields import SamplingFields, grammar_of, stop_strings
from localkv.server.request_record import warn
from localkv.tool_calls.source import CallArguments, CallBegun, Content

LATEST = ":latest"
"""The tag that ollama adds to names that have none."""
NANO = 1_000_000_000
API_VERSION = "0.14.0"
"""The version of ollama whose API this is; clients refuse servers that are too old."""
FOREVER = "9999-12-31T23:59:59Z"
LONGEST_SHOWN = 64
"""Elements of a list in `model_info`; longer ones are null, as ollama has it."""


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


def now() -> str:
    """The time, as Go writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer:
    """One answer.

    Args:
        answers: it comes from here.
        body: the request.
        began: when it came, by `time.perf_counter`.
    """

    def __init__(self, answers: Answers, body: ChatRequest | GenerateRequest, began: float) -> None:
        self.answers, self._body = answers, body
        self._is_chat = isinstance(body, ChatRequest)
        self._began = began
        self._calls = list[tuple[str, list[str]]]()

    async def whole(self) -> dict[str, Any]:
        """The answer, once it is there.

        Raises:
            RequestError: it failed.
        """
        text, thinking = list[str](), list[str]()
        lists, final = JsonLists(), dict[str, Any]()
        async for _, one, deltas in self.answers.news():
            more, thought = self._take(deltas)
            text.append(more)
            thinking.append(thought)
            if isinstance(one, Piece):
                lists.add({"logprobs": as_openai(one.logprobs)["content"]})
            elif isinstance(one, Ended):
                calls, unread = self._called()
                text.append(unread)
                said = self._said("".join(text), "".join(thinking), calls, ())
                final = {**self._head(), **said, **lists.whole(), **self._end(one)}
        return final

    async def lines(self) -> AsyncIterator[bytes]:
        """The answer as it comes."""
        try:
            async for _, one, deltas in self.answers.news():
                for item in self._items(one, deltas):
                    yield to_json({**self._head(), **item}) + b"\n"
        except RequestError as error:
            yield to_json({"error": str(error)}) + b"\n"
        finally:
            self.answers.close()

    def _items(self, one: Event, deltas: list[Delta]) -> list[dict[str, Any]]:
        """What an event adds to the stream."""
        text, thinking = self._take(deltas)
        logprobs = one.logprobs if isinstance(one, Piece) else ()
        calls = list[dict[str, Any]]()
        if isinstance(one, Ended):
            calls, unread = self._called()
            text += unread
        items = list[dict[str, Any]]()
        if text or thinking or calls or logprobs:
            items.append({**self._said(text, thinking, calls, logprobs), "done": False})
        if isinstance(one, Ended):
            items.append({**self._said("", "", [], ()), **self._end(one)})
        return items

    def _take(self, deltas: list[Delta]) -> tuple[str, str]:
        """The text and the reasoning that deltas add; calls are noted."""
        text = thinking = ""
        for delta in deltas:
            if isinstance(delta, Content):
                text += delta.text
            elif isinstance(delta, Reasoning):
                thinking += delta.text
            elif isinstance(delta, CallBegun):
                self._calls.append((delta.name, []))
            else:
                assert isinstance(delta, CallArguments)
                self._calls[delta.index][1].append(delta.text)
        return text, thinking

    def _called(self) -> tuple[list[dict[str, Any]], str]:
        """The calls of tools, and the text of those whose arguments are no object."""
        calls, unread = [], ""
        for name, pieces in self._calls:
            text = "".join(pieces)
            try:
                arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
                calls.append({"function": {"name": name, "arguments": arguments}})
            except msgspec.MsgspecError:
                unread += json.dumps({"name": name, "arguments": text}, ensure_ascii=False)
        return calls, unread

    def _head(self) -> dict[str, Any]:
        return {"model": self._body.model, "created_at": now()}

    def _said(
        self,
        text: str,
        thinking: str,
        calls: list[dict[str, Any]],
        logprobs: tuple[TokenLogprob, ...],
    ) -> dict[str, Any]:
        others: dict[str, Any] = {"thinking": thinking} if thinking else {}
        said: dict[str, Any]
        if self._is_chat:
            if calls:
                others["tool_calls"] = calls
            said = {"message": {"role": "assistant", "content": text, **others}}
        else:
            said = {"response": text, **others}
        if logprobs:
            said["logprobs"] = as_openai(logprobs)["content"]
        return said

    def _end(self, end: Ended) -> dict[str, Any]:
        usage, timings = end.usage, end.timings
        return {
            "done": True,
            "done_reason": "length" if end.finish_reason == "length" else "stop",
            "total_duration": int(NANO * (time.perf_counter() - self._began)),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(NANO * timings.prompt_seconds),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(NANO * timings.decode_seconds),
        }


async def _raw(front: Front, body: GenerateRequest, options: Options) -> Answers:
    """Begin to continue a prompt as it is, or to fill in what is between it and a suffix.

    Raises:
        RequestError: it can't be continued.
    """
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    most, text = front.n_predict(options.num_predict, body.max_tokens), body.prompt or ""
    if body.suffix:
        prompts = [await infill_prompt(front, text, body.suffix, max_tokens=most)]
    else:
        prompts = await text_prompts(front, text)
    requests = await front.submits(
        options,
        prompts,
        1,
        max_tokens=most,
        stop=stop_strings(options.stop),
        logprobs=logprobs,
        grammar=await front.apart(grammar_of, {"response_format": response_format(body)}),
    )
    texts = await front.begin_all(requests)
    return Answers(texts, [AnswerReader(keeps_reasoning=True)])


async def _answered(
    front: Front, request: Request, body: ChatRequest | GenerateRequest
) -> Response:
    began, options = time.perf_counter(), await check(front, body)
    asks = body.messages if isinstance(body, ChatRequest) else body.prompt or body.suffix
    if not asks:
        empty: dict[str, Any] = {"response": ""}
        if isinstance(body, ChatRequest):
            empty = {"message": {"role": "assistant", "content": ""}}
        head = {"model": body.model, "created_at": now()}
        return json_response({**head, **empty, "done": True, "done_reason": "load"})
    if isinstance(body, GenerateRequest) and (
        body.raw or body.suffix or (await front.model()).template is None
    ):
        answers = await _raw(front, body, options)
    else:
        answers = await begun(front, await front.for_body(chat_body, body, options))
    answer = OllamaAnswer(answers, body, began)
    if body.stream is False:
        return await json_answer(request, answer.whole(), answers.texts)
    return StreamingResponse(answer.lines(), media_type="application/x-ndjson")


@takes(ChatRequest)
async def chat(front: Front, request: Request) -> Response:
    """POST /api/chat."""
    return await _answered(front, request, await received(front, request, ChatRequest))


@takes(GenerateRequest)
async def generate(front: Front, request: Request) -> Response:
    """POST /api/generate."""
    return await _answered(front, request, await received(front, request, GenerateRequest))


class ShowRequest(msgspec.Struct, kw_only=True):
    """A model; `name` is what it was called before."""

    model: limits.Name | None = None
    name: limits.Name | None = None


async def version(front: Front, request: Request) -> Response:
    """GET /api/version."""
    return json_response({"version": API_VERSION, "localkv": __version__})


async def tags(front: Front, request: Request) -> Response:
    """GET /api/tags: the models there are."""
    return json_response({"models": [_listed(front, await front.model())]})


async def running(front: Front, request: Request) -> Response:
    """GET /api/ps: the models that are loaded."""
    facts = front.supervisor.facts
    if facts is None:
        return json_response({"models": []})
    listed = _listed(front, await front.model())
    on_gpu = facts.engine.backend != "cpu"
    n_bytes = facts.engine.weight_bytes + facts.cache_bytes
    listed |= {
        "size": n_bytes,
        "size_vram": n_bytes if on_gpu else 0,
        "context_length": facts.engine.n_ctx,
        "expires_at": FOREVER,
    }
    return json_response({"models": [listed]})


@takes(ShowRequest)
async def show(front: Front, request: Request) -> Response:
    """POST /api/show: what is known of the model."""
    body = await received(front, request, ShowRequest)
    front.check_model(known_name(body.model or body.name or ""))
    model, facts = await front.model(), front.facts
    params, template = front.settings.params, model.template
    parameters = {
        "num_ctx": facts.engine.n_ctx,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
    }
    return json_response(
        {
            "modelfile": f"FROM {front.settings.model_name}\n",
            "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters.items()),
            "template": "" if template is None else template.source,
            "modified_at": _modified(front),
            "details": _details(front, model),
            "model_info": _model_info(front, model),
            "capabilities": _capabilities(model),
        }
    )


def _capabilities(model: PromptModel) -> list[str]:
    found = ["completion"]
    template = model.template
    for_tools = template if template is not model.chat_template else model.tool_template
    if for_tools is not None and for_tools.takes_tools:
        found.append("tools")
    if template is not None and can_think(template):
        found.append("thinking")
    if not model.tokenizer.fim.missing:
        found.append("insert")
    return found


def _model_info(front: Front, model: PromptModel) -> dict[str, Any]:
    """The file's metadata. The length of the context is the server's, since clients look for it
    here."""
    metadata = model.gguf.metadata
    info = dict[str, Any]()
    for key in metadata:
        value = metadata[key] if not key.startswith("tokenizer.ggml.") else None
        if isinstance(value, list) and len(value) > LONGEST_SHOWN:
            value = None
        if not key.startswith("tokenizer."):
            info[key] = value
    facts = front.facts
    info[f"{facts.engine.architecture}.context_length"] = facts.engine.n_ctx
    info["general.parameter_count"] = facts.n_params
    return info


def _listed(front: Front, model: PromptModel) -> dict[str, Any]:
    """The model as an element of a list."""
    name = front.settings.model_name
    name = name if ":" in name else name + LATEST
    path = model.gguf.path
    stat = path.stat()
    identity = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}"
    return {
        "name": name,
        "model": name,
        "modified_at": _modified(front),
        "size": model.gguf.file_bytes,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": _details(front, model),
    }


def _modified(front: Front) -> str:
    stamp = datetime.fromtimestamp(front.started, UTC)
    return stamp.isoformat().replace("+00:00", "Z")


def _details(front: Front, model: PromptModel) -> dict[str, Any]:
    metadata, facts = model.gguf.metadata, front.supervisor.facts
    family = metadata.string("general.architecture", default="")
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": "" if facts is None else _counted(facts.n_params),
        "quantization_level": file_type_name(metadata) or "unknown",
    }


def _counted(n: int) -> str:
    """A number of weights: 7.2B, 494.0M."""
    return f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.1f}M"
