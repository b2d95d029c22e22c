"""llama-server's `/tokenize`, `/detokenize` and `/apply-template`: prompts without an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localkv.server import limits
from localkv.server.chat_request import ChatBody, rendered
from localkv.server.front import Front
from localkv.server.json_answer import json_response, to_json
from localkv.server.json_body import received, takes
from localkv.server.prompts import PromptModel, checked_token

PART = 4096
"""Tokens of an answer that become JSON in one piece."""


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
    body = await received(front, request, TokenizeBody)
    model = await front.model()

    def answer() -> bytes:
        return b"".join(_listed(model, ids_of(), with_pieces=body.with_pieces))

    def ids_of() -> list[int]:
        parts = body.content if isinstance(body.content, list) else [body.content]
        ids = list[int]()
        for number, part in enumerate(parts):
            if isinstance(part, str):
                special = body.add_special and number == 0
                parse = body.parse_special
                ids += model.tokens(part, add_special=special, parse_special=parse)
            else:
                ids.append(checked_token(model, part))
        return ids

    return Response(await front.apart(answer), media_type="application/json")


def _listed(model: PromptModel, ids: list[int], *, with_pieces: bool) -> Iterator[bytes]:
    """The answer in JSON, made in pieces, so that other threads go on between them."""
    yield b'{"tokens":['
    for start in range(0, len(ids), PART):
        part: list[Any] = ids[start : start + PART]
        if with_pieces:
            part = [
                {"id": token, "piece": piece_of(model.tokenizer.token_bytes(token, True))}
                for token in part
            ]
        yield b"," * bool(start) + to_json(part)[1:-1]
    yield b"]}"


def piece_of(data: bytes) -> str | list[int]:
    """What a token stands for: text, or bytes if they are a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


@takes(DetokenizeBody)
async def detokenize(front: Front, request: Request) -> Response:
    """POST /detokenize: the text of ids, control tokens written out."""
    body = await received(front, request, DetokenizeBody)
    model = await front.model()

    def content() -> bytes:
        ids = [checked_token(model, token) for token in body.tokens]
        return to_json({"content": model.detokenize(ids)})

    return Response(await front.apart(content), media_type="application/json")


@takes(ChatBody)
async def apply_template(front: Front, request: Request) -> Response:
    """POST /apply-template: a conversation as the text that the model reads."""
    body = await received(front, request, ChatBody)
    prompt = await rendered(front, body)
    return json_response({"prompt": prompt.text})


@takes(ChatBody)
async def chat_tokens(front: Front, request: Request) -> Response:
    """POST /v1/chat/completions/input_tokens: how many tokens a conversation has."""
    body = await received(front, request, ChatBody)
    prompt = await rendered(front, body)
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})
