"""The server's application: which path leads where, how errors are told, its description, and the
page at `/`, whose files load nothing from anywhere else."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
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
from starlette.responses import Response
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
    lora_adapters,
    metrics,
    props,
    slot_action,
    slots,
    tokenize,
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
from localkv.server.json_answer import error_answer, json_response, to_json
from localkv.server.request_record import CLOSED, WARNING, Recorder

Endpoint = Callable[[Front, Request], Awaitable[Response]]

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


async def page(front: Front, request: Request) -> Response:
    """GET / and GET /page/NAME."""
    name = request.path_params.get("name", "index.html")
    content = _page_files().get(name) if front.settings.has_page else None
    if content is None:
        raise RequestError(404, f"GET {request.url.path}: no such path")
    media_type = MEDIA_TYPES[name.rpartition(".")[2]]
    return Response(content, media_type=media_type, headers=HEADERS)


async def facts(front: Front, request: Request) -> Response:
    """GET /localkv/facts: what a chat shows of the model (`EngineFacts`)."""
    return json_response(front.facts.engine)


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


async def not_supported(front: Front, request: Request) -> Response:
    """Say so."""
    raise unsupported(*MISSING[request.url.path])


async def api_description(front: Front, request: Request) -> Response:
    """GET /openapi.json: all of this, for programs."""
    return Response(_description(front.settings.model_name), media_type="application/json")


@lru_cache(maxsize=1)
def _description(model_name: str) -> bytes:
    return to_json(described(ENDPOINTS, model_name))


ENDPOINTS: list[tuple[str, list[str], Endpoint]] = [
    ("/", GET, page),
    ("/page/{name}", GET, page),
    ("/localkv/cache", GET, cache_meter),
    ("/localkv/facts", GET, facts),
    ("/health", GET, health),
    ("/v1/health", GET, health),
    ("/models", GET, models),
    ("/v1/models", GET, models),
    ("/models/{name:path}", GET, model),
    ("/v1/models/{name:path}", GET, model),
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
    ("/props", GET, props),
    ("/props", POST, change_props),
    ("/slots", GET, slots),
    ("/slots/{id}", POST, slot_action),
    ("/lora-adapters", GET, lora_adapters),
    ("/lora-adapters", POST, change_lora_adapters),
    ("/api/chat", POST, chat),
    ("/api/generate", POST, generate),
    ("/api/tags", GET, tags),
    ("/api/show", POST, show),
    ("/api/ps", GET, running),
    ("/api/version", GET, version),
    ("/v1/embeddings", POST, embeddings),
    ("/embedding", POST, native_embeddings),
    ("/embeddings", POST, native_embeddings),
    ("/api/embed", POST, ollama_embed),
    ("/api/embeddings", POST, ollama_embedding),
    ("/rerank", POST, rerank),
    ("/reranking", POST, rerank),
    ("/v1/rerank", POST, rerank),
    ("/v1/reranking", POST, rerank),
    ("/metrics", GET, metrics),
    *((path, [*GET, *POST, "DELETE"], not_supported) for path in MISSING),
    ("/openapi.json", GET, api_description),
]
"""Path, methods, and who answers."""


def application(front: Front) -> Starlette:
    """The application of a server."""

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
            Route(path, partial(endpoint, front), methods=methods)
            for path, methods, endpoint in ENDPOINTS
        ],
        exception_handlers={
            LocalKVError: refused,
            HTTPException: not_found,
            ClientDisconnect: lost,
            Exception: broken,
        },
        middleware=[
            Middleware(Recorder, front=front),
            *_cors(front),
            Middleware(Guard, front=front),
        ],
        lifespan=lifespan,
    )


def _cors(front: Front) -> list[Middleware]:
    """Tells browsers which pages may read answers, if there are any."""
    allowed = front.settings.cors
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
