"""`ServerEngine`: a `ChatEngine` that is a server elsewhere, which speaks OpenAI's chat API."""

from __future__ import annotations

import http.client
import json
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit, urlunsplit

import msgspec

from localkv.chat.engine import (
    AnswerNews,
    Audited,
    ChatRequest,
    EngineFacts,
    EngineStoppedError,
    Finished,
    LoadProgress,
    PromptProgress,
    TextDelta,
)
from localkv.errors import ContextOverflowError, LocalKVError, UsageError, printable
from localkv.loader.answer_tags import THINK_TAGS
from localkv.sampling.params import SamplingParams

CHARACTERS_PER_TOKEN = 4
"""An estimate for servers that can't count tokens."""
SECONDS = 600.0
"""How long a server may say nothing."""
_DEFAULTS = asdict(SamplingParams())
_FINISH_REASONS = {"length": "length", "stop": "stop", "tool_calls": "stop"}


def is_url(model: str) -> bool:
    """Whether a model's name is a server's address."""
    return model.startswith(("http://", "https://"))


@dataclass
class _Written:
    """What came of an answer."""

    text: str = ""
    n_tokens: int = 0
    is_reasoning: bool = False
    finish_reason: str = "cancelled"
    usage: Mapping[str, Any] | None = None
    timings: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ServerModel:
    """One of a server's models.

    Attributes:
        name: what requests call it.
        aliases: other names of it.
        state: whether it is loaded, in the server's word; empty if the server does not say.
        listed: all that the server says of it.
    """

    name: str
    aliases: tuple[str, ...]
    state: str
    listed: Mapping[str, Any]


