"""llama-server's `/props` and `/slots`: what the server is, and what it does."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localkv import __version__
from localkv.server.engine_client import OpenText
from localkv.server.failures import RequestError, unsupported
from localkv.server.front import Front
from localkv.server.generation_settings import generation_settings
from localkv.server.json_answer import json_response

HIDDEN_IN_SLOTS = ("stop", "logit_bias", "dry_sequence_breakers")
"""Settings that may tell what a request is about, which `/slots` leaves out."""


async def props(front: Front, request: Request) -> Response:
    """GET /props: the model, its template, and how tokens are drawn where requests say nothing."""
    facts, settings = front.facts, front.settings
    model = await front.model()
    template = model.template
    tokenizer = model.tokenizer

    def text_of(token: int | None) -> str:
        return "" if token is None else tokenizer.id_to_token(token)

    params = generation_settings(settings.params, max_tokens=settings.max_tokens)
    described: dict[str, Any] = {
        "default_generation_settings": {"params": params, "n_ctx": facts.engine.n_ctx},
        "total_slots": facts.n_parallel,
        "model_alias": settings.model_name,
        "model_path": str(settings.engine.model),
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": settings.has_slots,
        "endpoint_props": False,
        "ui": settings.has_page,
        "chat_template": "" if template is None else template.source,
        "chat_template_caps": {
            "supports_tools": template is not None and template.takes_tools,
            "supports_tool_calls": template is not None and template.reads("tool_calls"),
        },
        "bos_token": text_of(tokenizer.bos_id),
        "eos_token": text_of(tokenizer.eos_id),
        "build_info": f"localkv {__version__}",
        "is_sleeping": False,
        "cache_tokens": facts.cache_tokens,
        "cache_type_k": facts.engine.type_k,
        "cache_type_v": facts.engine.type_v,
    }
    if model.tool_template is not model.chat_template and model.tool_template is not None:
        described["chat_template_tool_use"] = model.tool_template.source
    return json_response(described)


async def change_props(front: Front, request: Request) -> Response:
    """POST /props: nothing can be changed."""
    raise unsupported("changing /props", "start the server with other options")


async def slots(front: Front, request: Request) -> Response:
    """GET /slots: the places for requests that run at the same time, and what each has.

    Requests that wait have none, and a place keeps nothing of those that have ended.
    """
    if not front.settings.has_slots:
        raise unsupported("/slots", "start the server without --no-slots")
    facts, client = front.facts, front.supervisor.client
    places = client.status.places or (0,) * facts.n_parallel
    if request.query_params.get("fail_on_no_slot") and all(places):
        raise RequestError(503, "no slot is free", headers={"retry-after": "1"})
    return json_response(
        [
            _slot(number, facts.engine.n_ctx, running, client.open.get(running))
            for number, running in enumerate(places)
        ]
    )


def _slot(number: int, n_ctx: int, running: int, text: OpenText | None) -> dict[str, Any]:
    """One place, with its request if it has one."""
    slot: dict[str, Any] = {
        "id": number,
        "n_ctx": n_ctx,
        "speculative": False,
        "is_processing": text is not None,
    }
    if text is None:
        return slot
    submit = text.submit
    params = generation_settings(
        submit.params,
        max_tokens=submit.max_tokens,
        ignore_eos=submit.ignore_eos,
        n_probs=submit.logprobs or 0,
    )
    n_remain = -1 if submit.max_tokens is None else submit.max_tokens - text.n_tokens
    return {
        **slot,
        "id_task": running,
        "n_prompt_tokens": len(submit.ids),
        "n_prompt_tokens_processed": text.n_read - text.n_cached,
        "n_prompt_tokens_cache": text.n_cached,
        "params": {name: params[name] for name in params if name not in HIDDEN_IN_SLOTS},
        "next_token": [
            {
                "has_next_token": True,
                "has_new_line": text.has_new_line,
                "n_remain": n_remain,
                "n_decoded": text.n_tokens,
            }
        ],
    }
