"""Paths of other servers that this one does not have, and what to use instead."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from localkv.server.failures import unsupported
from localkv.server.front import Front

_MODEL_WRITES = "this server's models write text"
_LORA = "merge the adapter into the model's file"

MISSING = {
    "/embedding": ("making embeddings", _MODEL_WRITES),
    "/embeddings": ("making embeddings", _MODEL_WRITES),
    "/v1/embeddings": ("making embeddings", _MODEL_WRITES),
    "/api/embed": ("making embeddings", _MODEL_WRITES),
    "/api/embeddings": ("making embeddings", _MODEL_WRITES),
    "/rerank": ("reranking", _MODEL_WRITES),
    "/reranking": ("reranking", _MODEL_WRITES),
    "/v1/rerank": ("reranking", _MODEL_WRITES),
    "/v1/reranking": ("reranking", _MODEL_WRITES),
    "/infill": ("/infill", "write the model's own tokens for filling in into a prompt"),
    "/v1/images/generations": ("making images", _MODEL_WRITES),
    "/v1/images/edits": ("making images", _MODEL_WRITES),
    "/v1/audio/transcriptions": ("audio", _MODEL_WRITES),
    "/audio/transcriptions": ("audio", _MODEL_WRITES),
    "/v1/audio/translations": ("audio", _MODEL_WRITES),
    "/v1/audio/speech": ("audio", _MODEL_WRITES),
    "/v1/moderations": ("moderation", _MODEL_WRITES),
    "/lora-adapters": ("changing LoRA adapters", _LORA),
    "/api/pull": ("fetching models", "start the server with -hf"),
    "/api/push": ("publishing models", "upload the file"),
    "/api/create": ("making models", "start the server with another -m"),
    "/api/copy": ("naming models", "start the server with -a"),
    "/api/delete": ("deleting models", "delete the file"),
}
"""Path: what is missing, and a hint."""


async def not_supported(front: Front, request: Request) -> Response:
    """Say so."""
    raise unsupported(*MISSING[request.url.path])