class ServerEngine:
    """Answers with what a server writes.

    Args:
        url: of the server, with or without /v1 at its end. A fragment names the model, as in
            "http://localhost:8080#gemma"; without one it is the first that the server lists.
        api_key: if it wants one.

    Raises:
        UsageError: the address is none.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if not is_url(url) or not parts.hostname:
            raise UsageError(f"{url!r} is no server's address", hint="as in http://localhost:8080")
        self.url = url
        self._place = parts
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._model = ""
        self._n_prompt = 0
        self._counts = True
        self._tells_progress = False
        self._is_cancelled = self._is_closed = False
        self._answering: http.client.HTTPConnection | None = None

    def load(self, on_progress: Callable[[LoadProgress], None]) -> EngineFacts:
        started = time.perf_counter()
        on_progress(LoadProgress("header"))
        models, asked = self.models(), unquote(self._place.fragment)
        if not models:
            raise LocalKVError(f"{self.url} lists no model")
        model = models[0]
        if asked:
            named = (one for one in models if asked in (one.name, *one.aliases))
            found = next(named, None)
            if found is None:
                names = ", ".join(printable(one.name) for one in models[:8])
                raise LocalKVError(
                    f"{self.url}: the server has no such model", hint=f"one of {names}"
                )
            model = found
        self._model = model.name
        if model.state not in ("", "loaded"):  # a request for it waits until it is
            self._json("POST", "/tokenize", {"model": model.name, "content": ""})
        facts = self._own_facts() or self._known_facts(model.listed)
        seconds = time.perf_counter() - started
        return replace(facts, server=self.url, load_seconds=seconds)

    def models(self) -> list[ServerModel]:
        """The server's models, in its order. Raises LocalKVError."""
        listed = self._json("GET", "/v1/models")
        data = listed.get("data") if isinstance(listed, Mapping) else None
        models = [one for one in data or () if isinstance(one, Mapping)]
        return [_server_model(one) for one in models]

    def address_of(self, model: ServerModel) -> str:
        """The server's address with a model's name, as this class takes it."""
        return urlunsplit(self._place._replace(fragment=quote(model.name, safe="")))

    def _own_facts(self) -> EngineFacts | None:
        """What a server of this program says of its engine; None of another one."""
        try:
            path = f"/localkv/facts?{urlencode({'model': self._model})}"
            facts = msgspec.convert(self._json("GET", path), EngineFacts)
        except (LocalKVError, msgspec.ValidationError):
            return None
        self._tells_progress = True
        return facts

    def _known_facts(self, model: Mapping[str, Any]) -> EngineFacts:
        """What can be known of any server's model; 0 for a context that it does not tell."""
        meta = model.get("meta") or {}
        n_ctx = meta.get("n_ctx") or model.get("max_model_len") or 0
        with suppress(LocalKVError, AttributeError, TypeError):
            props = self._json("GET", f"/props?{urlencode({'model': self._model})}")
            n_ctx = n_ctx or props["default_generation_settings"]["n_ctx"]
            self._tells_progress = True  # others may refuse a field that they don't know
        return EngineFacts(
            name=self._model,
            architecture=str(model.get("owned_by", "")),
            layers=(),
            kv_heads=(),
            key_dims=(),
            value_dims=(),
            n_ctx_train=int(meta.get("n_ctx_train") or n_ctx),
            n_ctx=int(n_ctx),
            type_k="f16",
            type_v="f16",
            kv_rotation="auto",
            weight_bytes=int(meta.get("size") or 0),
            backend="server",
            n_threads=0,
            load_seconds=0.0,
            has_think_switch=True,
            takes_tools=True,
        )

    def count_tokens(self, request: ChatRequest) -> int:
        """Tokens that a request takes as a prompt; about, where the server can't count them."""
        body = self._body(request)
        if self._counts:
            try:
                messages = {"messages": body["messages"], "max_tokens": 1, "model": self._model}
                counted = self._json("POST", "/v1/messages/count_tokens", messages)
                return int(counted["input_tokens"])
            except EngineStoppedError:
                raise
            except (LocalKVError, KeyError, TypeError):
                self._counts = False
        return len(json.dumps(body["messages"])) // CHARACTERS_PER_TOKEN

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        """A request in OpenAI's words, and llama-server's; what is as usual is left out."""
        messages: list[dict[str, Any]] = [dict(message) for message in request.messages]
        begun = request.continued or request.prefill
        if begun:
            messages.append({"role": "assistant", "content": begun})
        params = asdict(request.params)
        changed = {name: value for name, value in params.items() if value != _DEFAULTS[name]}
        variables = dict(request.template_kwargs)
        if request.think is not None:
            variables["enable_thinking"] = request.think
        given = {
            "model": self._model,
            "messages": messages,
            "max_tokens": request.max_tokens,
            "stop": list(request.stop),
            "ignore_eos": request.ignore_eos,
            "tools": list(request.tools),
            "chat_template_kwargs": variables,
            "thinking_budget_tokens": request.reasoning_budget,
            "continue_final_message": bool(begun),
        }
        body = {name: value for name, value in given.items() if value not in (None, [], {}, False)}
        if begun:
            body["add_generation_prompt"] = False
        return {**body, "temperature": params["temperature"], **changed}

    def answer(self, request: ChatRequest) -> Iterator[AnswerNews]:
        self._is_cancelled = False
        return self._answer(request)

    def _answer(self, request: ChatRequest) -> Iterator[AnswerNews]:
        body = self._body(request)
        seed = request.params.seed
        if seed is None or seed < 0:
            seed = random.getrandbits(31)
        body |= {"seed": seed, "stream": True, "stream_options": {"include_usage": True}}
        if self._tells_progress:
            body["return_progress"] = True
        started, written = time.perf_counter(), _Written()
        if request.prefill:
            yield TextDelta(request.prefill)
        first = last = 0.0
        for chunk in self._chunks(body):
            if progress := _progress_of(chunk):
                yield progress
            now = time.perf_counter()
            text = _text_of(chunk, written)
            if not text:
                continue
            seconds = (now - last,) if last else ()
            first, last = first or now, now
            written.n_tokens += 1
            written.text += text
            yield TextDelta(text, seconds, self._n_prompt + written.n_tokens)
        yield self._finished(written, seed, (first or time.perf_counter()) - started, last - first)

    def _finished(self, written: _Written, seed: int, reading: float, writing: float) -> Finished:
        usage, timings = written.usage or {}, written.timings or {}
        n_prompt = int(usage.get("prompt_tokens") or self._n_prompt)
        n_drawn = int(usage.get("completion_tokens") or written.n_tokens)
        self._n_prompt = n_prompt
        details = usage.get("prompt_tokens_details") or {}
        rate = timings.get("predicted_per_second") or (n_drawn - 1) / writing if writing else 0.0
        return Finished(
            finish_reason="cancelled" if self._is_cancelled else written.finish_reason,
            prompt_tokens=n_prompt,
            completion_tokens=n_drawn,
            cached_tokens=int(details.get("cached_tokens") or 0),
            prompt_seconds=reading,
            decode_seconds=writing,
            decode_per_second=float(rate),
            seed=seed,
        )

    def save_state(self, path: str) -> int:
        raise UsageError(f"{self.url} keeps what it has evaluated itself")

    def load_state(self, path: str) -> int:
        raise UsageError(f"{self.url} keeps what it has evaluated itself")

    def audit(self) -> Iterator[Audited]:
        raise UsageError(
            f"{self.url} keeps the cache, and only the one that has it can audit an answer",
            hint="load the model here: localkv chat -m FILE",
        )

    def cancel(self) -> None:
        self._is_cancelled = True
        connection = self._answering
        if connection is not None and connection.sock is not None:
            with suppress(OSError):  # wakes the thread that reads
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._is_closed = True
        self.cancel()

    def _connection(self) -> http.client.HTTPConnection:
        kind = (
            http.client.HTTPSConnection
            if self._place.scheme == "https"
            else http.client.HTTPConnection
        )
        assert self._place.hostname is not None
        return kind(self._place.hostname, self._place.port, timeout=SECONDS)

    def _asked(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: object = None
    ) -> http.client.HTTPResponse:
        """The answer's head.

        Raises:
            LocalKVError: the server refuses, or is not there.
        """
        if self._is_closed:
            raise EngineStoppedError("the connection was closed")
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._root + path, data, self._headers)
            answer = connection.getresponse()
            if answer.status >= 400:
                raise _refusal(answer.status, answer.read())
            return answer
        except (OSError, http.client.HTTPException) as error:
            raise EngineStoppedError(
                f"{self.url} does not answer: {error}", "start it, and choose the model again"
            ) from None

    def _json(self, method: str, path: str, body: object = None) -> Any:
        connection = self._connection()
        try:
            return json.loads(self._asked(connection, method, path, body).read())
        except (ValueError, OSError) as error:
            raise LocalKVError(f"{self.url}{path} is no JSON: {error}") from None
        finally:
            connection.close()

    def _chunks(self, body: object) -> Iterator[Mapping[str, Any]]:
        """The chunks of an answer; they end early if it is cancelled."""
        self._answering = connection = self._connection()
        try:
            answer = self._asked(connection, "POST", "/v1/chat/completions", body)
            while line := answer.readline():
                if self._is_cancelled or line.strip() == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
            if not self._is_cancelled:
                raise EngineStoppedError(f"{self.url} broke the answer off")
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not self._is_cancelled:
                raise EngineStoppedError(f"{self.url} broke the answer off: {error}") from None
        finally:
            self._answering = None
            connection.close()


