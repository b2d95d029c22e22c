"""Evaluates a generated text once more, through an f16 cache of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from localkv.config import CacheConfig
from localkv.engine.audit.comparison import Compared, compare_kept, compare_logits, joined
from localkv.engine.audit.predictions import Predictions
from localkv.engine.engine import Engine
from localkv.engine.token_scores import Logits
from localkv.errors import DoesNotFitError, UsageError
from localkv.model import Transformer

T = TypeVar("T")

_MOST_VALUES = 1 << 23
"""Logits of each cache that are compared at a time."""
_FEW_ROWS = 16
"""Positions that are evaluated at a time at least."""
_BLOCK_VALUES, _BLOCK_ROWS = 1 << 19, 32
"""Logits that are compared with what was kept at a time, few enough for the processor's caches; but
of so many positions, at least, that the output matrix is worth reading."""
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
    """Most tokens that are evaluated at a time where prompts have batches of `n_batch`: more if
    the model is so small that they take some megabytes, unless short ones were asked for."""
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
    """

    def __init__(
        self,
        model: Transformer,
        cache: CacheConfig,
        *,
        n_batch: int,
        check_room: Callable[[CacheConfig], object],
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._model = model
        self._cache = cache
        self._n_batch = n_batch
        self._check_room = check_room
        self._is_cancelled = is_cancelled

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
        self,
        n_tokens: int,
        ids: Sequence[int],
        n_prompt: int,
        first: int,
        following: Sequence[int],
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
        """Compare both caches within windows, of which the second half is scored; each begins with
        the text's first token."""
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
        """What `read` makes of the logits from position `first` on, some at a time (`sizes` are
        those of `Engine.read_logits`)."""
        # batches of one length, as chains of workers are made for each
        n_batches = -(-len(ids) // self._n_batch)
        engine = Engine(self._model, cache, n_batch=-(-len(ids) // n_batches))
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
