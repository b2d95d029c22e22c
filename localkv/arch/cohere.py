"""Command R and its successors: attention and feed-forward side by side, after one LayerNorm.

After llama.cpp's `src/models/command-r.cpp` and `cohere2.cpp`.
"""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import plain
from localkv.arch.facts import Facts
from localkv.arch.mixer_spec import AttentionSpec
from localkv.arch.norm_spec import NormSpec
from localkv.arch.spec import LayerSpec, ModelSpec
from localkv.arch.windows import layers_with_windows, windows

PLUS_LAYERS = 64
"""Command R+ has as many layers or more, and norms of q and k, with weights for each head."""
COHERE2_PERIOD = 4


def _model(facts: Facts, layers: list[LayerSpec]) -> ModelSpec:
    return plain.model(
        facts,
        layers,
        output_norm=facts.layer_norm("output_norm"),
        logit_scale=facts.number("logit_scale"),
    )


def heads_normed(facts: Facts, attention: AttentionSpec) -> AttentionSpec:
    """Attention with LayerNorm of each head of q and k, by weights of its own."""
    eps = facts.layer_norm("").eps
    q_norm, k_norm = (NormSpec(f"attn_{x}_norm", "layer", eps, "heads") for x in "qk")
    return replace(attention, q_norm=q_norm, k_norm=k_norm)


def command_r(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=True)
    if facts.n_layers >= PLUS_LAYERS:
        attention = heads_normed(facts, attention)
    return _model(facts, [plain.side_by_side(facts, attention, plain.mlp(facts))] * facts.n_layers)


def cohere2(facts: Facts) -> ModelSpec:
    """Layers that see everything don't rotate."""
    attention = plain.attention(facts, interleaved=True)
    unrotated = replace(attention, rope=None)
    layer = plain.side_by_side(facts, unrotated, plain.mlp(facts))
    facts.integer("attention.sliding_window")  # no default
    return _model(facts, layers_with_windows(layer, windows(facts, COHERE2_PERIOD), attention.rope))


ARCHITECTURES = {"command-r": command_r, "cohere2": cohere2}
