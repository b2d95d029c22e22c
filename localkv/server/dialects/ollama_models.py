"""ollama's `/api/tags`, `/api/show`, `/api/ps` and `/api/version`: the one model that there is."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localkv import __version__
from localkv.loader.model_summary import file_type_name
from localkv.server import limits
from localkv.server.dialects.ollama_request import LATEST, can_think, known_name
from localkv.server.front import Front
from localkv.server.json_answer import json_response
from localkv.server.json_body import received, takes
from localkv.server.prompts import PromptModel

API_VERSION = "0.14.0"
"""The version of ollama whose API this is; clients refuse servers that are too old."""
FOREVER = "9999-12-31T23:59:59Z"
LONGEST_SHOWN = 64
"""Elements of a list in `model_info`; longer ones are null, as ollama has it."""


class ShowRequest(msgspec.Struct, kw_only=True):
    """Which model; `name` is what it was called before."""

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
