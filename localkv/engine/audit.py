"""`Audit`: what a packed cache changed in one answer, which is evaluated again to find out.

`SecondReading` evaluates the text through an f16 cache of its own, and `Compared` sums up how the
distributions differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.engine.logprobs import (
    NOT_FINITE,
    Array,
    Logits,
    Prediction,
    Predictions,
    log_softmax,
    score,
)
from localkv.errors import DoesNotFitError, LocalKVError, UsageError, counted
from localkv.kernels.kept_sums import Kept, KeptSums, kept_sums
from localkv.model import Transformer

FEW_FLIPS = 3
"""Flips that a line names."""
_CLOSE = 0.01
"""Bounds of a divergence that are closer, relative to it, are one number to a reader."""


@dataclass(frozen=True)
class Flip:
    """A token at whose place the two caches have different most likely choices.

    Attributes:
        at: the number of the token in the answer, counted from 1.
        start, end: the characters of the answer that the token at this place became.
        base, base_p: the most likely token with an f16 cache, and its probability there.
        token, p: the most likely token with the packed cache, and its probability there.
    """

    at: int
    start: int
    end: int
    base: str
    base_p: float
    token: str
    p: float

    def __str__(self) -> str:
        return f"token {self.at}: {self.base!r} {self.base_p:.2f} -> {self.token!r} {self.p:.2f}"


@dataclass(frozen=True)
class Audit:
    """What a packed cache changed in one answer.

    Divergences are Kullback-Leibler's, of the distribution with an f16 cache, in nats. Where only
    the most probable tokens were kept, those are the least that they can be.

    Attributes:
        n_tokens: of the answer.
        types: of K and of V, as "q8_0/q4_0".
        kld_mean, kld_mean_most: over all tokens, and the most that it can be.
        kld_max, kld_max_most: the largest, and the most that any can be.
        kld_max_at: the number of the token that has it.
        flips: the tokens with other most likely choices, in order.
        ppl, ppl_base: perplexity of the answer with the packed and with the f16 cache.
        window: tokens of context that each prediction had at most, as there was no memory for an
            f16 cache of all; None for the whole text.
        is_exact: nothing was left out of the divergences.
        seconds: that it took.
    """

    n_tokens: int
    types: str
    kld_mean: float
    kld_mean_most: float
    kld_max: float
    kld_max_most: float
    kld_max_at: int
    flips: tuple[Flip, ...]
    ppl: float
    ppl_base: float
    window: int | None
    is_exact: bool
    seconds: float

    def line(self) -> str:
        """All of it in one line, with the first flips."""
        parts = [
            f"{len(self.flips)} of {counted(self.n_tokens, 'token')} with another most likely "
            f"choice than f16's{self._first_flips()}",
            f"KLD mean {_between(self.kld_mean, self.kld_mean_most)}, "
            f"max {_between(self.kld_max, self.kld_max_most)} at token {self.kld_max_at}",
            f"PPL {self.ppl:.4f} with {self.types}, {self.ppl_base:.4f} with f16",
        ]
        if self.window is not None:
            parts.append(
                f"in windows of {self.window:,} tokens, as an f16 cache of all does not fit"
            )
        return "; ".join(parts)

    def _first_flips(self) -> str:
        if not self.flips:
            return ""
        named = ", ".join(str(flip) for flip in self.flips[:FEW_FLIPS])
        more = len(self.flips) - FEW_FLIPS
        return f" ({named}{f' and {more} more' if more > 0 else ''})"


def _between(least: float, most: float) -> str:
    """A number that is known between bounds."""
    if most - least <= _CLOSE * least:
        return f"{least:.3g}"
    return f"{least:.3g} (at most {most:.3g})"


def audit_of(
    reading: Reading,
    *,
    types: str,
    is_exact: bool,
    seconds: float,
    places: Sequence[tuple[int, int]],
    token_text: Callable[[int], str],
) -> Audit:
    """The figures of a second reading.

    Args:
        places: of each token, the characters of the answer that it became.
        token_text: of an id.
    """
    found = reading.compared
    flips = tuple(
        Flip(
            at + 1,
            *places[at],
            token_text(int(found.best_base[at])),
            float(found.p_best_base[at]),
            token_text(int(found.best[at])),
            float(found.p_best[at]),
        )
        for at in np.flatnonzero(found.best != found.best_base).tolist()
    )
    return Audit(
        n_tokens=len(found.kld),
        types=types,
        kld_mean=float(found.kld.mean()),
        kld_mean_most=float(found.kld_most.mean()),
        kld_max=float(found.kld.max()),
        kld_max_most=float(found.kld_most.max()),
        kld_max_at=int(found.kld.argmax()) + 1,
        flips=flips,
        ppl=math.exp(found.nll.mean()),
        ppl_base=math.exp(found.nll_base.mean()),
        window=reading.window,
        is_exact=is_exact,
        seconds=seconds,
    )


T = TypeVar("T")

_MOST_VALUES = 1 << 23
"""Logits of each cache that are compared at a time."""
_FEW_ROWS = 16
"""Positions that are evaluated at a time at least."""
_BLOCK_VALUES, _BLOCK_ROWS = 1 << 19, 32
"""Logits that are compared at a time with kept predictions, and the fewest positions of a block.
The logits fit in the processor's caches. The positions are enough to make reading the output matrix
worth it."""
_SHORT_BATCH, _BATCH_VALUES = 512, 1 << 18
"""Tokens of a batch from which on it may be longer, and hidden values of one at least. Where a
model is small, what Python prepares of a batch takes as long as a layer."""
LEAST_WINDOW = 256
"""Tokens of a window: fewer say nothing of a longer text."""


@dataclass(frozen=True)
class Reading:
    """What came of it.

    Attributes:
        compared: the prediction of each generated token, by both caches.
        window: tokens that each prediction saw at most, if not the whole text; else None.
    """

    compared: Compared
    window: int | None


class CancelledReadingError(Exception):
    """Somebody ended it."""


def check_kept(cache: CacheConfig, kept: bool) -> None:
    """Refuse an audit for which a cache with a budget would have to be filled again.

    Args:
        kept: the predictions are kept as they are made.

    Raises:
        UsageError: says what to ask for instead.
    """
    if cache.kv_budget is not None and not kept:
        raise UsageError(
            "a cache with a budget changes the types of its pages as it fills, so an audit needs "
            "what it predicted meanwhile",
            hint="ask for it before: --audit, or audit=True; not exact",
        )


def long_batch(n_batch: int, n_embd: int) -> int:
    """Most tokens that are evaluated at a time where prompts have batches of `n_batch`.

    It is more than `n_batch` if the model is so small that more tokens take some megabytes, unless
    short batches were asked for.
    """
    return n_batch if n_batch < _SHORT_BATCH else max(n_batch, _BATCH_VALUES // n_embd)


class SecondReading:
    """Compares what a cache predicted with an f16 one, teacher-forced.

    Prompt tokens are evaluated as a prompt's and the others as generated ones, so that on a CPU the
    two differ in nothing but the cache.

    Args:
        model: weights on a backend.
        cache: the one that the text was generated with.
        n_batch: most tokens evaluated at a time.
        check_room: raises DoesNotFitError for a further cache that memory has no room for.
        is_cancelled: looked at before each batch.
        scales: of adapters, of the text; None for those that the model was loaded with.
    """

    def __init__(
        self,
        model: Transformer,
        cache: CacheConfig,
        *,
        n_batch: int,
        check_room: Callable[[CacheConfig], object],
        is_cancelled: Callable[[], bool] = lambda: False,
        scales: tuple[float, ...] | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._n_batch = n_batch
        self._check_room = check_room
        self._is_cancelled = is_cancelled
        self._scales = model.scales if scales is None else scales

    def compare(
        self, ids: Sequence[int], n_prompt: int, predictions: Predictions | None
    ) -> Reading:
        """Compare all predictions of generated tokens.

        Args:
            ids: prompt and generated tokens, one of these at least.
            n_prompt: tokens of the prompt.
            predictions: what was kept of them as they were made; None evaluates the text through
                the packed cache again.

        Raises:
            DoesNotFitError: memory has no room for a window of `LEAST_WINDOW` tokens.
            UsageError: nothing was kept, and the cache has a budget.
            CancelledReadingError: it was ended.
        """
        check_kept(self._cache, predictions is not None)
        try:
            self._check(len(ids), packed=predictions is None)
        except DoesNotFitError:
            if self._cache.kv_budget is not None:
                raise
            return self._in_windows(ids, n_prompt)
        if predictions is None:
            parts = self._both(len(ids), ids[:-1], n_prompt, n_prompt - 1, ids[n_prompt:])
        else:
            parts = self._with_kept(ids, n_prompt, predictions)
        return Reading(joined(list(parts)), None)

    def _with_kept(
        self, ids: Sequence[int], n_prompt: int, predictions: Predictions
    ) -> Iterator[Compared]:
        """Compare with what was kept of the generated tokens.

        Logits are compared where they are, in the turn in which they are computed: a copy would
        take as long as to compare them.
        """
        at = 0

        def read(logits: Logits) -> Compared:
            nonlocal at
            kept = predictions[at : at + len(logits)]
            at += len(logits)
            return compare_kept(logits, kept, self._model.backend.kept_sums)

        n_read = max(_BLOCK_ROWS, _BLOCK_VALUES // self._model.config.n_vocab)
        base = self._base(len(ids))
        return self._read(base, ids[:-1], n_prompt, n_prompt - 1, read, n_read=n_read)

    def _both(
        self, n_tokens: int, ids: Sequence[int], n_prompt: int, first: int, following: Sequence[int]
    ) -> Iterator[Compared]:
        """Compare both caches, with room for `n_tokens`, in the positions from `first` on;
        `following` are the tokens after each of them."""
        n_rows = max(_FEW_ROWS, _MOST_VALUES // self._model.config.n_vocab)
        packed, base = (
            self._read(cache(n_tokens), ids, n_prompt, first, np.array, n_rows=n_rows)
            for cache in (self._packed, self._base)
        )
        at = 0
        for ours, theirs in zip(packed, base, strict=True):
            yield compare_logits(theirs, ours, following[at : at + len(ours)])
            at += len(ours)

    def _in_windows(self, ids: Sequence[int], n_prompt: int) -> Reading:
        """Compare both caches within windows, and score the second half of each window.

        Each window begins with the text's first token. A window is as long as memory has room for:
        half of the text, or a quarter, and so on.

        Raises:
            DoesNotFitError: memory has no room for a window of `LEAST_WINDOW` tokens.
        """
        window = len(ids)
        while True:
            window //= 2
            try:
                self._check(window, packed=True)
                break
            except DoesNotFitError:
                if window // 2 < LEAST_WINDOW:
                    raise
        parts = list[Compared]()
        for at in range(n_prompt, len(ids), window // 2):
            end = min(at + window // 2, len(ids))
            start = max(0, end - window)
            text = [ids[0], *ids[start + 1 : end - 1]]
            places = (max(1, n_prompt - start), at - 1 - start)
            parts += self._both(window, text, *places, ids[at:end])
        return Reading(joined(parts), window)

    def _check(self, n_tokens: int, *, packed: bool) -> None:
        self._check_room(self._base(n_tokens))
        if packed:
            self._check_room(self._packed(n_tokens))

    def _base(self, n_tokens: int) -> CacheConfig:
        # the length of the context may change RoPE
        return CacheConfig(
            n_ctx=self._cache.n_ctx, n_tokens=n_tokens, kv_rotation="off", ctx_checkpoints=0
        )

    def _packed(self, n_tokens: int) -> CacheConfig:
        return replace(self._cache, n_sequences=1, n_tokens=n_tokens, ctx_checkpoints=0)

    def _read(
        self,
        cache: CacheConfig,
        ids: Sequence[int],
        n_prompt: int,
        first: int,
        read: Callable[[Logits], T],
        **sizes: int,
    ) -> Iterator[T]:
        """Yield what `read` makes of the logits from position `first` on, a part at a time.

        Args:
            sizes: `n_rows` and `n_read`, as `Engine.read_logits` takes them.

        Raises:
            CancelledReadingError: it was ended.
        """
        # batches of one length, as chains of workers are made for each
        n_batches = -(-len(ids) // self._n_batch)
        engine = Engine(self._model, cache, n_batch=-(-len(ids) // n_batches))
        engine.cache.scales = self._scales
        to_numpy = self._model.backend.arrays.to_numpy
        parts = engine.read_logits(
            ids, lambda part: read(to_numpy(part)), first=first, n_prompt=n_prompt, **sizes
        )
        while not self._is_cancelled():
            part = next(parts, None)
            if part is None:
                return
            yield part
        raise CancelledReadingError


@dataclass(frozen=True)
class Compared:
    """Each token's prediction by two caches: arrays of [tokens]; logarithms are natural.

    The divergence measures how far p, the packed cache's distribution, is from the base's:
    Σ p_base · ln(p_base / p), in nats.

    Attributes:
        nll, nll_base: -ln of the probability of the token that came.
        kld: the divergence, or the least that it can be.
        kld_most: the most that it can be. It equals `kld` if both distributions are known.
        best, best_base: ids of the most probable tokens.
        p_best, p_best_base: their probabilities, each by its own cache.
    """

    nll: Array
    nll_base: Array
    kld: Array
    kld_most: Array
    best: NDArray[np.int64]
    best_base: NDArray[np.int64]
    p_best: Array
    p_best_base: Array


def compare_kept(
    base_logits: Logits,
    kept: Sequence[Prediction],
    sums_of: Callable[[Logits, Kept], KeptSums] = kept_sums,
) -> Compared:
    """Compare with what was kept of predictions.

    Of the tokens that were not kept only their probability together is known, and the least of any.
    Taking them as one gives the least divergence (the log sum inequality; Cover and Thomas,
    Elements of Information Theory, 2.7), giving each the least probability the most.

    Args:
        base_logits: float32 [tokens, n_vocab].
        kept: of the same tokens, one at least.
        sums_of: a backend's `kept_sums`.

    Raises:
        LocalKVError: a logit is infinite or not a number.
    """
    tokens, drawn_logs, best, ids, shifted, *logs = zip(*kept, strict=True)
    log_totals, tails, least_logs = (np.array(column) for column in logs)
    starts = np.cumsum([0, *map(len, ids)])
    sums = sums_of(base_logits, Kept(np.concatenate(ids), np.concatenate(shifted), starts))
    with np.errstate(invalid="ignore"):
        total = sums.kept + sums.rest
        log_total, mass = np.log(total), sums.rest / total
        further = log_total - log_totals
        sum_kept = (sums.kept_apart - further * sums.kept) / total
        together = np.maximum(tails, least_logs)
        log_mass = np.log(mass, out=np.zeros_like(mass), where=mass > 0)
        least = sum_kept + mass * (log_mass - together)
        of_rest = sums.rest_logs / total - mass * log_total
        most = sum_kept + of_rest - mass * least_logs
    if not np.isfinite(most).all():  # 0 times an infinite logit is no number, either
        raise LocalKVError(NOT_FINITE)
    drawn = base_logits[np.arange(len(kept)), tokens]
    return Compared(
        nll=-np.array(drawn_logs),
        nll_base=log_total - (drawn - sums.largest),
        kld=least.clip(0),
        kld_most=np.maximum(least, most).clip(0),
        best=np.array(best),
        best_base=sums.best,
        p_best=np.exp(-log_totals),
        p_best_base=1 / total,
    )


def compare_logits(base_logits: Logits, logits: Logits, tokens: Sequence[int]) -> Compared:
    """Compare predictions that are known in full.

    Args:
        base_logits, logits: float32 [tokens, n_vocab].
        tokens: those that came.
    """
    scores = score(logits, np.array(tokens), base_logits)
    best, best_base = logits.argmax(1), base_logits.argmax(1)
    each = np.arange(len(best))
    return Compared(
        nll=scores.nll,
        nll_base=scores.nll_base,
        kld=scores.kld,
        kld_most=scores.kld,
        best=best,
        best_base=best_base,
        p_best=np.exp(log_softmax(logits)[each, best]),
        p_best_base=np.exp(log_softmax(base_logits)[each, best_base]),
    )


def joined(parts: Sequence[Compared]) -> Compared:
    """Several stretches of tokens as one."""
    arrays = zip(*(vars(part).values() for part in parts), strict=True)
    return Compared(*map(np.concatenate, arrays))
