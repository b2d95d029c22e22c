"""SmallThinker: the router reads what comes into a layer, before attention; experts are ReLU-gated.

After llama.cpp's `src/models/smallthinker.cpp`.
"""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import plain
from localkv.arch.experts import experts
from localkv.arch.facts import Facts
from localkv.arch.spec import LayerSpec, ModelSpec
from localkv.arch.windows import layers_with_windows, window_rope, windows

PERIOD = 4
WINDOW = 4096
"""Whatever number a file with windows has."""
UNROTATED_INTERVAL = 4
"""The first layer of each four isn't rotated, if there are windows."""


def smallthinker(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=False)
    assert attention.rope is not None
    moe = experts(facts, gating=None, activation="relu", router_reads_input=True)
    layer = plain.layer(facts, attention, moe)
    sizes = [WINDOW if size else 0 for size in windows(facts, PERIOD, dense_first=True)]
    layers = layers_with_windows(layer, sizes, window_rope(facts, attention.rope))
    if any(sizes):
        layers = [_unrotated(x) if i % UNROTATED_INTERVAL == 0 else x for i, x in enumerate(layers)]
    return plain.model(facts, layers)


def _unrotated(layer: LayerSpec) -> LayerSpec:
    return replace(layer, mixer=replace(layer.attention, rope=None))


ARCHITECTURES = {"smallthinker": smallthinker}
