"""Command R and its successors: attention and feed-forward side by side, after one LayerNorm.

After llama.cpp's `src/models/command-r.cpp`, `cohere2.cpp` and `cohere2moe.cpp`.
"""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import plain
from localkv.arch.experts import expert_width, experts, leading_dense, with_dense
from localkv.arch.facts import Facts
from localkv.arch.spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec, NormSpec
from localkv.arch.windows import layers_with_windows, window_rope, windows

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


def cohere2_moe(facts: Facts) -> ModelSpec:
    """Leading dense layers rotate, with a window or not; the shared expert counts as much as all
    others together."""
    attention = plain.attention(facts, interleaved=True)
    rope = attention.rope
    assert rope is not None
    is_dense = leading_dense(facts)
    moe = _cohere2_experts(facts)
    is_rms = facts.has("attention.layer_norm_rms_epsilon")
    norm = facts.rms_norm if is_rms else facts.layer_norm
    facts.integer("attention.sliding_window")  # no default
    layer = LayerSpec(
        replace(attention, rope=None), moe, norm("attn_norm"), norm("attn_norm"), parallel=True
    )
    sizes = windows(facts, COHERE2_PERIOD, dense_first=True)
    layers = layers_with_windows(layer, sizes, window_rope(facts, rope))
    for i, leads in enumerate(is_dense):
        if leads and not sizes[i]:
            layers[i] = replace(layer, mixer=attention)
    return plain.model(
        facts,
        with_dense(facts, layers, is_dense),
        prediction=facts.prediction(replace(layer, mixer=attention), norm=norm),
        output_norm=norm("output_norm"),
        logit_scale=facts.number("logit_scale") or 1.0,
    )


def _cohere2_experts(facts: Facts) -> MoeSpec:
    n_shared = 0
    if n := facts.integer("expert_shared_count", 0):
        width = facts.integer("expert_shared_feed_forward_length", 0)
        n_shared = width or n * expert_width(facts)
    moe = experts(
        facts,
        gating="sigmoid",
        gating_varies=True,
        renormalise=None,
        scaled=True,
        n_ff_shared=n_shared,
    )
    if not n_shared:
        return moe
    return replace(moe, weights_scale=0.5 * moe.weights_scale, shared_scale=0.5)
