"""llama-server's own API: completions, tokens, the server's properties, its slots and metrics."""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localkv import __version__
from localkv.engine.logprobs import TokenLogprob, as_openai
from localkv.engine_process.texts import Ended, Event, Piece, Reading, Submit
from localkv.engine_process.wire import SlotAction
from localkv.errors import LocalKVError
from localkv.sampling.params import NUMBERS, SamplingParams
from localkv.server import limits
from localkv.server.answer import (
    AnswerReader,
    Answers,
    Delta,
    RunningTimings,
    native_timings,
    prompt_progress,
)
from localkv.server.chat_request import ChatBody, rendered
from localkv.server.engine_client import OpenText
from localkv.server.failures import RequestError, as_request_error, unsupported
from localkv.server.front import Front
from localkv.server.json_answer import (
    JsonLists,
    event,
    event_stream,
    json_answer,
    json_response,
    to_json,
)
from localkv.server.json_body import received, takes
from localkv.server.models import Models
from localkv.server.prompts import (
    GivenPrompts,
    PromptModel,
    TextPrompt,
    checked_token,
    infill_prompt,
    text_prompts,
)
from localkv.server.request_fields import RequestFields, adapters_of, text_fields
from localkv.server.request_record import warn
from localkv.tool_calls.source import Content

