"""Texts to vectors, and documents in order: OpenAI's, llama-server's and ollama's embeddings, and
reranking as Jina's, Cohere's and Hugging Face's APIs (TEI) have it."""

from __future__ import annotations

import base64
import secrets
import time
from array import array
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localkv.engine_process.texts import Embed, Vectors
from localkv.server import limits
from localkv.server.failures import RequestError, context_error
from localkv.server.front import Front
from localkv.server.json_answer import to_json
from localkv.server.json_body import received, takes
from localkv.server.prompts import PromptModel, checked_token, text_of


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """OpenAI's fields; `input` is a text, its tokens, an object with a text, or a list of such."""

    input: limits.Inputs
    model: limits.Name | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: limits.SomeTokens | None = None


class NativeEmbeddingsBody(msgspec.Struct, kw_only=True):
    """llama-server's fields: one of `content` and `input`."""

    content: limits.Inputs | None = None
    input: limits.Inputs | None = None
    model: limits.Name | None = None
    embd_normalize: limits.Int32 | None = None


class OllamaEmbedBody(msgspec.Struct, kw_only=True):
    """ollama's fields; a text that is too long is cut unless `truncate` is false."""

    model: limits.Name
    input: limits.Inputs = ""
    truncate: bool | None = None
    dimensions: limits.SomeTokens | None = None
    keep_alive: limits.KeepAlive | None = None


class OllamaEmbeddingBody(msgspec.Struct, kw_only=True):
    """ollama's older fields."""

    model: limits.Name
    prompt: str = ""
    keep_alive: limits.KeepAlive | None = None


class RerankBody(msgspec.Struct, kw_only=True):
    """Jina's and Cohere's fields, with `documents`, or Hugging Face's, with `texts`."""

    query: str
    model: limits.Name | None = None
    documents: limits.Documents | None = None
    texts: limits.Documents | None = None
    top_n: limits.SomeTokens | None = None
    return_documents: bool | None = None
    return_text: bool | None = None


@takes(EmbeddingsBody)
async def embeddings(front: Front, request: Request) -> Response:
    """POST /v1/embeddings: texts as vectors of norm 1."""
    body = await received(front, request, EmbeddingsBody)
    texts = await _texts(front, body.input)
    found = await _one_of_each(front, texts, dimensions=_dimensions(front, body.dimensions))

    def answer() -> bytes:
        is_base64 = body.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(row).decode() if is_base64 else row.tolist(),
            }
            for index, row in enumerate(_rows(found))
        ]
        model = front.settings.model_name
        return to_json({"object": "list", "data": data, "model": model, "usage": _usage(texts)})

    return Response(await front.in_thread(answer), media_type="application/json")


@takes(NativeEmbeddingsBody)
async def native_embeddings(front: Front, request: Request) -> Response:
    """POST /embedding: texts as vectors, or each token's where the model has no pooling."""
    body = await received(front, request, NativeEmbeddingsBody)
    given = body.input if body.content is None else body.content
    if given is None:
        raise RequestError(400, 'there is no text: send "content"')
    texts = await _texts(front, given)
    pooling = front.settings.pooling
    found = await front.vectors(Embed(0, texts, pooling=pooling, norm=body.embd_normalize))

    def answer() -> bytes:
        rows = _rows(found)
        data = [
            {"index": index, "embedding": [next(rows).tolist() for _ in range(count)]}
            for index, count in enumerate(found.counts)
        ]
        return to_json(data)

    return Response(await front.in_thread(answer), media_type="application/json")


@takes(OllamaEmbedBody)
async def ollama_embed(front: Front, request: Request) -> Response:
    """POST /api/embed: texts as vectors of norm 1."""
    started = time.perf_counter()
    body = await received(front, request, OllamaEmbedBody)
    truncates = body.truncate is not False
    texts = [] if body.input == [] else await _texts(front, body.input, truncates=truncates)
    found = await _one_of_each(front, texts, dimensions=_dimensions(front, body.dimensions))

    def answer() -> bytes:
        fields = {
            "model": body.model,
            "embeddings": [row.tolist() for row in _rows(found)],
            "total_duration": int(1e9 * (time.perf_counter() - started)),
            "load_duration": 0,
            "prompt_eval_count": sum(map(len, texts)),
        }
        return to_json(fields)

    return Response(await front.in_thread(answer), media_type="application/json")


@takes(OllamaEmbeddingBody)
async def ollama_embedding(front: Front, request: Request) -> Response:
    """POST /api/embeddings: a text as a vector, as the model gives it."""
    body = await received(front, request, OllamaEmbeddingBody)
    texts = await _texts(front, body.prompt, truncates=True)
    found = await _one_of_each(front, texts, norm=-1)
    content = to_json({"embedding": next(_rows(found)).tolist()})
    return Response(content, media_type="application/json")


