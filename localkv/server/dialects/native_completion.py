"""llama-server's own `/completion`: plain text, with everything that can be said of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localkv.engine.logprobs import TokenLogprob, as_openai
from localkv.server import limits
from localkv.server.answer import AnswerReader, Answers, Delta
from localkv.server.dialects.openai_completions import submits
from localkv.server.failures import RequestError, unsupported
from localkv.server.front import Front
from localkv.server.generation_settings import generation_settings
from localkv.server.json_answer import JsonLists, event, event_stream, json_answer
from localkv.server.json_body import received, takes
from localkv.server.prompts import GivenPrompts, text_prompts
from localkv.server.request_fields import RequestFields, text_fields
from localkv.server.usage import RunningTimings, native_timings, prompt_progress
from localkv.server.wire import Ended, Event, Piece, Reading, Submit
from localkv.tool_calls.source import Content

MISSING = object()
PROBABILITIES = "completion_probabilities"


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
    lora: limits.Refused | None = None

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
                value = value.get(name, MISSING) if isinstance(value, dict) else MISSING
            if value is not MISSING:
                picked[path] = value
        return picked


def _check(body: NativeBody) -> None:
    """Refuse what makes no sense, or is not there.

    Raises:
        RequestError: says what.
    """
    if body.n_indent:
        raise unsupported("n_indent", "use a grammar")
    if body.t_max_predict_ms and body.t_max_predict_ms > 0:
        raise unsupported("t_max_predict_ms", "use n_predict")
    if body.lora:
        raise unsupported("lora", "merge the adapter into the model's file")


@takes(NativeBody)
async def completion(front: Front, request: Request) -> Response:
    """POST /completion."""
    body = await received(front, request, NativeBody)
    front.check_model(body.model)
    _check(body)
    prompts, model = await text_prompts(front, body.prompt), await front.model()
    most = front.n_predict(body.n_predict, body.max_tokens, body.max_completion_tokens)
    requests = await submits(
        front,
        body,
        prompts,
        body.n_texts,
        max_tokens=1 if most == 0 else most,
        logprobs=body.n_logprobs,
        **await text_fields(front, body),
        tells_tokens=bool(body.stream or body.return_tokens),
        after_samplers=bool(body.post_sampling_probs),
    )
    echoed = await front.apart(lambda: [model.detokenize(submit.ids) for submit in requests])
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