RANDOM_SEED = 0xFFFFFFFF
"""What stands for a seed that is drawn."""
_ABSENT = object()
PROBABILITIES = "completion_probabilities"
PART = 4096
"""Tokens of an answer that become JSON in one piece."""
HIDDEN_IN_SLOTS = ("stop", "logit_bias", "dry_sequence_breakers")
"""Settings that may tell what a request is about, which `/slots` leaves out."""
INFILL_SAMPLER = "infill"
ACTIONS = ("save", "restore", "erase")
FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def generation_settings(
    params: SamplingParams,
    *,
    max_tokens: int | None = None,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
    never: Collection[int] = (),
    stream: bool = False,
    n_probs: int = 0,
    timings_per_token: bool = False,
    post_sampling_probs: bool = False,
    lora: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """The object `generation_settings` of an answer, and `params` of others.

    Args:
        params: the samplers and their settings.
        max_tokens: most tokens; None sets no limit, which is -1.
        seed: the one that was drawn, if the request left it open.
        stop: strings that end the text.
        never: tokens that are not drawn because of `ignore_eos`.
        lora: scales of adapters by their numbers.
    """
    known = params.seed if params.seed is not None and params.seed >= 0 else seed
    bias = {**params.logit_bias, **(dict.fromkeys(never, float("-inf")) if ignore_eos else {})}
    most = -1 if max_tokens is None else max_tokens
    numbers = {
        number.aliases[0] if number.aliases else name: getattr(params, name)
        for name, number in NUMBERS.items()
    }
    numbers["seed"] = RANDOM_SEED if known is None else known
    min_keep = numbers.pop("min_keep")
    return {
        **numbers,
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
        "stop": list(stop),
        "max_tokens": most,
        "n_predict": most,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": ignore_eos,
        "stream": stream,
        "logit_bias": [
            {"token": token, "bias": None if amount == float("-inf") else amount}
            for token, amount in bias.items()
        ],
        "n_probs": n_probs,
        "min_keep": min_keep,
        "samplers": list(params.samplers),
        "timings_per_token": timings_per_token,
        "post_sampling_probs": post_sampling_probs,
        "lora": [{"id": number, "scale": scale} for number, scale in (lora or {}).items()],
    }


class NativeBody(RequestFields, kw_only=True):
    """The fields that mean something here; others are ignored."""

    prompt: GivenPrompts
    n_cmpl: limits.Choices | None = None
    n_probs: limits.Logprobs | None = None
    logprobs: limits.Logprobs | None = None
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    response_fields: limits.Names | None = None
    n_indent: limits.Int32 | None = None
    t_max_predict_ms: limits.Milliseconds | None = None

    @property
    def n_texts(self) -> int:
        """Texts to each prompt."""
        return (self.n if self.n_cmpl is None else self.n_cmpl) or 1

    @property
    def n_logprobs(self) -> int | None:
        """Alternatives of each token; None for no probabilities."""
        return (self.logprobs if self.n_probs is None else self.n_probs) or None


class NativeText:
    """One text while it comes.

    Args:
        submit: what the engine was asked for.
        hides: it is only wanted that the prompt is in the cache (`n_predict` 0).
    """

    def __init__(self, submit: Submit, *, hides: bool) -> None:
        self.submit = submit
        self.text = ""
        self.tokens = list[int]()
        self.lists = JsonLists()
        self.n_tokens = 0
        self.end: Ended | None = None
        self.timings = RunningTimings()
        self.hides = hides

    def take(self, one: Event, deltas: list[Delta]) -> str:
        """Note an event; the text that it adds."""
        self.timings.note(one)
        if isinstance(one, Ended):
            self.end = one
        if self.hides:
            return ""
        added = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        self.text += added
        if isinstance(one, Piece):
            self.tokens += one.tokens
            self.n_tokens = one.n_tokens
        return added

    @property
    def stop_type(self) -> str:
        """llama-server's word for why it ended."""
        assert self.end is not None
        if self.end.stop is not None:
            return "word"
        return {"stop": "eos", "length": "limit", "cancelled": "none"}[self.end.finish_reason]


class NativeAnswer:
    """Texts for one request.

    Args:
        front: where they come from.
        body: the request.
        answers: the texts, as they come.
        texts: the same.
        prompts: what each goes on from, control tokens written out.
        never: tokens that are not drawn because of `ignore_eos`.
    """

    def __init__(
        self,
        front: Front,
        body: NativeBody,
        answers: Answers,
        texts: list[NativeText],
        prompts: list[str],
        never: frozenset[int],
    ) -> None:
        self.front, self.body, self.answers, self.texts = front, body, answers, texts
        self._prompts, self._never = prompts, never
        self._places = [-1 if body.id_slot is None else body.id_slot] * len(texts)

    async def whole(self) -> Any:
        """The object of the text, or a list of them.

        Raises:
            RequestError: one of them failed.
        """
        async for index, one, deltas in self.answers.news():
            self._note_place(index)
            text = self.texts[index]
            text.take(one, deltas)
            if isinstance(one, Piece) and one.logprobs and not text.hides:
                text.lists.add({PROBABILITIES: self._probabilities(one.logprobs)})
        if len(self.texts) == 1:
            return self._picked(self._final(0))
        done = JsonLists()
        for index in range(len(self.texts)):
            done.add({"texts": [self._picked(self._final(index))]})
            await asyncio.sleep(0)  # each repeats what the request said: a hundred take long
        return done.whole()["texts"]

    async def events(self) -> AsyncIterator[bytes]:
        """The texts as server-sent events."""
        try:
            async for index, one, deltas in self.answers.news():
                self._note_place(index)
                for item in self._items(index, one, self.texts[index].take(one, deltas)):
                    yield event(item)
        except RequestError as error:
            yield event({"error": error.fields})
        finally:
            self.answers.close()

    def _note_place(self, index: int) -> None:
        """Where it runs: once it has ended nobody knows any more."""
        client = self.front.supervisor.client
        number = self.answers.texts.ids[index]
        if self._places[index] < 0 and number in client.status.places:
            self._places[index] = client.status.places.index(number)

    def _items(self, index: int, one: Event, added: str) -> list[dict[str, Any]]:
        """What an event adds to the stream."""
        text = self.texts[index]
        if isinstance(one, Reading):
            return [self._progress(index, one)] if self.body.return_progress else []
        if isinstance(one, Piece) and not text.hides:
            fields: dict[str, Any] = {}
            if one.logprobs:
                fields[PROBABILITIES] = self._probabilities(one.logprobs)
            if self.body.timings_per_token:
                fields["timings"] = text.timings.now()
            return [self._partial(index, added, list(one.tokens), **fields)]
        if isinstance(one, Ended):
            final = {**self._final(index), "content": "", "tokens": []}
            final.pop(PROBABILITIES, None)
            rest = [self._partial(index, added, [])] if added else []
            return [*rest, self._picked(final)]
        return []

    def _progress(self, index: int, one: Reading) -> dict[str, Any]:
        timings = self.texts[index].timings
        told = {"timings": timings.now()} if self.body.timings_per_token else {}
        progress = prompt_progress(one, timings)
        return self._partial(index, "", [], prompt_progress=progress, **told)

    def _partial(
        self, index: int, content: str, tokens: list[int], **fields: Any
    ) -> dict[str, Any]:
        text = self.texts[index]
        return {
            "index": index,
            "content": content,
            "tokens": tokens,
            "stop": False,
            "id_slot": self._places[index],
            "tokens_predicted": text.n_tokens,
            "tokens_evaluated": len(text.submit.ids),
            **fields,
        }

    def _final(self, index: int) -> dict[str, Any]:
        text, body = self.texts[index], self.body
        end, submit = text.end, text.submit
        assert end is not None
        timings = native_timings(end)
        n_drawn = end.usage.completion_tokens
        if text.hides:
            timings |= {"predicted_n": 0, "predicted_per_token_ms": 0.0}
            n_drawn = 0
        final = {
            "index": index,
            "content": text.text,
            "tokens": text.tokens if body.return_tokens else [],
            "id_slot": self._places[index],
            "stop": True,
            "model": self.front.settings.model_name,
            "tokens_predicted": n_drawn,
            "tokens_evaluated": end.usage.prompt_tokens,
            "generation_settings": generation_settings(
                submit.params,
                max_tokens=0 if text.hides else submit.max_tokens,
                seed=end.seed,
                stop=submit.stop,
                ignore_eos=submit.ignore_eos,
                never=self._never,
                stream=bool(body.stream),
                n_probs=submit.logprobs or 0,
                timings_per_token=bool(body.timings_per_token),
                post_sampling_probs=bool(body.post_sampling_probs),
                lora=scales_of(self.front, submit.lora),
            ),
            "prompt": self._prompts[index],
            "has_new_line": "\n" in text.text,
            "truncated": end.context_full,
            "stop_type": text.stop_type,
            "stopping_word": end.stop or "",
            "tokens_cached": end.usage.prompt_tokens + max(0, n_drawn - 1),
            "timings": timings,
        }
        if submit.logprobs is not None:
            final |= text.lists.whole(PROBABILITIES)
        return final

    def _probabilities(self, tokens: tuple[TokenLogprob, ...]) -> list[dict[str, Any]]:
        """Probabilities of tokens: logarithms before samplers, or plain values after them."""
        items: list[dict[str, Any]] = as_openai(tokens)["content"]
        if not self.body.post_sampling_probs:
            return items

        def item(one: dict[str, Any]) -> dict[str, Any]:
            rest = {name: one[name] for name in ("id", "token", "bytes")}
            return {**rest, "prob": math.exp(one["logprob"])}

        return [
            {**item(one), "top_probs": [item(top) for top in one["top_logprobs"]]} for one in items
        ]

    def _picked(self, final: dict[str, Any]) -> dict[str, Any]:
        """The fields that are asked for: `a/b` is the field b of the object a."""
        if not self.body.response_fields:
            return final
        picked = dict[str, Any]()
        for path in self.body.response_fields:
            value: Any = final
            for name in path.split("/"):
                value = value.get(name, _ABSENT) if isinstance(value, dict) else _ABSENT
            if value is not _ABSENT:
                picked[path] = value
        return picked


@takes(NativeBody)
async def completion(front: Front, request: Request) -> Response:
    """POST /completion."""
    body = await received(front, request, NativeBody)
    return await _completed(front, request, body, await text_prompts(front, body.prompt))


class Snippet(msgspec.Struct):
    """Text of another file than the one that is edited."""

    text: str
    filename: limits.Name = "tmp"


class InfillBody(NativeBody, kw_only=True):
    """The fields of a completion, and the text around the gap."""

    prompt: str = ""
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[Snippet], limits.MANY] | None = None


