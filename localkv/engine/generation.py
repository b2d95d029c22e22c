"""One generation: its tokens come from steps, which may serve others as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Literal, Protocol

from localkv.cache.arrays import NO_TOKEN, Array, Arrays, Draw
from localkv.engine.logprobs import Predictions, RankedToken, ranked, ranked_among
from localkv.engine.scheduler import Request
from localkv.engine.speculation.config import Speculation
from localkv.engine.speculation.speculator import Speculator
from localkv.errors import LocalKVError
from localkv.sampling.candidates import Floats, Ints
from localkv.sampling.sampler import Sampler

if TYPE_CHECKING:
    from localkv.structured.constraint import Constraint
from localkv.cache.ladder_pool import Requantised

FinishReason = Literal["stop", "length", "cancelled"]


class Forcing(Protocol):
    """Says which tokens of a generation are not drawn, but must come."""

    def forced(self) -> int | None:
        """The next token, or None if it is drawn."""
        ...

    def accept(self, token: int) -> None:
        """Take note of the next token, drawn or forced."""
        ...

    @property
    def leads_on(self) -> bool:
        """Whether something must follow, so that a token that ends the text may not end it yet."""
        ...

    def lead_on(self) -> None:
        """Have the tokens come that lead to what must follow."""
        ...


class Steps(Protocol):
    """Runs steps for all requests."""

    clock: Callable[[], float]

    def step(self, unless: Callable[[], bool], asked: Generation | None) -> None:
        """Run one, or several, in a turn, unless none is needed any more.

        Args:
            asked: whose token is wanted.
        """
        ...

    def end(self, request: Request) -> None:
        """A request is done; its rows are kept as long as there is room."""
        ...


@dataclass(frozen=True)
class GenerationOptions:
    """What is asked of a generation.

    Attributes:
        sampler: draws the tokens; it accepts the prompt's first.
        max_tokens: most tokens to draw; None goes on to the end of the context.
        stop_ids: tokens that end the generation.
        cancel: set to end it; looked at while other threads have their turn, before every piece of
            the prompt and before every token.
        forcing: may put tokens in place of drawn ones; they count like any other.
        constraint: a grammar's, which allows the tokens; the host draws them. Where it is over the
            generation ends, with "stop".
        logprobs: alternatives that are noted for each token; None notes nothing.
        predictions: keeps what an audit needs of each token's distribution.
        speculation: how tokens are guessed, which changes nothing but the speed.
        priority: requests with a larger one are served first.
        timeout: seconds after which it ends, with "cancelled".
        salt: texts of different salts share no rows of the cache.
        origin: what the salt stands for, as `Text` has it.
        scales: of the model's adapters, in order; None for those that it was loaded with.
        reuses: the prompt's rows that are there already are taken; else all are evaluated.
        ranks_after_samplers: logprobs belong to the distribution that tokens are drawn from, not to
            the model's own.
    """

    sampler: Sampler
    max_tokens: int | None = None
    stop_ids: frozenset[int] = frozenset()
    cancel: Event = field(default_factory=Event)
    forcing: Forcing | None = None
    constraint: Constraint | None = None
    logprobs: int | None = None
    predictions: Predictions | None = None
    speculation: Speculation = field(default_factory=Speculation)
    priority: int = 0
    timeout: float | None = None
    salt: int = 0
    origin: bytes = b""
    scales: tuple[float, ...] | None = None
    reuses: bool = True
    ranks_after_samplers: bool = False


class Generation(Iterator[int]):
    """The token ids of one request, as they are drawn.

    Asking for a token runs steps until it is there. If they serve other requests as well, tokens
    may be there before they are asked for. Nothing is held between two tokens: the engine may do
    other work, and this one goes on as if it had been alone. An exception ends it ("cancelled"),
    and one that nobody refers to any more is gone with the next step of others. One thread at a
    time may ask for tokens.

    Args:
        steps: runs them.
        request: whose text grows with the tokens.
        options: what is asked of it.
        arrays: where logits are.
        draw: draws tokens there; None if the host must.
        n_ctx: tokens of context.
        speculator: guesses tokens, which are evaluated together; whoever runs the steps asks it.
            The text stays the same.

    Attributes:
        stats: counts and seconds so far.
        finish_reason: None while it runs, then "stop" (a stop token, which is not part of the
            ids), "length" (`max_tokens` or the end of the context) or "cancelled".
        context_full: it ended because the context did.
        cancelled: set to end it.
    """

    def __init__(
        self,
        steps: Steps,
        request: Request,
        options: GenerationOptions,
        arrays: Arrays,
        *,
        draw: Draw | None,
        n_ctx: int,
        speculator: Speculator | None,
    ) -> None:
        self.request = request
        self.speculator = speculator
        self.stats = GenerationStats(n_prompt=request.n_prompt)
        self.finish_reason: FinishReason | None = None
        self.context_full = False
        self._steps = steps
        self._sampler = options.sampler
        self._arrays = arrays
        self._draw = draw
        self.cancelled = options.cancel
        self._stop_ids = options.stop_ids
        self._forcing = options.forcing
        self._constraint = options.constraint
        self._n_logprobs = options.logprobs
        self.predictions = options.predictions
        self._ranked = list[RankedToken]()
        self._n_taken = 0
        self._among: tuple[Ints, Floats] | None = None
        self._ranks_after_samplers = options.ranks_after_samplers
        room, max_tokens = n_ctx - request.n_prompt, options.max_tokens
        self._budget = max(0, room if max_tokens is None else min(max_tokens, room))
        self._fills_context = max_tokens is None or room < max_tokens
        self._ready = request.ready
        self._end: FinishReason | None = None if self._budget else "length"
        self._error: Exception | None = None
        self._drawn_at = request.arrived
        self._worked = 0.0

    @property
    def n_ready(self) -> int:
        """Tokens that are there to be asked for."""
        return len(self._ready)

    @property
    def n_drawn(self) -> int:
        """Tokens that were drawn so far, asked for or not."""
        return len(self.request.text.ids) - self.request.n_prompt

    @property
    def room(self) -> int:
        """Tokens that it may still have after the next one."""
        return self._budget - self.n_drawn - 1

    @property
    def device_draw(self) -> Draw | None:
        """Draws tokens where the logits are; None if the host must."""
        return self._draw

    @property
    def seed(self) -> int:
        """The seed of the random numbers that tokens are drawn with."""
        return self._sampler.seed

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
        """Logprobs of the tokens so far, without the ones that were taken."""
        return self._ranked[: self.stats.n_generated - self._n_taken]

    def take_logprobs(self) -> Sequence[RankedToken]:
        """The logprobs so far, which are dropped here."""
        taken = self.logprobs
        self._n_taken += len(taken)
        del self._ranked[: len(taken)]
        return taken

    def __next__(self) -> int:
        if self.finish_reason is not None:
            raise StopIteration
        if not self._ready:
            try:
                while not self._ready and self._end is None:
                    self._steps.step(self.is_served, self)
            except BaseException:
                self.close()
                raise
        elif self.cancelled.is_set():
            self.close()
            raise StopIteration
        if not self._ready:
            self._conclude(self._end or "cancelled")
            if self._error is not None:
                raise self._error
            raise StopIteration
        token, seconds = self._ready.popleft()
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

    def advance(self) -> bool:
        """Run one step if the next token is not there, such as for a piece of a long prompt.

        Returns:
            whether it is there now, or none will be.
        """
        if self.finish_reason is None and not self.is_served():
            try:
                self._steps.step(lambda: True, self)
            except BaseException:
                self.close()
                raise
            if not self.is_served():
                self._worked = self._steps.clock() - self._drawn_at
        return self.finish_reason is not None or self.is_served()

    def is_served(self) -> bool:
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
            for known in ids:
                self._sampler.accept(known)
            if self.speculator is not None:
                self.speculator.begin(ids)
        token = self.forced()
        if token is None:
            token = self._drawn(logits)
            if token in self._stop_ids and self._forcing is not None and self._forcing.leads_on:
                self._forcing.lead_on()
                forced = self.forced()
                token = token if forced is None else forced
        if token not in self._stop_ids:
            if self._n_logprobs is not None:
                self._ranked.append(self._ranked_token(logits, token, self._n_logprobs))
            if self.predictions is not None:
                self.predictions.add(self._arrays.to_numpy(logits), token)
        return self.take(token)

    def forced(self) -> int | None:
        """The next token if it is not drawn, but must come."""
        return None if self._forcing is None else self._forcing.forced()

    def take(self, token: int) -> bool:
        """Take the next token; whether another one follows."""
        if token in self._stop_ids:
            self._end = "stop"
            return False
        ids = self.request.text.ids
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
        self._drawn_at, self._worked = now, 0.0
        if self._constraint is not None and self._constraint.is_over:
            self._end = "stop"
        elif self.n_drawn == self._budget:
            self._end = "length"
        return self._end is None

    def valid(self, drafts: Sequence[int]) -> Sequence[int]:
        """The guesses that may follow, up to the first that a grammar rules out."""
        constraint = self._constraint
        return drafts if constraint is None else drafts[: constraint.n_valid(drafts)]

    def resume(self, now: float) -> None:
        """Count the next token's seconds from now, and the seconds of work on it."""
        self._drawn_at = now - self._worked

    def _ranked_token(self, logits: Array, token: int, n: int) -> RankedToken:
        if not self._ranks_after_samplers:
            return ranked(self._arrays.to_numpy(logits), token, n)
        among, self._among = self._among, None
        if among is None:  # it was put there, and nothing drawn
            return RankedToken(token, 0.0, ((token, 0.0),)[:n])
        return ranked_among(*among, token, n)

    def _drawn(self, logits: Array) -> int:
        if self._draw is None:
            row, constraint = self._arrays.to_numpy(logits), self._constraint
            if constraint is not None:
                leads_on = self._forcing is not None and self._forcing.leads_on
                row = constraint.masked(row, self._stop_ids if leads_on else ())
            if not self._ranks_after_samplers:
                return self._sampler.sample(row)
            token, ids, probabilities = self._sampler.sample_among(row)
            self._among = ids, probabilities
            return token
        random = self._arrays.int64([self.seed, self.n_drawn])
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
        if not self.stats.n_generated:
            self.stats.n_reused, self.stats.n_lost = self.request.n_reused, self.request.n_lost
        self.finish_reason = reason
        self.context_full = reason == "length" and self._fills_context


