"""One request in the engine's process, and what there is to tell of it after a step."""

from __future__ import annotations

import traceback
from pathlib import Path

from localkv.engine.logprobs import TokenLogprob
from localkv.engine.stream import TextStream
from localkv.errors import LocalKVError
from localkv.llm import TextModel
from localkv.loader.chat_prompt import ChatPrompt
from localkv.server.wire import Ended, Event, Opening, Piece, Reading, Submit


class RunningText:
    """A text that grows with the steps of the engine.

    Args:
        id: the front's number of it.
        stream: the text.
        tells_tokens: pieces name the tokens that they consist of.
        place: by which it can be saved; -1 for the one in which it runs.
    """

    def __init__(
        self, id: int, stream: TextStream, *, tells_tokens: bool = False, place: int = -1
    ) -> None:
        generation = stream.generation
        self.id, self.place = id, place
        self.stream = stream
        self.has_ended = False
        self._generation = generation
        self._n_held = -1  # no row of its prompt is known
        self._tells_tokens = tells_tokens
        self._n_told = 0

    @classmethod
    def begun(cls, model: TextModel, submit: Submit) -> RunningText:
        """Let a request wait for its turn.

        Raises:
            LocalKVError: it can't be served.
        """
        prompt = submit.ids if submit.chat is None else chat_prompt(submit.ids, submit.chat)
        stream = model.batch_stream(
            prompt,
            params=submit.params,
            max_tokens=submit.max_tokens,
            stop=submit.stop,
            ignore_eos=submit.ignore_eos,
            logprobs=submit.logprobs,
            grammar=submit.grammar,
        )
        text = cls(submit.id, stream, tells_tokens=submit.tells_tokens, place=submit.place)
        request = text._generation.request  # no step has looked for its rows yet
        request.text.salt, request.reuses = submit.salt, submit.reuses
        text._generation.ranks_after_samplers = submit.after_samplers
        return text

    @property
    def ids(self) -> list[int]:
        """Its tokens so far, including the prompt's."""
        return self._generation.request.text.ids

    @property
    def waits(self) -> bool:
        """Whether it needs a step."""
        return not self._is_ready()

    @property
    def is_running(self) -> bool:
        """Whether it has a place among those that run at the same time."""
        return self._generation.request.state == "running"

    def _is_ready(self) -> bool:
        return self._generation.n_ready > 0 or self._generation.has_ended

    def cancel(self) -> None:
        """Nobody wants the rest."""
        self.stream.close()

    def news(self) -> list[Event]:
        """What has happened since the last call."""
        error: LocalKVError | None = None
        try:
            text = self.stream.read(self._is_ready)
        except Exception as problem:
            text, error = None, as_known(problem)
        events = self._reading()
        has_ended = text is None or self._generation.finish_reason is not None
        logprobs = self.stream.take_logprobs()
        if text or logprobs or (has_ended and self._untold()):
            events.append(self._piece(text or "", logprobs))
        if has_ended:
            self.has_ended = True
            events.append(self._ended(error))
        return events

    def _piece(self, text: str, logprobs: tuple[TokenLogprob, ...]) -> Piece:
        tokens = self._untold()
        self._n_told += len(tokens)
        return Piece(self.id, text, self.stream.stats.n_generated, logprobs, tokens)

    def _untold(self) -> tuple[int, ...]:
        """Tokens that no piece has named, if pieces do."""
        if not self._tells_tokens:
            return ()
        request = self._generation.request
        n_prompt, n_generated = request.n_prompt, self.stream.stats.n_generated
        return tuple(request.text.ids[n_prompt + self._n_told : n_prompt + n_generated])

    def _reading(self) -> list[Event]:
        """How far the prompt is evaluated, if it is further than it was: at first what was so
        before, and at last all of it."""
        request = self._generation.request
        n_prompt, n_reused = request.n_prompt, request.n_reused
        if self._n_held == n_prompt:
            return []
        n_held = min(n_prompt, request.n_held)
        if self.stream.stats.n_generated:
            n_held = n_prompt
        elif request.sequence is None:
            return []  # it waits
        news = list[Event]()
        if n_held > self._n_held:
            if self._n_held < 0 and n_reused < n_held:
                news.append(Reading(self.id, n_prompt, n_reused, n_reused))
            news.append(Reading(self.id, n_prompt, n_reused, n_held))
            self._n_held = n_held
        return news

    def _ended(self, error: LocalKVError | None) -> Ended:
        done = self.stream.completion
        return Ended(
            self.id,
            done.finish_reason,
            done.usage,
            done.timings,
            done.seed,
            context_full=done.context_full,
            stop=self.stream.stop_string,
            error=None if error is None else str(error),
            kind="" if error is None else type(error).__name__,
        )


def as_known(error: Exception) -> LocalKVError:
    """An error as its request reads it: a bug's place, but not its text, which may be private."""
    if isinstance(error, LocalKVError):
        return error
    places = traceback.extract_tb(error.__traceback__, limit=-1)
    where = "".join(f" in {Path(at.filename).name}, line {at.lineno}" for at in places)
    return LocalKVError(f"the engine has a bug: {type(error).__name__}{where}")


def chat_prompt(ids: list[int], chat: Opening) -> ChatPrompt:
    """The prompt of an answer, as the engine takes it."""
    return ChatPrompt(
        ids,
        "",
        opening=chat.opening,
        is_begun=chat.is_begun,
        reasoning=chat.reasoning,
        n_reasoned=chat.n_reasoned,
        reasoning_budget=chat.reasoning_budget,
    )
