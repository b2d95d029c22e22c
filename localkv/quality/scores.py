"""How well a model predicts each token of a text through its cache, and through an f16 one.

The procedure follows llama.cpp's `llama-perplexity` (`tools/perplexity/perplexity.cpp`). A text is
cut in chunks of one context. Logits are computed as generation computes them: attention reads the
rows that the cache stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import numpy as np

from localkv.cache.arrays import Batch, LayerCache, SegmentBatch, Wanted
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import GroupLayout, SegmentSpec
from localkv.cache.pages import Sequence as CachedSequence
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.engine.logprobs import Array, Logits, TokenScores, score
from localkv.errors import UsageError, counted
from localkv.model import Transformer
from localkv.quality.base_file import BaseFile, BaseWriter

MIN_CONTEXT = 8
"""Tokens of a chunk below which too few are scored for an error to be estimated."""


def text_chunks(
    ids: Sequence[int], n_ctx: int, *, bos_id: int | None = None, limit: int | None = None
) -> list[list[int]]:
    """A text's token ids in chunks of `n_ctx`; the remainder at the end is not used.

    Args:
        ids: the text.
        n_ctx: tokens of a chunk.
        bos_id: takes the place of each chunk's first token; None for a model without BOS.
        limit: most chunks.

    Raises:
        UsageError: the text, or a chunk, is too short.
    """
    if n_ctx < MIN_CONTEXT:
        raise UsageError(
            f"a context of {n_ctx} tokens is too short to measure with",
            hint=f"use at least {MIN_CONTEXT} (-c)",
        )
    if len(ids) < n_ctx:
        hint = "use a longer text"
        if len(ids) >= MIN_CONTEXT:
            hint += f", or a context of at most {len(ids)} (-c)"
        raise UsageError(
            f"the text has {counted(len(ids), 'token')}, but a context of {n_ctx} needs at least "
            f"{n_ctx}",
            hint=hint,
        )
    chunks = [list(ids[at : at + n_ctx]) for at in range(0, len(ids) - n_ctx + 1, n_ctx)][:limit]
    if bos_id is not None:
        for chunk in chunks:
            chunk[0] = bos_id
    return chunks


def first_scored(n_ctx: int) -> int:
    """The first position whose prediction counts: those before it have too little context."""
    return n_ctx // 2


def n_scored(n_ctx: int) -> int:
    """Number of a chunk's tokens that are scored: those from `first_scored` on."""
    return n_ctx - 1 - first_scored(n_ctx)


def calibration_text() -> str:
    """Some 1,500 words."""
    return resources.files("localkv.quality").joinpath("calibration.txt").read_text("utf-8").strip()


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
        prefill_exact: the tokens of a batch see each other's K and V unrounded. Only earlier
            batches are read through the cache, as if a batch were packed afterwards. This doesn't
            change the base.
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
            scores.append(score_chunk(chunk, batches, base_logits))
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


