"""Tokens and times of an answer, in the words of OpenAI and of llama-server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from localkv.engine_process.texts import Ended, Event, Piece, Reading


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
        "prompt_tokens_details": {
            "cached_tokens": sum(end.usage.cached_tokens for end in firsts),
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(end.usage.reasoning_tokens for end in ends),
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