def checked(token: int) -> int:
    """A token that was drawn on the device.

    Raises:
        LocalKVError: the logits were NaN or infinite.
    """
    if token == NO_TOKEN:
        raise LocalKVError("the model produced NaN or infinite logits")
    return token


@dataclass
class GenerationStats:
    """Counts and seconds of one generation, filled in while it runs.

    `n_prompt` counts the whole prompt. `n_reused` of its tokens were still in the cache. `n_lost`
    more tokens would have been there if layers with a window kept all rows, and recurrent layers
    all states.
    `n_drafted` tokens were guessed and evaluated, in `n_verified` batches; `n_accepted` were right.
    `requantised` counts the pages of the cache whose types changed meanwhile.
    `decode_seconds` covers the tokens after the first: the first comes with the prompt. Waiting for
    other threads is not counted; evaluating rows again because of them is.
    """

    n_prompt: int = 0
    n_reused: int = 0
    n_lost: int = 0
    n_generated: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    n_drafted: int = 0
    n_accepted: int = 0
    n_verified: int = 0
    requantised: Requantised = field(default_factory=Requantised)

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens evaluated (not reused) per second."""
        return _rate(self.n_prompt - self.n_reused, self.prompt_seconds)

    @property
    def decode_per_second(self) -> float:
        """Tokens decoded per second."""
        return _rate(self.n_generated - 1, self.decode_seconds)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0