def score_chunk(
    chunk: Sequence[int], batches: Iterable[Logits], base_logits: Logits | None = None
) -> TokenScores:
    """The scores of a chunk.

    Args:
        batches: logits that predict the scored tokens, float32 [any number, n_vocab].
        base_logits: what they are compared with, [scored tokens, n_vocab].
    """
    targets = np.array(chunk[first_scored(len(chunk)) + 1 :])
    parts, at = [], 0
    for batch in batches:
        n_rows = max(1, _BLOCK_VALUES // batch.shape[-1])
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


class ExactPrefillCache(KVCache):
    """A `KVCache` of one sequence whose layers have one more segment: the batch's own rows, in f32.

    The other segments store the batch's rows as ever, but show attention only those before.

    Args:
        n_batch: most tokens of a batch.
        layouts, options: the arguments of `KVCache`.
    """

    def __init__(self, layouts: Sequence[GroupLayout], *, n_batch: int, **options: Any) -> None:
        super().__init__(layouts, n_batch=n_batch, **options)
        plain = [replace(layout, segments=(SegmentSpec("f32", "f32"),)) for layout in layouts]
        self._own = KVCache(plain, **(options | {"n_ctx": min(n_batch, self.n_ctx)}))
        self._own_sequence = self._own.new_sequence()  # stays empty: each batch starts at row 0
        self._blocks = dict[tuple[int, int, int], int]()
        n_parts = 0
        for i, (layer, own) in enumerate(zip(self.layers, self._own.layers, strict=True)):
            block = layer.part, len(layer.segments), own.part
            if block not in self._blocks:
                self._blocks[block] = n_parts
                n_parts += len(layer.segments) + 1
            segments = (*layer.segments, *own.segments)
            self.layers[i] = LayerCache(segments, self._blocks[block], layer.state)

    def batch(
        self,
        parts: Sequence[tuple[CachedSequence, Sequence[int]]],
        *,
        logits: Wanted | Sequence[Wanted] = "last",
        generated: bool | Sequence[bool] = False,
    ) -> Batch:
        """See `KVCache.batch`; `parts` is one sequence."""
        ((sequence, ids),) = parts
        batch = super().batch(parts, logits=logits, generated=generated)
        own = self._own.batch([(self._own_sequence, ids)])
        segments = list[SegmentBatch]()
        for first, n_segments, own_part in self._blocks:
            for i in range(first, first + n_segments):
                part, rows = self.parts[i], batch.segments[i]
                length = max(0, min(sequence.length, part.end) - part.first)
                segments.append(replace(rows, lengths=(min(length, *rows.lengths),)))
            segments.append(replace(own.segments[own_part], first_position=sequence.length))
        return replace(batch, segments=tuple(segments))


KLD_PERCENTILES = (100, 99.9, 99, 95, 90, 50, 10, 5, 1, 0.1, 0)
DELTA_P_PERCENTILES = (100, 99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1, 0)
"""llama-perplexity prints these percentiles: 100 is the maximum, 50 the median, 0 the minimum."""


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Divergence:
    """How far a cache's predictions are from the base's.

    Δp is the change of the probability of the token that came: p - p_base, between -1 and 1.

    Attributes:
        ppl_base: perplexity with the base cache.
        log_ppl_ratio, ppl_ratio, ppl_difference: of the perplexity to the base's.
        correlation: of the two ln(perplexity) over tokens.
        kld, kld_percentiles: mean, and percentile -> value (`KLD_PERCENTILES`), in nats.
        delta_p, delta_p_percentiles, rms_delta_p: mean, percentiles and root mean square of Δp.
        same_top: share of tokens with the same most likely token.
    """

    ppl_base: Estimate
    log_ppl_ratio: Estimate
    ppl_ratio: Estimate
    ppl_difference: Estimate
    correlation: float
    kld: Estimate
    kld_percentiles: dict[float, float]
    delta_p: Estimate
    delta_p_percentiles: dict[float, float]
    rms_delta_p: Estimate
    same_top: Estimate


def mean(values: Array) -> Estimate:
    """The mean and its standard error, sqrt((E[x^2] - E[x]^2) / (n - 1))."""
    return Estimate(float(values.mean()), float(values.std() / math.sqrt(len(values) - 1)))


def perplexity(nll: Array) -> Estimate:
    """exp of the mean negative log-likelihood; the error by Gauss, as llama-perplexity has it."""
    log_ppl = mean(nll)
    ppl = math.exp(log_ppl.value)
    return Estimate(ppl, ppl * log_ppl.error)


def divergence(scores: TokenScores) -> Divergence:
    """The statistics of scores that have a base."""
    ppl, ppl_base = perplexity(scores.nll), perplexity(scores.nll_base)
    log_ratio = mean(scores.nll - scores.nll_base)
    ratio = math.exp(log_ratio.value)
    delta_p = np.exp(-scores.nll) - np.exp(-scores.nll_base)
    mean_square = mean(delta_p**2)
    rms = math.sqrt(mean_square.value)
    same = float(scores.same_top.mean())
    return Divergence(
        ppl_base=ppl_base,
        log_ppl_ratio=log_ratio,
        ppl_ratio=Estimate(ratio, ratio * log_ratio.error),
        ppl_difference=Estimate(
            ppl.value - ppl_base.value,
            mean(ppl.value * scores.nll - ppl_base.value * scores.nll_base).error,
        ),
        correlation=_correlation(scores.nll, scores.nll_base),
        kld=mean(scores.kld),
        kld_percentiles=_percentiles(scores.kld, KLD_PERCENTILES),
        delta_p=mean(delta_p),
        delta_p_percentiles=_percentiles(delta_p, DELTA_P_PERCENTILES),
        rms_delta_p=Estimate(rms, mean_square.error / (2 * rms) if rms else 0.0),
        same_top=Estimate(same, math.sqrt(same * (1 - same) / (len(scores.nll) - 1))),
    )


def _percentiles(values: Array, percentiles: Sequence[float]) -> dict[float, float]:
    found = np.percentile(values, percentiles)
    return {at: float(value) for at, value in zip(percentiles, found, strict=True)}


def _correlation(a: Array, b: Array) -> float:
    deviation = float(a.std() * b.std())
    covariance = float(((a - a.mean()) * (b - b.mean())).mean())
    return covariance / deviation if deviation else 0.0
