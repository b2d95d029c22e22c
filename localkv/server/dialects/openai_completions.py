"""`/v1/completions`: OpenAI's API for plain text, with llama-server's fields added."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localkv.engine.logprobs import LEAST, TokenLogprob, as_openai
from localkv.server import limits
from localkv.server.answer import AnswerReader, Answers, Delta
from localkv.server.chat_request import StreamOptions
from localkv.server.dialects.openai_answer import FINISH_REASONS, OpenAIAnswer
from localkv.server.failures import unsupported
from localkv.server.front import Front, with_seed
from localkv.server.json_answer import JsonLists, event, event_stream, json_answer
from localkv.server.json_body import received, takes
from localkv.server.prompts import GivenPrompts, TextPrompt, text_prompts
from localkv.server.request_fields import RequestFields, SamplingFields, text_fields
from localkv.server.usage import native_timings, prompt_progress
from localkv.server.wire import Ended, Event, Piece, Reading, Submit
from localkv.tool_calls.source import Content


class CompletionBody(RequestFields, kw_only=True):
    """The fields that mean something here; others are ignored."""

    prompt: GivenPrompts
    stream_options: StreamOptions | None = None
    best_of: limits.Choices | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: limits.Logprobs | None = None


class Choice:
    """One text while it comes.

    Args:
        echoed: the text of the prompt, if it belongs to the answer.
    """

    def __init__(self, echoed: str) -> None:
        self.text = echoed
        self.lists = JsonLists()
        self.end: Ended | None = None
        self._offset = len(echoed)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, one: Event, deltas: list[Delta]) -> str:
        """Note an event; the text that it adds."""
        added = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        self.text += added
        if isinstance(one, Ended):
            self.end = one
        return added

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for why it ended."""
        assert self.end is not None
        return FINISH_REASONS[self.end.finish_reason]

    def logprobs_of(self, tokens: tuple[TokenLogprob, ...]) -> dict[str, Any]:
        """The object `logprobs` of the next tokens, as this API has it, and as the chat API."""
        offsets = list[int]()
        for one in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(one.bytes))
        return {
            "tokens": [one.token for one in tokens],
            "token_logprobs": [max(LEAST, one.logprob) for one in tokens],
            "top_logprobs": [
                {top.token: max(LEAST, top.logprob) for top in one.top_logprobs} for one in tokens
            ],
            "text_offset": offsets,
            **as_openai(tokens),
        }


class CompletionAnswer(OpenAIAnswer):
    """Texts for one request.

    Args:
        body: the request.
        answers: the texts, as many as were asked for to each prompt.
        echoed: what each begins with.
        model: the name of the model that answers.
    """

    id_prefix, chunk_kind = "cmpl", "text_completion"

    def __init__(
        self, body: CompletionBody, answers: Answers, echoed: list[str], model: str
    ) -> None:
        super().__init__(answers, model, body.stream_options, body.n or 1)
        self.body = body
        self.choices = [Choice(text) for text in echoed]

    async def whole(self) -> dict[str, Any]:
        """All texts, once they are there.

        Raises:
            RequestError: one of them failed.
        """
        async for index, one, deltas in self.answers.news():
            choice = self.choices[index]
            choice.take(one, deltas)
            if isinstance(one, Piece) and one.logprobs:
                choice.lists.add(choice.logprobs_of(one.logprobs))
        choices = [
            self._choice(index, choice.text, choice.lists.whole(), choice.finish_reason)
            for index, choice in enumerate(self.choices)
        ]
        return self.object(self.chunk_kind, choices=choices, **self.totals)

    def opening_chunks(self) -> Iterable[bytes]:
        """The prompts, if they belong to the answers."""
        for index, choice in enumerate(self.choices):
            if choice.text:
                yield self._chunk(index, choice.text)

    def chunks_of(self, index: int, one: Event, deltas: list[Delta]) -> list[bytes]:
        """What an event adds to the stream."""
        if isinstance(one, Reading):
            if not self.body.return_progress:
                return []
            return [
                self._chunk(index, "", prompt_progress=prompt_progress(one, self.timings[index]))
            ]
        choice = self.choices[index]
        text = choice.take(one, deltas)
        logprobs = one.logprobs if isinstance(one, Piece) else ()
        told: dict[str, Any] = {}
        if self.body.timings_per_token:
            told["timings"] = self.timings[index].now()
        chunks = [self._chunk(index, text, logprobs, **told)] if text or logprobs else []
        if isinstance(one, Ended):
            reason, timings = choice.finish_reason, native_timings(one)
            chunks.append(self._chunk(index, "", finish_reason=reason, timings=timings))
        return chunks

    def _choice(
        self, index: int, text: str, logprobs: Mapping[str, Any], finish_reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs or None,
            "finish_reason": finish_reason,
        }

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: tuple[TokenLogprob, ...] = (),
        finish_reason: str | None = None,
        **fields: Any,
    ) -> bytes:
        told = self.choices[index].logprobs_of(logprobs) if logprobs else {}
        choice = self._choice(index, text, told, finish_reason)
        return event(self.object(self.chunk_kind, choices=[choice], **fields))


def _check(body: CompletionBody) -> None:
    """Refuse what makes no sense, or is not there.

    Raises:
        RequestError: says what.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "ask for n texts, with logprobs, and choose among them")
    if body.suffix:
        raise unsupported("suffix", "write the model's own tokens for filling in into the prompt")
    if body.echo and body.logprobs is not None:
        raise unsupported("logprobs of a prompt (echo)", "leave echo out for those of the answer")


async def submits(
    front: Front, body: SamplingFields, prompts: list[TextPrompt], n: int, **fields: Any
) -> list[Submit]:
    """The requests to the engine: `n` for each prompt.

    Args:
        fields: of each `Submit`.

    Raises:
        RequestError: a value makes no sense.
    """
    params = await front.params(body)
    return [
        with_seed(Submit(0, prompt.ids, params, ignore_eos=bool(body.ignore_eos), **fields), number)
        for prompt in prompts
        for number in range(n)
    ]


@takes(CompletionBody)
async def completions(front: Front, request: Request) -> Response:
    """POST /v1/completions."""
    body = await received(front, request, CompletionBody)
    front.check_model(body.model)
    _check(body)
    prompts, n = await text_prompts(front, body.prompt), body.n or 1
    most = front.n_predict(body.max_tokens, body.max_completion_tokens, body.n_predict)
    requests = await submits(
        front,
        body,
        prompts,
        n,
        max_tokens=most,
        logprobs=body.logprobs,
        **await text_fields(front, body),
    )
    texts = await front.begin_all(requests)
    answers = Answers(texts, [AnswerReader(keeps_reasoning=True) for _ in requests])
    echoed = [prompt.text if body.echo else "" for prompt in prompts for _ in range(n)]
    answer = CompletionAnswer(body, answers, echoed, front.settings.model_name)
    if body.stream:
        return event_stream(answer.chunks())
    return await json_answer(request, answer.whole(), texts)
