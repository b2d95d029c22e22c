"""What all dialects share: prompts are made, texts begun, and limits kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from localkv.config import Overrides
from localkv.engine_process.texts import Embed, Facts, Opening, Submit, Vectors
from localkv.errors import LocalKVError, counted
from localkv.loader.chat_prompt import ChatPrompt
from localkv.sampling.params import NUMBERS, SamplingParams
from localkv.server.engine_client import Supervisor, Texts
from localkv.server.failures import RequestError, as_request_error, context_error
from localkv.server.prompts import PromptModel, TextPrompt
from localkv.server.request_fields import SamplingFields, sampling_params
from localkv.server.request_record import RequestRecord, current
from localkv.server.settings import ModelSettings
from localkv.server.work import Work

if TYPE_CHECKING:
    from localkv.server.metrics import Metrics

STALLED_SECONDS = 120.0
"""Seconds without a step after which an engine that has work stands still. A step with a part of a
prompt may take a minute with a large model on a slow machine."""


class Front:
    """A server's side of requests to one model.

    Args:
        settings: the model, and what requests to it may do.
        supervisor: runs the engine.
        work: runs what would hold up the event loop.
        origins: what texts of each key have in common (`key_origins`).

    Attributes:
        started: seconds since 1970.
        metrics: of the model, once somebody counts.
        in_thread, for_body: `Work`'s.
        lora: the scales of adapters, of requests that name none; None for the start's.
    """

    def __init__(
        self,
        settings: ModelSettings,
        supervisor: Supervisor,
        work: Work,
        origins: Sequence[bytes] = (b"",),
    ) -> None:
        self.settings = settings
        self._origins = origins
        self.supervisor = supervisor
        self.started = int(time.time())
        self.work, self.in_thread, self.for_body = work, work.in_thread, work.for_body
        self.metrics: Metrics | None = None
        self.lora: dict[int, float] | None = None
        self._making: asyncio.Task[PromptModel] | None = None

    async def load(self) -> None:
        """Build the tokenizer beside the event loop."""
        with suppress(LocalKVError):  # a request is told of it
            model = await self.model()
            for line in model.warnings:
                self.supervisor.say(f"warning: {line}")
            await asyncio.to_thread(model.tokenizer.prepare)

    def unload(self) -> None:
        """Give the tokenizer and the templates back; whoever wants them again builds them."""
        self._making = None

    async def model(self) -> PromptModel:
        """The tokenizer and the templates, once they are there.

        Raises:
            LocalKVError: there are none.
        """
        if self._making is None:
            self._making = asyncio.create_task(asyncio.to_thread(self._made))
        return await asyncio.shield(self._making)

    def _made(self) -> PromptModel:
        settings = self.settings
        return PromptModel(
            settings.engine.model,
            Overrides.of(settings.engine.arguments),
            chat_template=settings.engine.chat_template,
            reasoning=settings.reasoning,
            reasoning_budget=settings.reasoning_budget,
            reasoning_effort=settings.reasoning_effort,
            preserve_reasoning=settings.preserve_reasoning,
        )

    @property
    def facts(self) -> Facts:
        """Facts of the loaded model.

        Raises:
            RequestError: it is not loaded, or its engine is started again.
        """
        supervisor = self.supervisor
        if (facts := supervisor.facts) is not None:
            return facts
        if not supervisor.is_wanted:
            raise RequestError(503, "the model is not loaded", "POST /models/load loads it")
        raise RequestError(
            503,
            "Loading model",
            headers={"retry-after": "1"},
            extra={"progress": supervisor.progress},
        )

    @property
    def known_facts(self) -> Facts:
        """Facts of the model as it was loaded last, even if it sleeps.

        Raises:
            RequestError: it never was.
        """
        known = None if self.supervisor.is_wanted else self.supervisor.known
        return known or self.facts

    def check_progress(self) -> None:
        """Refuse a request if none can be answered: there is no engine, or it stands still.

        A busy server that makes progress can answer.

        Raises:
            RequestError: 503, with the reason.
        """
        self.facts  # noqa: B018  # raises 503
        client = self.supervisor.client
        if (seconds := client.stalled_seconds) > STALLED_SECONDS:
            raise RequestError(
                503,
                f"the engine has not made a step for {seconds:.0f} s, for "
                f"{counted(client.n_open, 'request')}",
                "restart the server",
                headers={"retry-after": "30"},
            )

    async def conversation(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> ChatPrompt:
        """A conversation as the model reads it (`TextModel.chat_prompt`).

        Raises:
            RequestError: the template refuses it.
        """
        model = await self.model()
        return await self.in_thread(model.conversation, messages, **options)

    async def params(self, fields: SamplingFields) -> SamplingParams:
        """How tokens are drawn.

        Raises:
            RequestError: a value makes no sense.
        """
        model = await self.model()

        def tokens_of(text: str) -> list[int]:
            return model.tokenize(text, add_special=False, parse_special=True)

        arguments = fields, self.settings.params, tokens_of
        if fields.logit_bias:
            return await self.in_thread(sampling_params, *arguments)
        try:
            return sampling_params(*arguments)
        except LocalKVError as error:
            raise as_request_error(error) from error

    async def submits(
        self, body: SamplingFields, prompts: Sequence[TextPrompt], n: int, **fields: Any
    ) -> list[Submit]:
        """The requests to the engine that go on from plain text: `n` for each prompt.

        Args:
            fields: of each `Submit`.

        Raises:
            RequestError: a value makes no sense.
        """
        params, ignores = await self.params(body), bool(body.ignore_eos)
        return [
            with_seed(Submit(0, prompt.ids, params, ignore_eos=ignores, **fields), number)
            for prompt in prompts
            for number in range(n)
        ]

    async def begin(self, request: Submit, n: int = 1) -> Texts:
        """Let a text go on, `n` times; all share the prompt, and each has a seed of its own.

        Raises:
            RequestError: the engine refuses it, is not there, or has too much to do.
        """
        return await self.begin_all([with_seed(request, number) for number in range(n)])

    async def begin_all(self, requests: Sequence[Submit]) -> Texts:
        """Let several texts go on.

        Raises:
            RequestError: the engine refuses one, is not there, or has too much to do.
        """
        facts, n = self.facts, len(requests)
        most = self.check_count(n)
        if self.lora is not None:
            requests = [
                one if one.lora is not None else msgspec.structs.replace(one, lora=self.lora)
                for one in requests
            ]
        for request in requests:
            self._check_room(facts, len(request.ids))
        client = self.supervisor.client
        self._check_queue(n, most)
        record = current.get()
        if record is not None:
            salt = record.key if self.settings.cache_per_key else 0
            whose = {"salt": salt, "origin": self._origins[salt], "client": record.client}
            requests = [msgspec.structs.replace(one, **whose) for one in requests]
        try:
            texts = client.submit(requests)
            try:
                texts.end_after(self._seconds_left(record), of=self.settings.timeout)
                if record is not None:
                    texts.keep = record.keep
                if self.metrics is not None:
                    lengths = (len(one.ids) for one in requests)
                    n_prompts = dict(zip(texts.ids, lengths, strict=True))
                    texts.observer = self.metrics.observer(record, n_prompts)
                await texts.begun()
                if record is not None:
                    record.at_end.append(texts.close)
            except BaseException:
                texts.close()
                raise
        except LocalKVError as error:
            raise as_request_error(error) from error
        return texts

    async def vectors(self, request: Embed) -> Vectors:
        """Let texts become vectors, or be scored.

        Raises:
            RequestError: the engine refuses it, is not there, or has too much to do; or it takes
                too long.
        """
        self._check_queue(1, self.check_count(1))
        try:
            async with asyncio.timeout(self._seconds_left(current.get())):
                found = await self.supervisor.client.vectors(request)
        except TimeoutError:
            seconds = self.settings.timeout
            raise RequestError(
                504, f"the request took more than {seconds:g} s", "see --timeout"
            ) from None
        except LocalKVError as error:
            raise as_request_error(error) from error
        if self.metrics is not None:
            self.metrics.read(current.get(), sum(map(len, request.texts)), found.seconds)
        return found

    def _seconds_left(self, record: RequestRecord | None) -> float:
        """What is left of a request's time."""
        waited = 0.0 if record is None else record.waited
        return max(0.0, self.settings.timeout - waited)

    def _check_queue(self, n: int, most: int) -> None:
        n_open = self.supervisor.client.n_open
        if n_open + n > most:
            raise RequestError(
                429,
                f"{n_open} requests run or wait already",
                "ask again later, or start the server with a larger --queue",
                headers={"retry-after": str(self._seconds_to_wait())},
            )

    def check_count(self, n: int) -> int:
        """Refuse more texts than can run and wait; return how many can.

        Raises:
            RequestError: there are more, or the model is not loaded.
        """
        most = self.facts.n_parallel + self.settings.queue
        if n > most:
            raise RequestError(
                400, f"{n} texts are too many for one request", f"up to {most} are possible"
            )
        return most

    @staticmethod
    def _check_room(facts: Facts, n_prompt: int) -> None:
        n_ctx = facts.engine.n_ctx
        if n_prompt >= n_ctx:
            raise context_error(n_prompt, n_ctx)
        if n_prompt >= facts.cache_tokens:
            raise context_error(n_prompt, n_ctx, everybody=facts.cache_tokens)

    def _seconds_to_wait(self) -> int:
        """About how long it takes until a place in the queue is free."""
        return 1 + self.supervisor.client.status.waiting // 4

    def n_predict(self, *asked: int | None) -> int | None:
        """Most tokens of an answer; None sets no limit.

        Args:
            asked: what fields of the request say; the first that is not None counts.
        """
        given = next((most for most in asked if most is not None), self.settings.max_tokens)
        return None if given is None or given < 0 else given


def with_seed(request: Submit, number: int) -> Submit:
    """One of several texts to a prompt: each has a seed of its own."""
    seed = request.params.seed
    if not number or seed is None or seed < 0:
        return request
    seed = (seed + number) % (NUMBERS["seed"].range.most + 1)
    return msgspec.structs.replace(request, params=replace(request.params, seed=seed))


def opening_of(prompt: ChatPrompt) -> Opening:
    """What the engine has to know of a prompt in addition to its tokens."""
    return Opening(
        prompt.opening,
        prompt.is_begun,
        prompt.reasoning,
        prompt.n_reasoned,
        prompt.reasoning_budget,
    )
