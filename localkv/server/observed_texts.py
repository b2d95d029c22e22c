"""What the texts of a request say of the server's speed, and how they end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from localkv.server.request_record import RequestRecord
from localkv.server.wire import Ended, Event, Piece, Reading

if TYPE_CHECKING:
    from localkv.server.metrics import Metrics


class ObservedTexts:
    """Counts the tokens of texts that were submitted together.

    Args:
        metrics: are told.
        record: of the request.
        n_prompts: tokens of each one's prompt, by its number.
    """

    def __init__(
        self, metrics: Metrics, record: RequestRecord | None, n_prompts: Mapping[int, int]
    ) -> None:
        self._metrics = metrics
        self._record = record or RequestRecord("", "", "")
        self._n_prompts = n_prompts
        self._began = time.perf_counter()
        self._last = dict[int, float]()
        self._n_drawn = dict[int, int]()
        self._n_cached = dict[int, int]()

    def take(self, event: Event) -> None:
        """Something has happened to one of them."""
        if isinstance(event, Reading):
            self._n_cached[event.id] = event.n_cached
        elif isinstance(event, Piece):
            self._drawn(event.id, event.n_tokens)
        elif isinstance(event, Ended):
            self._ended(event)

    def _drawn(self, id: int, n_tokens: int) -> None:
        now, before = time.perf_counter(), self._n_drawn.get(id, 0)
        if n_tokens <= before:
            return
        if id not in self._last:
            self._metrics.first_token.observe(now - self._began)
        else:
            pause = (now - self._last[id]) / (n_tokens - before)
            for _ in range(n_tokens - before):
                self._metrics.next_token.observe(pause)
        self._last[id], self._n_drawn[id] = now, n_tokens
        self._metrics.generated.inc(n_tokens - before)
        self._record.n_generated += n_tokens - before

    def _ended(self, event: Ended) -> None:
        usage, metrics = event.usage, self._metrics
        rest = usage.completion_tokens - self._n_drawn.pop(event.id, 0)
        metrics.generated.inc(max(0, rest))
        self._record.n_generated += max(0, rest)
        self._prompt(event.id, usage.cached_tokens)
        metrics.longest = max(metrics.longest, usage.total_tokens)
        metrics.drafted.inc(usage.drafted_tokens)
        metrics.accepted.inc(usage.accepted_tokens)
        metrics.verified.inc(usage.verified_batches)
        metrics.prompt_seconds.inc(event.timings.prompt_seconds)
        metrics.decode_seconds.inc(event.timings.decode_seconds)
        metrics.request_seconds.observe(time.perf_counter() - self._began)
        metrics.ended.labels("error" if event.error else event.finish_reason).inc()

    def _prompt(self, id: int, n_cached: int) -> None:
        self._n_cached.pop(id, None)
        n_prompt = self._n_prompts[id]
        self._metrics.prefix_asked.inc(n_prompt)
        self._metrics.prefix_hit.inc(n_cached)
        self._metrics.prompt.inc(n_prompt - n_cached)
        self._record.n_prompt += n_prompt
        self._record.n_cached += n_cached

    def broke_off(self, ids: set[int], why: str) -> None:
        """Some end before they are complete: "disconnected", "timeout" or "engine"."""
        for id in ids:
            if id in self._n_cached or id in self._n_drawn:
                self._prompt(id, self._n_cached.get(id, 0))
            self._metrics.ended.labels(why).inc()
            self._record.ended = why