@takes(InfillBody)
async def infill(front: Front, request: Request) -> Response:
    """POST /infill: the text between a prefix and a suffix, as editors ask for it."""
    body = await received(front, request, InfillBody)
    _leave_out(body)
    prompt = await infill_prompt(
        front,
        body.input_prefix,
        body.input_suffix,
        extra=[(snippet.filename, snippet.text) for snippet in body.input_extra or ()],
        prompt=body.prompt,
        max_tokens=_most(front, body),
    )
    return await _completed(front, request, body, [prompt])


def _leave_out(body: InfillBody) -> None:
    """Take out what editors send that has no effect here, with a warning."""
    if isinstance(body.samplers, list) and INFILL_SAMPLER in body.samplers:
        body.samplers = [name for name in body.samplers if name != INFILL_SAMPLER]
        warn(f"there is no sampler {INFILL_SAMPLER!r}: the others draw")


def _most(front: Front, body: NativeBody) -> int | None:
    """Most tokens of a text; None sets no limit."""
    return front.n_predict(body.n_predict, body.max_tokens, body.max_completion_tokens)


async def _completed(
    front: Front, request: Request, body: NativeBody, prompts: list[TextPrompt]
) -> Response:
    """The answer to prompts."""
    model, most = await front.model(), _most(front, body)
    requests = await front.submits(
        body,
        prompts,
        body.n_texts,
        max_tokens=1 if most == 0 else most,
        logprobs=body.n_logprobs,
        **await text_fields(front, body),
        tells_tokens=bool(body.stream or body.return_tokens),
        after_samplers=bool(body.post_sampling_probs),
        n_indent=max(0, body.n_indent or 0),
        line_seconds=max(0.0, body.t_max_predict_ms or 0.0) / 1000,
    )
    echoed = await front.in_thread(lambda: [model.detokenize(submit.ids) for submit in requests])
    answers = Answers(
        await front.begin_all(requests), [AnswerReader(keeps_reasoning=True) for _ in requests]
    )
    answer = NativeAnswer(
        front,
        body,
        answers,
        [NativeText(submit, hides=most == 0) for submit in requests],
        echoed,
        model.tokenizer.eog_ids,
    )
    if body.stream:
        return event_stream(answer.events())
    return await json_answer(request, answer.whole(), answers.texts)


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A text to be cut into tokens."""

    content: str | limits.TextParts
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    model: limits.Name | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Tokens to be put together."""

    tokens: limits.TokenIds
    model: limits.Name | None = None


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

    return Response(await front.in_thread(answer), media_type="application/json")


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

    return Response(await front.in_thread(content), media_type="application/json")


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


