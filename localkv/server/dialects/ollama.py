"""ollama's API: `/api/chat` and `/api/generate`, and what there is to know of the models.

Requests are translated into OpenAI's words; answers are lines of JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from localkv import __version__
from localkv.engine.logprobs import TokenLogprob, as_openai
from localkv.engine_process.texts import Ended, Event, Facts, Piece
from localkv.errors import LocalKVError
from localkv.loader.answer_tags import REASONING_TAGS, writes_channels
from localkv.loader.chat_template import ChatTemplate
from localkv.loader.gguf_file import read_metadata
from localkv.loader.metadata import Metadata, file_type_name
from localkv.loader.weights import checked_spec
from localkv.memory.fit import chosen_context
from localkv.server import limits
from localkv.server.answer import AnswerReader, Answers, Delta, Reasoning
from localkv.server.chat_request import ChatBody, begun
from localkv.server.failures import RequestError, unsupported
from localkv.server.front import Front
from localkv.server.json_answer import JsonLists, json_answer, json_response, to_json
from localkv.server.json_body import received, takes
from localkv.server.models import LATEST, Keep, Models, ServedModel
from localkv.server.prompts import PromptModel, infill_prompt, text_prompts
from localkv.server.request_fields import SamplingFields, grammar_of, stop_strings
from localkv.server.request_record import current, warn
from localkv.tool_calls.source import CallArguments, CallBegun, Content

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
    """What both have; `keep_alive` is how long the model stays loaded after the answer."""

    model: limits.Name
    stream: bool | None = None
    format: limits.Word | limits.Object | None = None
    options: Options | None = None
    think: bool | limits.Effort | None = None
    max_tokens: limits.Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: limits.Logprobs | None = None
    keep_alive: limits.KeepAlive | None = None

    @property
    def asks_for(self) -> object:
        """What is to be answered; nothing asks only for the model."""
        raise NotImplementedError

    @property
    def only_unloads(self) -> bool:
        """Whether it asks for nothing but that the model goes."""
        return not self.asks_for and Keep.of(self.keep_alive) == Keep(0.0)


class ChatRequest(Body, kw_only=True):
    """A conversation; an empty one only asks for the model."""

    messages: limits.Messages | None = None
    tools: limits.Tools | None = None

    @property
    def asks_for(self) -> object:
        return self.messages


class GenerateRequest(Body, kw_only=True):
    """A prompt, which the template makes a conversation of unless it is `raw`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: limits.TokenIds | None = None
    images: limits.Refused | None = None

    @property
    def asks_for(self) -> object:
        return self.prompt or self.suffix


def can_think(template: ChatTemplate) -> bool:
    """Whether there is reasoning before answers, or a switch for it."""
    opening = any(tags.open in template.source for tags in REASONING_TAGS)
    return opening or template.think_switch is not None or writes_channels(template.source)


async def check(front: Front, body: Body) -> Options:
    """The options of a request that can be served.

    Raises:
        RequestError: it can't be.
    """
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
        record = current.get()
        self._waited = 0.0 if record is None else record.waited
        self._began = began - self._waited
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
            "load_duration": int(NANO * self._waited),
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
        grammar=await front.in_thread(grammar_of, {"response_format": response_format(body)}),
    )
    texts = await front.begin_all(requests)
    return Answers(texts, [AnswerReader(keeps_reasoning=True)])


async def _answered(
    front: Front, request: Request, body: ChatRequest | GenerateRequest
) -> Response:
    began = time.perf_counter()
    if not body.only_unloads:
        options = await check(front, body)
    if not body.asks_for:
        empty: dict[str, Any] = {"response": ""}
        if isinstance(body, ChatRequest):
            empty = {"message": {"role": "assistant", "content": ""}}
        head = {"model": body.model, "created_at": now()}
        reason = "unload" if body.only_unloads else "load"
        return json_response({**head, **empty, "done": True, "done_reason": reason})
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


async def version(models: Models, request: Request) -> Response:
    """GET /api/version."""
    return json_response({"version": API_VERSION, "localkv": __version__})


async def tags(models: Models, request: Request) -> Response:
    """GET /api/tags: the models there are."""
    listed = await models.work.in_thread(lambda: [_listed(one) for one in models])
    return json_response({"models": listed})


async def running(models: Models, request: Request) -> Response:
    """GET /api/ps: the models that are loaded, and when they will go."""
    loaded = [(one, facts) for one in models if (facts := one.supervisor.facts) is not None]
    listed = await models.work.in_thread(lambda: [_loaded(*one) for one in loaded])
    return json_response({"models": listed})


def _loaded(model: ServedModel, facts: Facts) -> dict[str, Any]:
    """A model that is loaded as an element of a list."""
    n_bytes = facts.engine.weight_bytes + facts.cache_bytes
    return {
        **_listed(model),
        "size": n_bytes,
        "size_vram": 0 if facts.engine.backend == "cpu" else n_bytes,
        "context_length": facts.engine.n_ctx,
        "expires_at": FOREVER if model.expires is None else _date(model.expires),
    }


@takes(ShowRequest)
async def show(models: Models, request: Request) -> Response:
    """POST /api/show: what is known of a model, loaded or not."""
    body = await received(models, request, ShowRequest)
    served = models.named(body.model or body.name)
    front, params = served.front, served.settings.params
    model = await front.model()
    n_ctx = await models.work.in_thread(_context, served, model)
    parameters = {
        "num_ctx": n_ctx,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
    }
    described = {
        "modelfile": f"FROM {served.name}\n",
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters.items()),
        "template": "" if model.template is None else model.template.source,
        "modified_at": _date(front.started),
        "details": _details(served, model.gguf.metadata),
        "model_info": _model_info(model, n_ctx),
        "capabilities": _capabilities(model),
    }
    if served.living is None:
        front.unload()
    return json_response(described)


def _context(served: ServedModel, model: PromptModel) -> int:
    """Tokens of a model's context, or those that it will have once it is loaded."""
    facts, arguments = served.supervisor.known, served.settings.engine.arguments
    if facts is not None:
        return facts.engine.n_ctx
    return chosen_context(arguments.get("n_ctx"), checked_spec(model.gguf))


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


def _model_info(model: PromptModel, n_ctx: int) -> dict[str, Any]:
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
    info[f"{metadata.string('general.architecture', default='')}.context_length"] = n_ctx
    shapes = (tensor.shape for tensor in model.gguf.tensors.values())
    info["general.parameter_count"] = sum(map(math.prod, shapes))
    return info


def _listed(model: ServedModel) -> dict[str, Any]:
    """A model as an element of a list; little is known of one whose file has gone."""
    name = model.name if ":" in model.name else model.name + LATEST
    path = Path(model.settings.engine.model)
    size, modified, details = 0, 0, dict[str, Any]()
    with suppress(LocalKVError, OSError):
        size, modified = path.stat().st_size, path.stat().st_mtime_ns
        details = _details(model, read_metadata(path))
    identity = f"{path.absolute()}\0{size}\0{modified}"
    return {
        "name": name,
        "model": name,
        "modified_at": _date(model.front.started),
        "size": size,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": details,
    }


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _details(model: ServedModel, metadata: Metadata) -> dict[str, Any]:
    facts = model.supervisor.known
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
