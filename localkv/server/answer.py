"""An answer while it comes, split into reasoning, calls of tools, and the rest; and its usage.

`AnswerReader` splits one text. `Answers` read the events of all texts of a request. `Parts` put the
pieces together where a dialect has them in a row: content blocks in Anthropic's API, output items
in OpenAI's Responses. Tokens and times are in the words of OpenAI and of llama-server.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from localkv.chat.conversation import split_reasoning
from localkv.engine_process.texts import Ended, Event, Piece, Reading
from localkv.engine_process.wire import named_error
from localkv.errors import LocalKVError
from localkv.server.engine_client import Texts
from localkv.server.failures import as_request_error
from localkv.tool_calls.family import CallReader
from localkv.tool_calls.source import CallArguments, CallBegun, CallEnded, CallEvent, Content


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


Delta: TypeAlias = Content | Reasoning | CallBegun | CallArguments


class AnswerReader:
    """Splits the text of an answer into reasoning, calls of tools, and the rest.

    Args:
        keeps_reasoning: leave reasoning in the text, with its tags.
        calls: finds calls of tools in what is not reasoning.
        opened: the tag of a reasoning that the prompt has begun; the text has only the rest of it.

    Attributes:
        content, reasoning: the texts so far.
    """

    def __init__(
        self, calls: CallReader | None = None, *, keeps_reasoning: bool = False, opened: str = ""
    ) -> None:
        self.content = ""
        self.reasoning = ""
        self._is_plain = keeps_reasoning
        self._calls = calls
        self._text = opened
        self._answer = ""

    def push(self, piece: str) -> list[Delta]:
        """What a piece of text adds."""
        if self._is_plain:
            return self._answered(piece)
        self._text += piece
        parts = split_reasoning(self._text)
        # the white space at the end of reasoning is no part of it, if it is the end
        reasoning = parts.reasoning.rstrip() if parts.open else parts.reasoning
        deltas = self._reasoned(reasoning[len(self.reasoning) :])
        deltas += self._answered(parts.answer[len(self._answer) :])
        if not parts.open and not parts.reasoning and parts.answer == self._text:
            self._is_plain = True
        return deltas

    def end(self, *, is_cut: bool = False) -> list[Delta]:
        """What is left at the end of the text.

        Args:
            is_cut: the text was cut, so the beginning of a tag or of a call is left out.
        """
        deltas = list[Delta]()
        if not self._is_plain and self._text and not is_cut:
            parts = split_reasoning(self._text)
            if parts.open and not parts.reasoning and not self.reasoning:
                # the beginning of a tag that never came
                deltas += self._answered(self._text[len(self._answer) :])
        return deltas + (self._noted(self._calls.end(is_cut=is_cut)) if self._calls else [])

    def _reasoned(self, text: str) -> list[Delta]:
        self.reasoning += text
        return [Reasoning(text)] if text else []

    def _answered(self, text: str) -> list[Delta]:
        """More of what is not reasoning."""
        self._answer += text
        if self._calls is not None:
            return self._noted(self._calls.push(text))
        return self._noted([Content(text)] if text else [])

    def _noted(self, events: list[CallEvent]) -> list[Delta]:
        deltas = [event for event in events if not isinstance(event, CallEnded)]
        for delta in deltas:
            if isinstance(delta, Content):
                self.content += delta.text
        return [*deltas]


class Answers:
    """One answer or more to the same prompt.

    Args:
        texts: as the engine writes them.
        readers: one for each.
        prompt: the text of the conversation, as the model reads it.
        n_prompt: its tokens.

    Attributes:
        ends: of the answers, None for those that go on.
    """

    def __init__(
        self, texts: Texts, readers: Sequence[AnswerReader], prompt: str = "", n_prompt: int = 0
    ) -> None:
        self.texts = texts
        self.prompt, self.n_prompt = prompt, n_prompt
        self.readers = list(readers)
        self.ends: list[Ended | None] = [None] * len(self.readers)

    @property
    def ended(self) -> list[Ended]:
        """The ends that are known."""
        return [end for end in self.ends if end is not None]

    async def news(self) -> AsyncIterator[tuple[int, Event, list[Delta]]]:
        """What happens: the number of an answer, the event, and the deltas that it brings.

        Raises:
            RequestError: an answer can't be completed.
        """
        try:
            async for events in self.texts:
                for index, event in events:
                    yield index, event, self._deltas(index, event)
        except LocalKVError as error:
            raise as_request_error(error) from error

    def _deltas(self, index: int, event: Event) -> list[Delta]:
        reader = self.readers[index]
        if isinstance(event, Piece):
            return reader.push(event.text)
        if isinstance(event, Ended):
            if event.error:
                raise as_request_error(named_error(event.kind, event.error))
            self.ends[index] = event
            return reader.end(is_cut=event.finish_reason != "stop" or event.stop is not None)
        return []

    def close(self) -> None:
        """Nobody reads the rest."""
        self.texts.close()


@dataclass
class Part:
    """A part so far.

    Attributes:
        index: among all parts of the answer.
        text: of a call, its arguments.
        id, name: of a call.
    """

    index: int
    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class PartEvent:
    """A part begins, grows by `added`, or is complete."""

    what: Literal["begun", "grown", "done"]
    part: Part
    added: str = ""


class Parts:
    """Puts deltas together to parts.

    Attributes:
        all: parts so far; the last may go on.
    """

    def __init__(self) -> None:
        self.all = list[Part]()
        self._is_open = False

    def push(self, deltas: Sequence[Delta]) -> list[PartEvent]:
        """What deltas do to the parts."""
        events = list[PartEvent]()
        for delta in deltas:
            if isinstance(delta, CallBegun):
                events += self._open(Part(len(self.all), "call", id=delta.id, name=delta.name))
                continue
            if not isinstance(delta, CallArguments):
                kind = "reasoning" if isinstance(delta, Reasoning) else "content"
                if not (self._is_open and self.all[-1].kind == kind):
                    new = Part(len(self.all), kind)  # type: ignore[arg-type]
                    events += self._open(new)
            part = self.all[-1]
            part.text += delta.text
            events.append(PartEvent("grown", part, delta.text))
        return events

    async def whole(self, answers: Answers) -> Ended:
        """Put all of the only answer together; how it ended.

        Raises:
            RequestError: it can't be completed.
        """
        async for _, _, deltas in answers.news():
            self.push(deltas)
        self.end()
        (end,) = answers.ended
        return end

    def end(self) -> list[PartEvent]:
        """The answer is complete."""
        if not self._is_open:
            return []
        self._is_open = False
        return [PartEvent("done", self.all[-1])]

    def _open(self, part: Part) -> list[PartEvent]:
        events = self.end()
        self.all.append(part)
        self._is_open = True
        return [*events, PartEvent("begun", part)]


class RunningTimings:
    """Counts, and milliseconds since the prompt is evaluated and since the first token."""

    def __init__(self) -> None:
        self._n_cached = 0
        self._n_read = 0
        self._n_drawn = 0
        self._began: float | None = None
        self._first: float | None = None

    def note(self, event: Event) -> None:
        """Something has happened to the text."""
        now = time.perf_counter()
        if self._began is None:
            self._began = now
        if isinstance(event, Reading):
            self._n_cached, self._n_read = event.n_cached, event.n_held - event.n_cached
        elif isinstance(event, Piece):
            if self._first is None:
                self._first = now
            self._n_drawn = event.n_tokens

    @property
    def milliseconds(self) -> float:
        """Since the prompt is evaluated."""
        return 0.0 if self._began is None else 1e3 * (time.perf_counter() - self._began)

    def now(self) -> dict[str, Any]:
        """The object."""
        now = time.perf_counter()
        began = now if self._began is None or not self._n_read else self._began
        first = now if self._first is None else self._first
        n_after = max(0, self._n_drawn - 1)
        prompt_ms, decode_ms = 1e3 * (first - began), 1e3 * (now - first)
        return {
            "cache_n": self._n_cached,
            "prompt_n": self._n_read,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(1, self._n_read),
            "prompt_per_second": 1e3 * self._n_read / prompt_ms if prompt_ms else 0.0,
            "predicted_n": self._n_drawn,
            "predicted_ms": decode_ms,
            "predicted_per_token_ms": decode_ms / max(1, n_after),
            "predicted_per_second": 1e3 * n_after / decode_ms if decode_ms else 0.0,
        }


def openai_usage(ends: Sequence[Ended], n: int | None = None) -> dict[str, Any]:
    """The object `usage` of one answer or of several.

    Args:
        ends: of the answers, those to the same prompt next to each other.
        n: answers to each prompt; None if there is one prompt only.
    """
    firsts = ends[:: n or max(1, len(ends))]
    n_prompt = sum(end.usage.prompt_tokens for end in firsts)
    n_completion = sum(end.usage.completion_tokens for end in ends)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.usage.cached_tokens for end in firsts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(end.usage.reasoning_tokens for end in ends)
        },
    }


def native_timings(end: Ended) -> dict[str, Any]:
    """llama-server's object `timings`; milliseconds."""
    usage, timings = end.usage, end.timings
    n_read = usage.prompt_tokens - usage.cached_tokens
    n_drawn = usage.completion_tokens
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": n_read,
        "prompt_ms": 1e3 * timings.prompt_seconds,
        "prompt_per_token_ms": 1e3 * timings.prompt_seconds / max(1, n_read),
        "prompt_per_second": timings.prompt_per_second,
        "predicted_n": n_drawn,
        "predicted_ms": 1e3 * timings.decode_seconds,
        "predicted_per_token_ms": 1e3 * timings.decode_seconds / max(1, n_drawn),
        "predicted_per_second": timings.decode_per_second,
        **(
            {"draft_n": usage.drafted_tokens, "draft_n_accepted": usage.accepted_tokens}
            if usage.drafted_tokens
            else {}
        ),
    }


def prompt_progress(now: Reading, timings: RunningTimings) -> dict[str, Any]:
    """llama-server's object of how far a prompt is evaluated."""
    return {
        "total": now.n_prompt,
        "cache": now.n_cached,
        "processed": now.n_held,
        "time_ms": timings.milliseconds,
    }