async def props(models: Models, request: Request) -> Response:
    """GET /props: the model, its template, and how tokens are drawn where requests say nothing."""
    served = models.named(request.query_params.get("model"))
    facts, settings = served.front.known_facts, served.settings
    model = await served.front.model()
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
        "ui": models.settings.has_page,
        "chat_template": "" if template is None else template.source,
        "chat_template_caps": {
            "supports_tools": template is not None and template.takes_tools,
            "supports_tool_calls": template is not None and template.reads("tool_calls"),
            "supports_preserve_reasoning": bool(template and template.preserving(True)),
        },
        "bos_token": text_of(tokenizer.bos_id),
        "eos_token": text_of(tokenizer.eos_id),
        "build_info": f"localkv {__version__}",
        "is_sleeping": served.status["value"] == "sleeping",
        "cache_tokens": facts.cache_tokens,
        "cache_type_k": facts.engine.type_k,
        "cache_type_v": facts.engine.type_v,
    }
    if model.tool_template is not model.chat_template and model.tool_template is not None:
        described["chat_template_tool_use"] = model.tool_template.source
    if served.living is None:
        served.front.unload()
    return json_response(described)


async def change_props(models: Models, request: Request) -> Response:
    """POST /props: nothing can be changed."""
    raise unsupported("changing /props", "start the server with other options")


def scales_of(front: Front, lora: Mapping[int, float] | None) -> dict[int, float]:
    """The scale of each adapter by its number, of a request that asked for some, or for none."""
    asked = front.lora if lora is None else lora
    return {
        number: one.scale if asked is None else asked.get(number, 0.0)
        for number, one in enumerate(front.facts.adapters)
    }


async def lora_adapters(front: Front, request: Request) -> Response:
    """GET /lora-adapters: the adapters that were loaded, and the scales of requests that name
    none."""
    return json_response(
        [
            {"id": number, "path": front.facts.adapters[number].path, "scale": scale}
            for number, scale in scales_of(front, None).items()
        ]
    )


@takes(limits.AdapterScales)
async def change_lora_adapters(front: Front, request: Request) -> Response:
    """POST /lora-adapters: other scales for requests that name none; adapters that are left out
    have 0."""
    front.lora = adapters_of(front, await received(front, request, limits.AdapterScales))
    return json_response({"success": True})


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