@takes(RerankBody)
async def rerank(front: Front, request: Request) -> Response:
    """POST /v1/rerank: how well documents answer a query, the best first."""
    body = await received(front, request, RerankBody)
    given = body.texts if body.documents is None else body.documents
    if not given:
        raise RequestError(400, "there are no documents", 'send a list of texts, "documents"')
    documents = [_document(one) for one in given]
    model, most = await front.model(), front.facts.engine.n_ctx
    pairs = await front.in_thread(
        lambda: [_pair(model, body.query, one, most) for one in documents]
    )
    found = await front.vectors(Embed(0, pairs, scores=True))
    scores = [row[0] for row in _rows(found)]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    if body.documents is None:
        results = [
            {"index": i, "score": scores[i]} | ({"text": documents[i]} if body.return_text else {})
            for i in order
        ]
        return Response(to_json(results), media_type="application/json")
    ranked = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": {"text": documents[i]}} if body.return_documents else {})
        for i in order
    ]
    fields = {
        "id": f"rerank-{secrets.token_urlsafe(18)}",
        "object": "list",
        "model": front.settings.model_name,
        "results": ranked,
        "usage": _usage(pairs),
    }
    return Response(to_json(fields), media_type="application/json")


async def _one_of_each(
    front: Front, texts: list[list[int]], *, norm: int | None = None, dimensions: int = 0
) -> Vectors:
    """A vector of each text.

    Raises:
        RequestError: tokens have vectors here, and texts have none.
    """
    pooling = front.settings.pooling
    found = await front.vectors(Embed(0, texts, pooling=pooling, norm=norm, dimensions=dimensions))
    if pooling == "none" or max(found.counts, default=1) > 1:
        raise RequestError(
            400, "without pooling there is no one vector of a text", "/embedding gives each token's"
        )
    return found


async def _texts(front: Front, given: limits.Inputs, *, truncates: bool = False) -> list[list[int]]:
    """The tokens of each text.

    Raises:
        RequestError: one has none, or too many; or it is neither a text nor a list of tokens; or
            there is none.
    """
    many: list[Any] = [given]
    if isinstance(given, list) and not any(isinstance(one, int) for one in given):
        many = given
    if not many:
        raise RequestError(400, "input has no texts", "send a text, or a list of texts")
    if len(many) > limits.MOST_INPUTS:
        raise RequestError(400, f"input must be up to {limits.MOST_INPUTS} texts, not {len(many)}")
    model, most = await front.model(), front.facts.engine.n_ctx
    return await front.in_thread(lambda: [_tokens(model, one, most, truncates) for one in many])


def _tokens(model: PromptModel, given: object, most: int, truncates: bool) -> list[int]:
    if isinstance(given, dict):
        given = text_of(given)
    if not isinstance(given, str | list):
        raise RequestError(400, f"input: {given!r:.60} is neither a text nor a list of token ids")
    ids, room = list[int](), None if truncates else most
    for number, part in enumerate([given] if isinstance(given, str) else given):
        if isinstance(part, str):
            ids += model.tokens(part, add_special=number == 0, parse_special=False, most=room)
        else:
            ids.append(checked_token(model, part))
    if not ids:
        raise RequestError(400, "input has no tokens", "send a text, or token ids")
    if len(ids) > most:
        if not truncates:
            raise context_error(len(ids), most)
        end = ids[-1:] if model.tokenizer.add_eos else []
        ids = ids[: most - len(end)] + end
    return ids


def _pair(model: PromptModel, query: str, document: str, most: int) -> list[int]:
    model.check_length(query, most)
    model.check_length(document, most)
    ids = model.pair_ids(query, document)
    if len(ids) > most:
        raise context_error(len(ids), most)
    return ids


def _document(given: object) -> str:
    if isinstance(given, dict):
        given = given.get("text")
    if not isinstance(given, str):
        raise RequestError(400, f"{given!r:.60} is no document", 'send texts, or {"text": "..."}')
    return given


def _dimensions(front: Front, asked: int | None) -> int:
    n_embd = front.facts.n_embd
    if asked is not None and asked > n_embd:
        raise RequestError(400, f"{asked} dimensions are too many: the model has {n_embd}")
    return asked or 0


def _rows(found: Vectors) -> Iterator[array[float]]:
    """Each vector."""
    size = 4 * found.width
    for start in range(0, len(found.data), size):
        yield array("f", found.data[start : start + size])


def _usage(texts: list[list[int]]) -> dict[str, int]:
    n = sum(map(len, texts))
    return {"prompt_tokens": n, "total_tokens": n}
