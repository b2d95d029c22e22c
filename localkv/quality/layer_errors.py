"""How far packing K or V of a layer moves what its attention adds to the residual stream.

One pass through an f16 cache measures all types. Each attention is run again on the same input for
each type of K and of V, with a cache of that layer alone. What the output matrix makes of both
results is compared. So an error has nothing of other layers in it, and nothing of the noise that
8-bit activations make of any change to a layer's input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import AttentionSpec, LatentAttentionSpec, LayerSpec, ModelSpec
from localkv.cache.arrays import Array, Batch, LayerCache
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import with_types
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.kernels.backend import Mix, TokenInputs, run_one_by_one
from localkv.kernels.layer_weights import LayerWeights
from localkv.model import Transformer
from localkv.quality.scores import first_scored

BASE = "f16"
"""The type that others are compared with."""

ATTENTION = (AttentionSpec, LatentAttentionSpec)
Variant = tuple[int, str]
"""A side, 0 for K and 1 for V, and the type that it has."""
Key = tuple[int, int, str]
"""A layer, a side and the type that it has alone."""


def attending(config: ModelSpec) -> list[tuple[int, int]]:
    """(layer, the layer whose rows it reads) of each call of attention, in order."""
    return [
        (index, index if (rows := getattr(mixer, "kv_from", None)) is None else rows)
        for index, layer in enumerate(config.layers)
        for mixer in (layer.mixer, layer.beside)
        if isinstance(mixer, ATTENTION)
    ]


def layer_errors(
    model: Transformer, ids: Sequence[int], cache: CacheConfig, variants: dict[int, list[Variant]]
) -> dict[Key, float]:
    """|moved|² / |added|² of each layer and variant, summed over the layers that read its rows.

    `added` is what attention adds to the residual stream with f16 rows, `moved` how far the variant
    moves that; both are mean squares over the tokens of the second half.

    Args:
        ids: one chunk; all of it is one batch.
        cache: all but its types.
        variants: by layer that stores rows, the types to measure.
    """
    cache = replace(cache, n_ctx=max(len(ids), cache.n_ctx))
    replay = _Replay(model, list(ids), cache, variants)
    mixers = {
        kind: replay.measuring(mix) if issubclass(kind, ATTENTION) else mix
        for kind, mix in model.backend.mixers.items()
    }
    backend = replace(model.backend, mixers=mixers, run_layers=run_one_by_one, records=False)
    base = tuple(
        (BASE, BASE) if index in variants else None for index in range(model.config.n_layers)
    )
    engine = Engine(
        Transformer(model.config, model.weights, backend), with_types(cache, base), n_batch=len(ids)
    )
    engine.evaluate(ids)
    return replay.errors


class _Replay:
    """Runs each attention with all variants of its rows, and compares.

    Attributes:
        errors: what `layer_errors` returns, so far.
    """

    def __init__(
        self,
        model: Transformer,
        ids: list[int],
        cache: CacheConfig,
        variants: dict[int, list[Variant]],
    ) -> None:
        self.model, self.ids, self.cache, self.variants = model, ids, cache, variants
        self.errors = {(layer, *one): 0.0 for layer, some in variants.items() for one in some}
        self._calls: Iterator[tuple[int, int]] = iter(attending(model.config))
        self._last = {rows: layer for layer, rows in attending(model.config)}
        self._prepared = dict[int, list[tuple[Variant, LayerCache, Batch]]]()

    def measuring(self, mix: Mix) -> Mix:
        def run(
            x: Array,
            layer: LayerWeights,
            spec: LayerSpec,
            inputs: TokenInputs,
            rows: LayerCache,
            batch: Batch,
        ) -> Array:
            arrays = self.model.backend.arrays
            index, owner = next(self._calls)
            # copied, since a backend may write other results to the same place
            out = np.array(arrays.to_numpy(mix(x, layer, spec, inputs, rows, batch)))
            added = self._added(out, layer, spec)
            size = float(np.square(added, dtype=np.float64).sum()) or 1.0
            if owner not in self._prepared:
                self._prepared[owner] = list(self._caches(owner))
            for variant, own_rows, own_batch in self._prepared[owner]:
                other = arrays.to_numpy(mix(x, layer, spec, inputs, own_rows, own_batch))
                moved = self._added(np.array(other), layer, spec) - added
                error = float(np.square(moved, dtype=np.float64).sum()) / size
                self.errors[(owner, *variant)] += error
            if self._last[owner] == index:
                del self._prepared[owner]
            return arrays.floating(arrays.from_numpy(out))

        return run

    def _added(
        self, out: NDArray[Any], layer: LayerWeights, spec: LayerSpec
    ) -> NDArray[np.float32]:
        """What the second half of attention's output adds to the residual stream."""
        backend, arrays = self.model.backend, self.model.backend.arrays
        scored = arrays.floating(arrays.from_numpy(out[first_scored(len(out)) :].copy()))
        nothing = np.zeros((len(scored), self.model.config.n_embd), np.float32)
        x = arrays.floating(arrays.from_numpy(nothing))
        added: NDArray[np.float32] = np.array(
            arrays.to_numpy(backend.out_residual(x, scored, layer, spec)), np.float32
        )
        return added

    def _caches(self, owner: int) -> Iterator[tuple[Variant, LayerCache, Batch]]:
        """For each variant of a layer's rows, a cache of nothing else with room for the chunk, and
        the batch that fills it."""
        config, weights = self.model.config, self.model.weights
        alone = Transformer(
            replace(config, layers=(config.layers[owner],)),
            replace(weights, layers=(weights.layers[owner],)),
            self.model.backend,
        )
        codebooks = tuple(
            replace(one, layer=0) for one in self.cache.kv_codebooks if one.layer == owner
        )
        own = replace(self.cache, kv_codebooks=codebooks)
        for variant in self.variants[owner]:
            side, name = variant
            pair = (name, BASE) if side == 0 else (BASE, name)
            engine = Engine(alone, with_types(own, (pair,)), n_batch=len(self.ids))
            batch = _Batch(alone)
            engine.slot.forward(batch.as_model, self.ids, "all", generated=False)
            yield variant, batch.cache.layers[0], batch.batch


class _Batch:
    """Takes the place of a model, and keeps what it is given to run."""

    batch: Batch
    cache: KVCache

    def __init__(self, model: Transformer) -> None:
        self.backend, self.config = model.backend, model.config

    @property
    def as_model(self) -> Transformer:
        return cast(Transformer, self)

    def forward(self, batch: Batch, cache: KVCache) -> Array:
        self.batch, self.cache = batch, cache
        return self.backend.arrays.zeros(len(batch.logit_rows), 1)
