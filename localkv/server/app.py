"""The server's application: which path leads where, how errors are told, its description, and the
page at `/`, whose files load nothing from anywhere else."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cache, lru_cache, partial
from importlib.resources import files
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from localkv import __version__
from localkv.errors import LocalKVError
from localkv.server.access import LOCAL, LOCAL_ORIGIN, Guard
from localkv.server.dialects.anthropic import count_tokens, messages
from localkv.server.dialects.llama_server import (
    apply_template,
    change_lora_adapters,
    change_props,
    chat_tokens,
    completion,
    detokenize,
    infill,
    load_model,
    lora_adapters,
    metrics,
    props,
    slot_action,
    slots,
    tokenize,
    unload_model,
)
from localkv.server.dialects.ollama import chat, generate, running, show, tags, version
from localkv.server.dialects.openai import chat_completions, completions, health, model, models
from localkv.server.dialects.openai_responses import input_tokens, responses
from localkv.server.dialects.vectors import (
    embeddings,
    native_embeddings,
    ollama_embed,
    ollama_embedding,
    rerank,
)
from localkv.server.failures import RequestError, as_request_error, unsupported
from localkv.server.front import Front
from localkv.server.json_answer import (
    EVENT_HEADERS,
    EVENTS,
    error_answer,
    error_piece,
    event,
    gone,
    json_response,
    to_json,
)
from localkv.server.json_body import received
from localkv.server.models import Keep, Models, ServedModel
from localkv.server.request_record import CLOSED, WARNING, Recorder

Endpoint = Callable[[Front, Request], Awaitable[Response]]
"""It answers for one model."""
ServerEndpoint = Callable[[Models, Request], Awaitable[Response]]
"""It answers for the server."""

POST, GET = ["POST"], ["GET"]

MEDIA_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@cache
def _page_files() -> dict[str, bytes]:
    """The content of each file by its name."""
    folder = files("localkv.server") / "page"
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}


async def page(models: Models, request: Request) -> Response:
    """GET / and GET /page/NAME."""
    name = request.path_params.get("name", "index.html")
    content = _page_files().get(name) if models.settings.has_page else None
    if content is None:
        raise RequestError(404, f"GET {request.url.path}: no such path")
    media_type = MEDIA_TYPES[name.rpartition(".")[2]]
    return Response(content, media_type=media_type, headers=HEADERS)


async def facts(front: Front, request: Request) -> Response:
    """GET /localkv/facts: what a chat shows of the model (`EngineFacts`)."""
    return json_response(front.known_facts.engine)


async def cache_meter(front: Front, request: Request) -> Response:
    """GET /localkv/cache: what is in the cache of all requests together."""
    facts, status = front.facts, front.supervisor.client.status
    return json_response(
        {
            "tokens": facts.cache_tokens,
            "bytes": facts.cache_bytes,
            "type_k": facts.engine.type_k,
            "type_v": facts.engine.type_v,
            "pages": {
                "all": facts.n_pages,
                "running": status.pages_running,
                "shared": status.pages_shared,
                "kept": status.pages_kept,
                "lost": status.pages_lost,
                "free": facts.n_pages
                - (status.pages_running + status.pages_kept + status.pages_lost),
            },
            "prompt_tokens": {"evaluated": status.n_prompt, "reused": status.n_reused},
            "requests": {"running": status.running, "waiting": status.waiting},
            "disk": status.disk,
        }
    )


_MODEL_WRITES = "this server's models write text"

MISSING = {
    "/v1/images/generations": ("making images", _MODEL_WRITES),
    "/v1/images/edits": ("making images", _MODEL_WRITES),
    "/v1/audio/transcriptions": ("audio", _MODEL_WRITES),
    "/audio/transcriptions": ("audio", _MODEL_WRITES),
    "/v1/audio/translations": ("audio", _MODEL_WRITES),
    "/v1/audio/speech": ("audio", _MODEL_WRITES),
    "/v1/moderations": ("moderation", _MODEL_WRITES),
    "/api/pull": ("fetching models", "start the server with -hf"),
    "/api/push": ("publishing models", "upload the file"),
    "/api/create": ("making models", "start the server with another -m"),
    "/api/copy": ("naming models", "start the server with -a"),
    "/api/delete": ("deleting models", "delete the file"),
}
"""Paths of other servers that this one does not have: what is missing, and a hint."""


async def not_supported(models: Models, request: Request) -> Response:
    """Say so."""
    raise unsupported(*MISSING[request.url.path])


async def api_description(models: Models, request: Request) -> Response:
    """GET /openapi.json: all of this, for programs."""
    return Response(_description(models.first.name), media_type="application/json")


@lru_cache(maxsize=1)
def _description(model_name: str) -> bytes:
    return to_json(described(ENDPOINTS, model_name))


FOR_THE_SERVER: list[tuple[str, list[str], ServerEndpoint]] = [
    ("/", GET, page),
    ("/page/{name}", GET, page),
    ("/health", GET, health),
    ("/v1/health", GET, health),
    ("/models", GET, models),
    ("/v1/models", GET, models),
    ("/models/load", POST, load_model),
    ("/models/unload", POST, unload_model),
    ("/models/{name:path}", GET, model),
    ("/v1/models/{name:path}", GET, model),
    ("/props", GET, props),
    ("/props", POST, change_props),
    ("/api/tags", GET, tags),
    ("/api/show", POST, show),
    ("/api/ps", GET, running),
    ("/api/version", GET, version),
    ("/metrics", GET, metrics),
    *((path, [*GET, *POST, "DELETE"], not_supported) for path in MISSING),
    ("/openapi.json", GET, api_description),
]
"""Path, methods, and who answers for the server."""

FOR_A_MODEL: list[tuple[str, list[str], Endpoint]] = [
    ("/localkv/cache", GET, cache_meter),
    ("/localkv/facts", GET, facts),
    ("/chat/completions", POST, chat_completions),
    ("/v1/chat/completions", POST, chat_completions),
    ("/v1/responses", POST, responses),
    ("/v1/responses/input_tokens", POST, input_tokens),
    ("/responses", POST, responses),
    ("/responses/input_tokens", POST, input_tokens),
    ("/v1/messages", POST, messages),
    ("/v1/messages/count_tokens", POST, count_tokens),
    ("/v1/completions", POST, completions),
    ("/completion", POST, completion),
    ("/completions", POST, completion),
    ("/infill", POST, infill),
    ("/tokenize", POST, tokenize),
    ("/detokenize", POST, detokenize),
    ("/apply-template", POST, apply_template),
    ("/chat/completions/input_tokens", POST, chat_tokens),
    ("/v1/chat/completions/input_tokens", POST, chat_tokens),
    ("/slots", GET, slots),
    ("/slots/{id}", POST, slot_action),
    ("/lora-adapters", GET, lora_adapters),
    ("/lora-adapters", POST, change_lora_adapters),
    ("/api/chat", POST, chat),
    ("/api/generate", POST, generate),
    ("/v1/embeddings", POST, embeddings),
    ("/embedding", POST, native_embeddings),
    ("/embeddings", POST, native_embeddings),
    ("/api/embed", POST, ollama_embed),
    ("/api/embeddings", POST, ollama_embedding),
    ("/rerank", POST, rerank),
    ("/reranking", POST, rerank),
    ("/v1/rerank", POST, rerank),
    ("/v1/reranking", POST, rerank),
]
"""Path, methods, and who answers for the model that a request names, in its body or as `?model=`.
POST loads the model if it has to."""

ENDPOINTS: list[tuple[str, list[str], Callable[..., Any]]] = [*FOR_THE_SERVER, *FOR_A_MODEL]

PATIENCE = 1.0
"""Seconds after which a stream begins to tell how far loading is, and between two such lines."""


async def answered(endpoint: Endpoint, models: Models, request: Request) -> Response:
    """The answer of the model that a request names, once it is loaded.

    Raises:
        RequestError: there is no such model, or it can't be loaded.
    """
    kind, state = _body_type(endpoint), request.scope["state"]
    body: Any = None if kind is None else await received(models, request, kind)
    named = getattr(body, "model", None) or request.query_params.get("model")
    model, record = models.named(named), state["record"]
    record.model = model.name if models.are_several else ""
    if request.method == "GET":
        return await endpoint(model.front, request)
    if getattr(body, "only_unloads", False):
        models.begin_letting_go(model)
        return await endpoint(model.front, request)
    loads = models.settings.autoloads
    if (asked := request.query_params.get("autoload")) is not None:
        loads = asked in ("true", "1")
    keep = Keep.of(getattr(body, "keep_alive", None))
    using = models.use(model, record, keep, loads=loads)
    if models.is_ready(model) or kind is None:
        await using
        return await endpoint(model.front, request)
    waiting = asyncio.ensure_future(using)
    going = asyncio.ensure_future(gone(request))
    tells = bool(getattr(body, "stream", False)) and not request.url.path.startswith("/api/")
    try:
        await asyncio.wait(
            {waiting, going},
            timeout=PATIENCE if tells else None,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if going.done() and not waiting.done():
            waiting.cancel()
            raise ClientDisconnect
        if not waiting.done():
            return StreamingResponse(
                _once_loaded(endpoint, model, request, body, waiting),
                media_type=EVENTS,
                headers=EVENT_HEADERS,
            )
        waiting.result()
    finally:
        going.cancel()
    return await endpoint(model.front, request)


async def _once_loaded(
    endpoint: Endpoint,
    model: ServedModel,
    request: Request,
    body: Any,
    waiting: asyncio.Future[None],
) -> AsyncIterator[bytes]:
    """A stream that begins before its model is loaded: how far that is, then the answer.

    Lines about it are comments, which clients skip; one that asks for progress gets it as chunks.
    """
    tells_all = bool(getattr(body, "return_progress", False))
    try:
        while not waiting.done():
            progress = model.supervisor.progress
            if tells_all:
                yield event({"model": model.name, "choices": [], "load_progress": progress})
            yield b": loading, %(stage)s %(done)d of %(total)d\n\n" % {
                name.encode(): value.encode() if isinstance(value, str) else value
                for name, value in progress.items()
            }
            await asyncio.wait({waiting}, timeout=PATIENCE)
        waiting.result()
        response = await endpoint(model.front, request)
        assert isinstance(response, StreamingResponse)
        async for piece in response.body_iterator:
            assert isinstance(piece, bytes)
            yield piece
    except LocalKVError as error:
        yield error_piece(request.url.path, EVENTS, as_request_error(error)) or b""
    finally:
        waiting.cancel()


def application(models: Models) -> Starlette:
    """The application of a server that has these models."""

    @asynccontextmanager
    async def lifespan(app: Starlette):  # type: ignore[no-untyped-def]
        yield

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, LocalKVError)
        return error_answer(request.url.path, as_request_error(error))

    async def not_found(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        allowed = (error.headers or {}).get("Allow", "")
        failure = RequestError(
            error.status_code,
            f"{request.method} {request.url.path}: "
            + (f"this path takes {allowed}" if allowed else "no such path"),
            headers=error.headers,
        )
        return error_answer(request.url.path, failure)

    async def lost(request: Request, error: Exception) -> Response:
        return Response(
            status_code=CLOSED
        )  # for the log; a client that left within a body reads nothing

    async def broken(request: Request, error: Exception) -> Response:
        # its text may be a part of somebody's prompt
        where = "".join(traceback.format_tb(error.__traceback__))
        print(f"error: {type(error).__name__}\n{where}", end="", file=sys.stderr)
        failure = RequestError(500, "the server has a bug; its log says more")
        return error_answer(request.url.path, failure)

    return Starlette(
        routes=[
            *(
                Route(path, partial(one, models), methods=ways)
                for path, ways, one in FOR_THE_SERVER
            ),
            *(
                Route(path, partial(answered, one, models), methods=ways)
                for path, ways, one in FOR_A_MODEL
            ),
        ],
        exception_handlers={
            LocalKVError: refused,
            HTTPException: not_found,
            ClientDisconnect: lost,
            Exception: broken,
        },
        middleware=[
            Middleware(Recorder, models=models),
            *_cors(models),
            Middleware(Guard, models=models),
        ],
        lifespan=lifespan,
    )


def _cors(models: Models) -> list[Middleware]:
    """Tells browsers which pages may read answers, if there are any."""
    allowed = models.settings.cors
    if not allowed:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=allowed,
            allow_origin_regex=LOCAL_ORIGIN if LOCAL in allowed else None,
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["x-request-id", WARNING],
        )
    ]


ANSWERS = {
    "2XX": "the answer",
    "400": "the request is malformed, or can't be answered",
    "401": "the key is missing, or wrong",
    "403": "the server does not answer to this host or origin",
    "404": "there is no such path or model",
    "405": "the path has other methods",
    "413": "the body is too large",
    "429": "too many requests wait",
    "501": "this part of the API is not supported",
    "503": "the model is being loaded, or the server ends",
}


def described(
    endpoints: Iterable[tuple[str, Sequence[str], Callable[..., Any]]], model_name: str
) -> dict[str, Any]:
    """The description of all endpoints.

    Args:
        endpoints: path, methods, and who answers; its `body_type` is the type of the body, and its
            docstring is the summary.
        model_name: of the model that is served.
    """
    endpoints = list(endpoints)
    kinds = {kind for *_, endpoint in endpoints if (kind := _body_type(endpoint)) is not None}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(
        ordered, ref_template="#/components/schemas/{name}"
    )
    by_kind = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for path, methods, endpoint in endpoints:
        path = path.replace(":path", "")
        for method in methods:
            paths.setdefault(path, {})[method.lower()] = _operation(path, endpoint, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": f"localkv: {model_name}", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _body_type(endpoint: Callable[..., Any]) -> type | None:
    return getattr(endpoint, "body_type", None)


def _operation(path: str, endpoint: Callable[..., Any], by_kind: dict[type, Any]) -> dict[str, Any]:
    """What one method of a path does."""
    summary = (endpoint.__doc__ or "").split("\n")[0]
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {status: {"description": text} for status, text in ANSWERS.items()},
    }
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if (kind := _body_type(endpoint)) is not None:
        content = {"application/json": {"schema": by_kind[kind]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
