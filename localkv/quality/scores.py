"""How well a model predicts each token of a text through its cache, and through an f16 one.

The procedure is that of llama.cpp's `llama-perplexity` (`tools/perplexity/perplexity.cpp`). Scores
come from logits that were computed as generation computes them: attention reads the rows that the
cache stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.engine.token_scores import Array, Logits, TokenScores, score
from localkv.model import Transformer
from localkv.quality.base_file import BaseFile, BaseWriter
from localkv.quality.chunks import first_scored, n_scored
from localkv.quality.exact_prefill import ExactPrefillCache

_BLOCK_VALUES = 1 << 22
"""Logits that are turned into float64 at a time."""


def score_chunks(
    model: Transformer,
    chunks: Sequence[Sequence[int]],
    caches: Sequence[CacheConfig],
    *,
    base: CacheConfig | BaseFile | None = None,
    save_base: BaseWriter | None = None,
    n_batch: int = 512,
    prefill_exact: bool = False,
) -> Iterator[list[TokenScores]]:
    """The scores of each chunk with each cache. The weights are shared, and caches come and go.

    Args:
        model: weights on a backend.
        chunks: token ids; each is a sequence of its own.
        caches: the caches to measure.
        base: the cache to compare them with, evaluated once per chunk, or its logits in a file.
        save_base: takes the base's logits.
        n_batch: most tokens evaluated at a time.
        prefill_exact: the tokens of a batch see each other's K and V unrounded, and only those of
            earlier batches through the cache, as if it were packed afterwards. Not the base's.
    """
    for number, chunk in enumerate(chunks):
        base_logits = None
        if isinstance(base, BaseFile):
            base_logits = base.logits(number)
        elif base is not None:
            base_logits = np.empty((n_scored(len(chunk)), model.config.n_vocab), np.float32)
            at = 0
            for part in _logits(model, chunk, base, n_batch):
                base_logits[at : at + len(part)] = part
                at += len(part)
        if save_base is not None and base_logits is not None:
            save_base.write(base_logits)
        scores = []
        for cache in caches:
            batches: Iterable[Logits]
            if base_logits is not None and cache == base and not prefill_exact:
                batches = [base_logits]
            else:
                batches = _logits(model, chunk, cache, n_batch, prefill_exact)
            scores.append(_score(model, chunk, batches, base_logits))
        yield scores


def _logits(
    model: Transformer,
    chunk: Sequence[int],
    cache: CacheConfig,
    n_batch: int,
    prefill_exact: bool = False,
) -> Iterator[Logits]:
    """Logits that predict the scored tokens, batch by batch: float32 [<= n_batch, n_vocab]."""
    ids = chunk[:-1]  # the last token is not evaluated: no token follows that it could predict
    first, to_numpy = first_scored(len(chunk)), model.backend.arrays.to_numpy
    if not prefill_exact:
        engine = Engine(model, cache, n_batch=n_batch)
        yield from map(to_numpy, engine.logit_batches(ids, first=first))
        return
    # here a batch's bounds matter, so it is as long as it is when a prompt is evaluated
    engine = Engine(model, cache, n_batch=n_batch, make_cache=ExactPrefillCache)
    at = 0
    for batch in map(to_numpy, engine.logit_batches(ids)):
        if at + len(batch) > first:
            yield batch[max(0, first - at) :]
        at += len(batch)


def _score(
    model: Transformer,
    chunk: Sequence[int],
    batches: Iterable[Logits],
    base_logits: Logits | None,
) -> TokenScores:
    targets = np.array(chunk[first_scored(len(chunk)) + 1 :])
    n_rows = max(1, _BLOCK_VALUES // model.config.n_vocab)
    parts, at = [], 0
    for batch in batches:
        for start in range(0, len(batch), n_rows):
            logits = batch[start : start + n_rows]
            rows = slice(at, at + len(logits))
            base = None if base_logits is None else base_logits[rows]
            parts.append(score(logits, targets[rows], base))
            at += len(logits)
    return joined(parts)


def joined(parts: Sequence[TokenScores]) -> TokenScores:
    """The scores of several chunks as one."""

    def field(of: Callable[[TokenScores], Array]) -> Array:
        return np.concatenate([of(part) for part in parts])

    return TokenScores(
        field(lambda s: s.nll),
        field(lambda s: s.nll_base),
        field(lambda s: s.kld),
        field(lambda s: s.same_top),
    )


def base_cache(n_ctx: int) -> CacheConfig:
    """The cache that others are compared with: f16 for K and V, not rotated."""
    return CacheConfig("f16", "f16", n_ctx=n_ctx, kv_rotation="off")