def _server_model(listed: Mapping[str, Any]) -> ServerModel:
    """A model as servers of this program, of llama.cpp and others list it."""
    status, aliases = listed.get("status"), listed.get("aliases")
    state = status.get("value") if isinstance(status, Mapping) else None
    names = tuple(map(str, aliases)) if isinstance(aliases, list) else ()
    return ServerModel(str(listed.get("id", "")), names, str(state or ""), listed)


def _progress_of(chunk: Mapping[str, Any]) -> PromptProgress | None:
    """How much of the prompt is read, if a chunk says so."""
    told = chunk.get("prompt_progress")
    if not isinstance(told, Mapping):
        return None
    numbers = [told.get(name) for name in ("processed", "total", "cache")]
    known = [number for number in numbers if isinstance(number, int)]
    return PromptProgress(*known) if len(known) == len(numbers) else None


def _text_of(chunk: Mapping[str, Any], written: _Written) -> str:
    """The text that a chunk adds, with tags around reasoning.

    Raises:
        LocalKVError: it says that something went wrong.
    """
    if error := chunk.get("error"):
        raise LocalKVError(str(error.get("message", error)))
    written.usage = chunk.get("usage") or written.usage
    written.timings = chunk.get("timings") or written.timings
    choices = chunk.get("choices") or ()
    if not choices:
        return ""
    if reason := choices[0].get("finish_reason"):
        written.finish_reason = _FINISH_REASONS.get(reason, "stop")
    delta = choices[0].get("delta") or {}
    text = ""
    if reasoning := delta.get("reasoning_content"):
        text = reasoning if written.is_reasoning else f"{THINK_TAGS.open}\n{reasoning}"
        written.is_reasoning = True
    answer = (delta.get("content") or "") + "".join(map(_shown, delta.get("tool_calls") or ()))
    if answer and written.is_reasoning:
        text += f"\n{THINK_TAGS.close}\n\n"
        written.is_reasoning = False
    return text + answer


def _shown(call: Mapping[str, Any]) -> str:
    """A piece of a call of a tool, as text."""
    function = call.get("function") or {}
    name = f"\n{function['name']} " if function.get("name") else ""
    return name + (function.get("arguments") or "")


def _refusal(status: int, body: bytes) -> LocalKVError:
    """The error that a server answers with."""
    try:
        error = json.loads(body)["error"]
        message = str(error["message"] if isinstance(error, Mapping) else error)
    except (ValueError, KeyError, TypeError):
        message, error = body[:200].decode(errors="replace") or f"status {status}", {}
    if isinstance(error, Mapping) and error.get("type") == "exceed_context_size_error":
        return ContextOverflowError(message)
    return LocalKVError(message)