class StateBody(msgspec.Struct):
    """The body of a request to save or restore."""

    filename: limits.Name = ""


async def slot_action(front: Front, request: Request) -> Response:
    """POST /slots/ID: save the text that a slot had last to a file, take one back, or forget it."""
    folder, facts = front.settings.state_dir, front.facts
    if folder is None:
        raise unsupported("saving slots", "start the server with --slot-save-path FOLDER")
    if front.settings.cache_per_key:
        raise unsupported("saving slots with --cache-per-key", "leave one of them out")
    action = request.query_params.get("action", "")
    if action not in ACTIONS:
        raise RequestError(400, "Invalid action", f"use {', '.join(ACTIONS)}")
    text = request.path_params["id"]
    place = int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else -1
    if not 0 <= place < facts.n_parallel:
        raise RequestError(400, "Invalid slot ID", f"slots are 0 to {facts.n_parallel - 1}")
    name = "" if action == "erase" else (await received(front, request, StateBody)).filename
    path = "" if action == "erase" else str(_path(folder, name, is_there=action == "restore"))
    try:
        async with asyncio.timeout(front.settings.timeout):
            done = await front.supervisor.client.act(SlotAction(0, action, place, path))
    except TimeoutError:
        seconds = front.settings.timeout
        raise RequestError(504, f"the request took more than {seconds:g} s") from None
    except LocalKVError as error:
        raise _without_folder(as_request_error(error), folder) from None
    answers: dict[str, dict[str, Any]] = {
        "save": {"n_saved": done.n_tokens, "n_written": done.n_bytes},
        "restore": {"n_restored": done.n_tokens, "n_read": done.n_bytes},
        "erase": {"n_erased": done.n_tokens},
    }
    answer = {"id_slot": place, **answers[action]}
    if name:
        answer |= {"filename": name, "timings": {f"{action}_ms": done.ms}}
    return json_response(answer)


def _path(folder: str, name: str, *, is_there: bool) -> Path:
    """A file of the folder for states.

    Raises:
        RequestError: the name is none, or a link, which may lead elsewhere.
    """
    if not FILE_NAME.fullmatch(name) or not name.strip("."):
        raise RequestError(400, "Invalid filename", "up to 128 letters, digits, dots, _ and -")
    path = Path(folder) / name
    if path.is_symlink() or (is_there and not path.is_file()):
        raise RequestError(400, f"there is no state {name!r}")
    return path


def _without_folder(error: RequestError, folder: str) -> RequestError:
    """Copy an error, without the server's paths in its message."""
    message = error.message.replace(folder.rstrip(os.sep) + os.sep, "")
    return RequestError(error.status, message, error.hint, headers=error.headers)


async def metrics(models: Models, request: Request) -> Response:
    """GET /metrics: what the server does and did, in Prometheus' text format; of `?model=NAME`, or
    of all."""
    from localkv.server.metrics import CONTENT_TYPE

    if not models.settings.has_metrics:
        raise unsupported("/metrics", "start the server without --no-metrics")
    if models.metrics is None:
        raise RequestError(503, "the server is starting", headers={"retry-after": "1"})
    name = request.query_params.get("model")
    of = None if name is None else models.listed(name).name
    started = {"process-start-time-unix": str(models.first.front.started)}
    return Response(models.metrics.text(of), headers=started, media_type=CONTENT_TYPE)


class ModelBody(msgspec.Struct, kw_only=True):
    """The name of a model."""

    model: limits.Name


@takes(ModelBody)
async def load_model(models: Models, request: Request) -> Response:
    """POST /models/load: begin to load a model; /models tells how far it is."""
    body = await received(models, request, ModelBody)
    models.begin_loading(models.listed(body.model))
    return json_response({"success": True})


@takes(ModelBody)
async def unload_model(models: Models, request: Request) -> Response:
    """POST /models/unload: end a model's engine once all requests to it are answered."""
    body = await received(models, request, ModelBody)
    model = models.listed(body.model)
    if model.living is None:
        raise RequestError(400, f"the model {body.model!r:.100} is not loaded")
    models.begin_letting_go(model)
    return json_response({"success": True})
