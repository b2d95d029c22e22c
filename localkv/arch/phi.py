"""Phi 2, and Phi 3 and 4, whose RoPE depends on the context's length.

After llama.cpp's `src/models/phi2.cpp` and `phi3.cpp`. Files of Phi 3 name a window that nobody
honours: it is wider than the contexts it was trained for.
"""

from __future__ import annotations

from localkv.arch import plain
from localkv.arch.facts import Facts
from localkv.arch.spec import ModelSpec


def phi2(facts: Facts) -> ModelSpec:
    """Attention and feed-forward side by side, after one LayerNorm, with biases everywhere."""
    attention = plain.attention(facts, interleaved=False)
    layer = plain.side_by_side(facts, attention, plain.mlp(facts, "gelu", gated=False))
    return plain.model(facts, [layer] * facts.n_layers, output_norm=facts.layer_norm("output_norm"))


def phi3(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=False, long_divisors=True)
    return plain.model(facts, [plain.layer(facts, attention, plain.mlp(facts))] * facts.n_layers)
