"""What it costs to pack K or V of one layer alone, or some of all: divergence from an f16 cache.

All tokens of a chunk are one batch, which reads the rows that the cache has stored. Layers below a
changed one give the same output as with the f16 cache. So they are not run again where a layer
depends on nothing but its input and its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import Array, Batch
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import with_types
from localkv.cache.profile import LayerTypes
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.engine.logprobs import score
from localkv.model import Transformer
from localkv.quality.chunks import first_scored

BASE = "f16"
_BLOCK_VALUES = 1 << 22
"""Logits that are turned into float64 at a time."""


class ChunkCosts:
    """A chunk of text, and the inputs that its layers got with an f16 cache.

    Args:
        model: on a backend.
        ids: the chunk; its second half is scored.
        cache: all but its types.
    """

    def __init__(self, model: Transformer, ids: Sequence[int], cache: CacheConfig) -> None:
        self.model, self.ids = model, list(ids[:-1])
        self.targets = np.array(ids[first_scored(len(ids)) + 1 :])
        self.cache = replace(cache, n_ctx=max(len(ids), cache.n_ctx))
        self._inputs = dict[int, NDArray[Any]]()
        base = base_types(model)
        self._logits = self._run(base, 0, keep=True)

    def divergence(self, types: LayerTypes, cache: CacheConfig | None = None) -> float:
        """The sum over scored tokens, in nats.

        Args:
            cache: another one than the chunk's, but for its types.
        """
        changed = (
            i for i, (a, b) in enumerate(zip(types, base_types(self.model), strict=True)) if a != b
        )
        first = next(changed, self.model.config.n_layers - 1)
        logits = self._run(types, first if self._inputs else 0, cache=cache)
        total, n = 0.0, max(1, _BLOCK_VALUES // logits.shape[1])
        for at in range(0, len(logits), n):
            rows = slice(at, at + n)
            total += float(score(logits[rows], self.targets[rows], self._logits[rows]).kld.sum())
        return total

    def forget_inputs(self) -> None:
        """Give back their memory; from now on all layers are run."""
        self._inputs.clear()

    def _run(
        self,
        types: LayerTypes,
        first: int,
        *,
        keep: bool = False,
        cache: CacheConfig | None = None,
    ) -> NDArray[np.float32]:
        """Logits that predict the scored tokens: float32 [scored tokens, n_vocab]."""
        typed = with_types(replace(cache or self.cache, n_ctx=self.cache.n_ctx), types)
        engine = Engine(self.model, typed, n_batch=len(self.ids))
        part = cast(Transformer, _Part(self.model, first, self._inputs, len(self.targets), keep))
        arrays = self.model.backend.arrays

        def work() -> NDArray[np.float32]:
            logits = engine.slot.forward(part, self.ids, "all", generated=False)
            copied: NDArray[np.float32] = np.array(arrays.to_numpy(logits), np.float32)
            return copied

        return engine.slot.turn(work)


def base_types(model: Transformer) -> LayerTypes:
    """An f16 cache, by layer."""
    storing = {layer for group in model.config.groups for layer in group.layers}
    return tuple((BASE, BASE) if i in storing else None for i in range(model.config.n_layers))


class _Part:
    """A model from a layer on, which predicts the scored tokens only.

    Args:
        inputs: of layers, by index; filled if they are kept.
    """

    def __init__(
        self,
        model: Transformer,
        first: int,
        inputs: dict[int, NDArray[Any]],
        n_scored: int,
        keep: bool,
    ) -> None:
        self.model, self.backend, self.config = model, model.backend, model.config
        self.first, self.inputs, self.n_scored, self.keep = first, inputs, n_scored, keep

    def forward(self, batch: Batch, cache: KVCache) -> Array:
        arrays = self.backend.arrays
        n_tokens = batch.starts[-1]
        batch = replace(batch, logit_rows=arrays.int64(range(n_tokens - self.n_scored, n_tokens)))
        if not self.model.can_start_later:
            return self.model.forward(batch, cache)
        x = None
        if self.first:
            x = arrays.from_numpy(self.inputs[self.first].copy())
        return self.model.run_from(self.first, x, batch, cache, self._before)

    def _before(self, index: int, x: Array) -> None:
        if self.keep:
            self.inputs[index] = np.array(self.backend.arrays.to_numpy(x))
