"""How far another cache moves attention, for each layer, head and token of a text.

Compared is what attention gives before the output matrix: what both K and V are read for. The model
is run with an f16 cache, then with the other one, and there each layer's mixer is given the input
that it had in the first run. So a layer's shift is what its own rows cost, and nothing of the
layers below it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import LayerSpec
from localkv.cache.arrays import Array, Batch, LayerCache
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.errors import LocalKVError
from localkv.kernels.backend import Mix, TokenInputs, run_one_by_one
from localkv.kernels.layer_weights import LayerWeights
from localkv.model import Transformer
from localkv.quality.layer_errors import ATTENTION, attending
from localkv.quality.scores import base_cache

Floats = NDArray[np.float32]


def attention_shift(
    model: Transformer, ids: Sequence[int], cache: CacheConfig, *, n_batch: int = 512
) -> list[Floats | None]:
    """By layer, float32 [n_heads, tokens]: |output - output with f16| / |output with f16|, with the
    Euclidean norm of a head's channels; None for a layer without attention.

    Args:
        ids: the text, at most `cache.n_ctx` tokens.
        cache: the one to compare with f16, not rotated, of the same length.
        n_batch: most tokens evaluated at a time.

    Raises:
        LocalKVError: an output is infinite or not a number.
    """
    pair, engines = _Pair(model), []
    for mixers, each in ((pair.first(), base_cache(cache.n_ctx)), (pair.second(), cache)):
        backend = replace(
            model.backend,
            mixers={**model.backend.mixers, **mixers},
            run_layers=run_one_by_one,
            records=False,
        )
        part = Transformer(model.config, model.weights, backend)
        engines.append(Engine(part, each, n_batch=n_batch))
    for at in range(0, len(ids), n_batch):
        for engine in engines:  # a batch at a time, so that no more than its inputs are kept
            engine.evaluate(ids[at : at + n_batch])
    return pair.by_layer()


class _Pair:
    """What attention is given and gives in two runs that take turns."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.layers = model, [layer for layer, _ in attending(model.config)]
        self._kept = deque[tuple[NDArray[Any], NDArray[Any]]]()  # of the first run
        self._found: dict[int, list[Floats]] = {index: [] for index in self.layers}
        self._calls = 0

    def first(self) -> dict[Any, Mix]:
        """Mixers that keep their inputs and outputs."""

        def keeping(mix: Mix) -> Mix:
            def run(
                x: Array,
                layer: LayerWeights,
                spec: LayerSpec,
                inputs: TokenInputs,
                cache: LayerCache,
                batch: Batch,
            ) -> Array:
                before = self._host(x)
                out = mix(x, layer, spec, inputs, cache, batch)
                self._kept.append((before, self._host(out)))
                return out

            return run

        return self._wrapped(keeping)

    def second(self) -> dict[Any, Mix]:
        """Mixers that are given the inputs that were kept, and are compared."""
        arrays = self.model.backend.arrays

        def comparing(mix: Mix) -> Mix:
            def run(
                x: Array,
                layer: LayerWeights,
                spec: LayerSpec,
                inputs: TokenInputs,
                cache: LayerCache,
                batch: Batch,
            ) -> Array:
                before, wanted = self._kept.popleft()
                x = arrays.floating(arrays.from_numpy(before))
                out = mix(x, layer, spec, inputs, cache, batch)
                assert isinstance(spec.mixer, ATTENTION)
                shift = _shift(self._host(out), wanted, spec.mixer.n_heads)
                self._found[self.layers[self._calls % len(self.layers)]].append(shift)
                self._calls += 1
                return out

            return run

        return self._wrapped(comparing)

    def by_layer(self) -> list[Floats | None]:
        return [
            np.concatenate(self._found[index], 1) if index in self._found else None
            for index in range(self.model.config.n_layers)
        ]

    def _wrapped(self, wrap: Any) -> dict[Any, Mix]:
        mixers = self.model.backend.mixers
        return {kind: wrap(mixers[kind]) for kind in ATTENTION if kind in mixers}

    def _host(self, x: Array) -> NDArray[Any]:
        """A copy, since a backend may write the next layer's values to the same place."""
        return np.array(self.model.backend.arrays.to_numpy(x))


def _shift(out: NDArray[Any], wanted: NDArray[Any], n_heads: int) -> Floats:
    """[n_heads, tokens], of [tokens, n_heads * channels] each."""
    heads = [x.astype(np.float64).reshape(len(x), n_heads, -1) for x in (out, wanted)]
    moved, norm = (np.linalg.norm(x, axis=-1).T for x in (heads[0] - heads[1], heads[1]))
    if not (np.isfinite(moved).all() and np.isfinite(norm).all()):
        raise LocalKVError("attention's output is not finite, so nothing can be compared")
    shift: Floats = (moved / np.where(norm > 0, norm, 1)).astype(np.float32)
    return shift
