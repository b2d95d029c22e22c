"""One generation beside others: its tokens come from steps that serve all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from localkv.cache.arrays import Array, Arrays, Draw
from localkv.engine.audit.predictions import Predictions
from localkv.engine.generation import FinishReason, Forcing, GenerationStats, checked
from localkv.engine.logprobs import RankedToken, ranked, ranked_among
from localkv.engine.requests.request import Request
from localkv.engine.speculation.speculator import Speculator
from localkv.sampling.candidates import Floats, Ints
from localkv.sampling.sampler import Sampler

if TYPE_CHECKING:
    from localkv.structured.constraint import Constraint


class Steps(Protocol):
    """Runs steps for all requests."""

    clock: Callable[[], float]

    def step(self, unless: Callable[[], bool]) -> None: ...

    def end(self, request: Request) -> None: ...


class BatchedGeneration(Iterator[int]):
    """The token ids of one request, as they are drawn. What it has is what `Generation` has.

    Asking for a token runs steps until it is there, which serve the other requests as well; so
    tokens may be there before they are asked for.

    Args:
        steps: runs them.
        request: whose text grows with the tokens.
        arrays: where logits are.
        draw: draws tokens there; None if the host must.
        predictions: keeps what an audit needs of each token's distribution.
        speculator: guesses tokens; whoever runs the steps asks it.

    Attributes:
        ranks_after_samplers: logprobs are those of the distribution that tokens are drawn from, not
            the model's own; to be set before the first token.
    """

    def __init__(
        self,
        steps: Steps,
        request: Request,
        sampler: Sampler,
        arrays: Arrays,
        draw: Draw | None,
        *,
        n_ctx: int,
        max_tokens: int | None,
        stop_ids: frozenset[int],
        forcing: Forcing | None,
        constraint: Constraint | None,
        logprobs: int | None,
        predictions: Predictions | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.request = request
        self.speculator = speculator
        self.stats = GenerationStats(n_prompt=request.n_prompt)
        self.finish_reason: FinishReason | None = None
        self.context_full = False
        self._steps = steps
        self._sampler = sampler
        self._arrays = arrays
        self._draw = draw
        self._stop_ids = stop_ids
        self._forcing = forcing
        self._constraint = constraint
        self._n_logprobs = logprobs
        self.predictions = predictions
        self._ranked = list[RankedToken]()
        self._among: tuple[Ints, Floats] | None = None
        self.ranks_after_samplers = False
        room = n_ctx - request.n_prompt
        self._budget = max(0, room if max_tokens is None else min(max_tokens, room))
        self._fills_context = max_tokens is None or room < max_tokens
        self._ready = deque[tuple[int, float]]()
        self._end: FinishReason | None = None if self._budget else "length"
        self._error: Exception | None = None
        self._drawn_at = request.arrived

    @property
    def n_ready(self) -> int:
        """Tokens that are there to be asked for."""
        return len(self._ready)

    @property
    def room(self) -> int:
        """Tokens that it may still have besides the next one."""
        return self._budget - (len(self.request.text.ids) - self.request.n_prompt) - 1

    @property
    def has_ended(self) -> bool:
        """Whether no further token will be drawn."""
        return self._end is not None

    @property
    def ids(self) -> list[int]:
        """The prompt, and the tokens so far."""
        return self.request.text.ids[: self.stats.n_prompt + self.stats.n_generated]

    @property
    def logprobs(self) -> Sequence[RankedToken]:
        """Of the tokens so far, if they were asked for."""
        return self._ranked[: self.stats.n_generated]

    def __next__(self) -> int:
        if self.finish_reason is not None:
            raise StopIteration
        try:
            while not self._is_served():
                self._steps.step(unless=self._is_served)
        except BaseException:
            self.close()
            raise
        if not self._ready:
            self._conclude(self._end or "cancelled")
            if self._error is not None:
                raise self._error
            raise StopIteration
        token, seconds = self._ready.popleft()
        self.request.n_unread -= 1
        stats = self.stats
        if stats.n_generated:
            stats.decode_seconds += seconds
        else:
            stats.prompt_seconds = seconds
            stats.n_reused, stats.n_lost = self.request.n_reused, self.request.n_lost
        stats.n_generated += 1
        if stats.n_generated == self._budget:
            self._conclude(self._end or "length")
        return token

    def _is_served(self) -> bool:
        """Whether there is a token, or none will be."""
        return bool(self._ready) or self._end is not None

    def draw_verified(self, rows: Sequence[Array], drafts: Sequence[int]) -> int:
        """Take the next token, and one more for each guess that was right; how many were.

        Args:
            rows: logits after the last token, and after each guess.

        Raises:
            LocalKVError: as `draw`.
        """
        ids, n_right, goes_on = self.request.text.ids, 0, True
        if drafts:
            self.stats.n_drafted += len(drafts)
            self.stats.n_verified += 1
        for row, draft in zip(rows, [*drafts, None], strict=True):
            goes_on = self.draw(row)
            if draft is None or self._end == "stop" or ids[-1] != draft:
                break
            n_right += 1
            self.stats.n_accepted += 1
            if self.speculator is not None:
                self.speculator.pace.saved()
            if not goes_on:
                break
        return n_right

    def draw(self, logits: Array) -> bool:
        """Take the next token, drawn from the logits after the last; whether another one follows.

        Args:
            logits: float32 [n_vocab], where the backend has them.

        Raises:
            LocalKVError: logits are NaN, or all of them -inf.
        """
        ids = self.request.text.ids
        if len(ids) == self.request.n_prompt:
            for token in ids:
                self._sampler.accept(token)
            if self.speculator is not None:
                self.speculator.begin(ids)
        forced = None if self._forcing is None else self._forcing.forced()
        token = self._drawn(logits) if forced is None else forced
        if token in self._stop_ids:
            self._end = "stop"
            return False
        if self._n_logprobs is not None:
            self._ranked.append(self._ranked_token(logits, token, self._n_logprobs))
        if self.predictions is not None:
            self.predictions.add(self._arrays.to_numpy(logits), token)
        self._sampler.accept(token)
        if self._forcing is not None:
            self._forcing.accept(token)
        if self._constraint is not None:
            self._constraint.accept(token)
        if self.speculator is not None:
            self.speculator.accept(token)
        ids.append(token)
        now = self._steps.clock()
        self._ready.append((token, now - self._drawn_at))
        self.request.n_unread += 1
        self._drawn_at = now
        if self._constraint is not None and self._constraint.is_over:
            self._end = "stop"
        elif len(ids) - self.request.n_prompt == self._budget:
            self._end = "length"
        return self._end is None

    def _ranked_token(self, logits: Array, token: int, n: int) -> RankedToken:
        if not self.ranks_after_samplers:
            return ranked(self._arrays.to_numpy(logits), token, n)
        among, self._among = self._among, None
        if among is None:  # it was put there, and nothing drawn
            return RankedToken(token, 0.0, ((token, 0.0),)[:n])
        return ranked_among(*among, token, n)

    def _drawn(self, logits: Array) -> int:
        if self._draw is None:
            row, constraint = self._arrays.to_numpy(logits), self._constraint
            row = row if constraint is None else constraint.masked(row)
            if not self.ranks_after_samplers:
                return self._sampler.sample(row)
            token, ids, probabilities = self._sampler.sample_among(row)
            self._among = ids, probabilities
            return token
        number = len(self.request.text.ids) - self.request.n_prompt
        random = self._arrays.int64([self._sampler.seed, number])
        return checked(int(self._draw(logits[None], random)))

    def cancel(self) -> None:
        """Yield no further token."""
        self._ready.clear()
        self._end = "cancelled"

    def fail(self, error: Exception) -> None:
        """Raise an error once the tokens before it are used up."""
        self._end, self._error = "cancelled", error

    def close(self) -> None:
        """End it, as `cancel` does."""
        if self.finish_reason is None:
            self.cancel()
            self._conclude("cancelled")
            self._steps.end(self.request)

    def _conclude(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.context_full = reason == "length" and self._fills_context
