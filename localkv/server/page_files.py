"""The page at `/`: files of this package, which load nothing from anywhere else."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from localkv.server.failures import RequestError
from localkv.server.front import Front
from localkv.server.json_answer import json_response

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
        }
    )
