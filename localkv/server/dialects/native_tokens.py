"""llama-server's `/tokenize`, `/detokenize` and `/apply-template`: prompts without an answer."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localkv.server import limits
from localkv.server.chat_request import ChatBody, rendered
from localkv.server.front import Front
from localkv.server.json_answer import json_response
from localkv.server.json_body import decoded, takes
from localkv.server.text_prompt import checked_token


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A text to be cut into tokens."""

    content: str | limits.TextParts
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Tokens to be put together."""

    tokens: limits.TokenIds


@takes(TokenizeBody)
async def tokenize(front: Front, request: Request) -> Response:
    """POST /tokenize: the ids of a text, or of texts and ids in turn."""
    body = decoded(await request.body(), TokenizeBody)
    model = await front.model()

    def ids_of() -> list[Any]:
        parts = body.content if isinstance(body.content, list) else [body.content]
        ids = list[int]()
        for number, part in enumerate(parts):
            if isinstance(part, str):
                special = body.add_special and number == 0
                ids += model.tokenize(part, special, body.parse_special)
            else:
                ids.append(checked_token(model, part))
        if not body.with_pieces:
            return ids
        return [
            {"id": token, "piece": piece_of(model.tokenizer.token_bytes(token, True))}
            for token in ids
        ]

    return json_response({"tokens": await front.apart(ids_of)})


def piece_of(data: bytes) -> str | list[int]:
    """What a token stands for: text, or bytes if they are a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


@takes(DetokenizeBody)
async def detokenize(front: Front, request: Request) -> Response:
    """POST /detokenize: the text of ids, control tokens written out."""
    body = decoded(await request.body(), DetokenizeBody)
    model = await front.model()
    ids = [checked_token(model, token) for token in body.tokens]
    return json_response({"content": await front.apart(model.detokenize, ids)})


@takes(ChatBody)
async def apply_template(front: Front, request: Request) -> Response:
    """POST /apply-template: a conversation as the text that the model reads."""
    body = decoded(await request.body(), ChatBody)
    prompt = await rendered(front, body)
    return json_response({"prompt": prompt.text})


@takes(ChatBody)
async def chat_tokens(front: Front, request: Request) -> Response:
    """POST /v1/chat/completions/input_tokens: how many tokens a conversation has."""
    body = decoded(await request.body(), ChatBody)
    prompt = await rendered(front, body)
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})
