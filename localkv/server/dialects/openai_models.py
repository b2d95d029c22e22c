"""`/v1/models` and `/health`: what there is, and whether it is ready."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localkv.server.front import Front
from localkv.server.json_answer import json_response


async def health(front: Front, request: Request) -> Response:
    """GET /health: 200 once the model is loaded; 503 before, and while the engine stands still."""
    front.check_progress()
    return json_response({"status": "ok"})


async def models(front: Front, request: Request) -> Response:
    """GET /v1/models: the model that is loaded, or is being loaded."""
    return json_response({"object": "list", "data": [described(front)]})


async def model(front: Front, request: Request) -> Response:
    """GET /v1/models/NAME: the model, by one of its names.

    Raises:
        RequestError: 404, it has no such name.
    """
    front.check_listed(request.path_params["name"])
    return json_response(described(front))


def described(front: Front) -> dict[str, Any]:
    """The model as an element of the list."""
    facts = front.supervisor.facts
    described: dict[str, Any] = {
        "id": front.settings.model_name,
        "aliases": [front.settings.model_name, *front.settings.aliases],
        "tags": list(front.settings.tags),
        "object": "model",
        "created": front.started,
        "owned_by": "localkv",
        "status": {"value": "loading" if facts is None else "loaded"},
    }
    if facts is not None:
        engine = facts.engine
        described["meta"] = {
            "n_vocab": facts.n_vocab,
            "n_ctx": engine.n_ctx,
            "n_ctx_train": engine.n_ctx_train,
            "n_embd": facts.n_embd,
            "n_params": facts.n_params,
            "size": engine.weight_bytes,
            "cache_type_k": engine.type_k,
            "cache_type_v": engine.type_v,
            "cache_tokens": facts.cache_tokens,
            "cache_bytes": facts.cache_bytes,
        }
    return described
