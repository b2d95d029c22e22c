"""Llama 4: chunks in three layers of four, experts that read their input times their weight.

After llama.cpp's `src/models/llama4.cpp`.
"""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import plain
from localkv.arch.experts import expert_width, experts
from localkv.arch.facts import Facts
from localkv.arch.mixtures import leading_dense, with_dense
from localkv.arch.spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec, Temperature
from localkv.arch.windows import window_rope, windows

PERIOD = 4
CHUNK = 8192
"""Whatever number a file has, unless it is 0."""
UNROTATED_INTERVAL = 4
TEMPERATURE = Temperature(0.1, CHUNK, offset=1)
MAVERICK_EXPERTS = 128
"""Models with as many have no norms of q and k."""


def llama4(facts: Facts) -> ModelSpec:
    rotated = _normed(facts, plain.attention(facts, interleaved=True, divisors=True))
    width = expert_width(facts)
    moe = experts(facts, gating="sigmoid", renormalise=False, n_ff_shared=width, weighs_input=True)
    layer = plain.layer(facts, rotated, moe)
    is_dense = leading_dense(facts, step=facts.integer("interleave_moe_layer_step"))
    layers = with_dense(facts, [layer] * facts.n_layers, is_dense)
    chunks = windows(facts, PERIOD, default=CHUNK)
    if any(chunks):
        layers = [
            _with_chunk(facts, x, bool(chunk), (i + 1) % UNROTATED_INTERVAL != 0)
            for i, (x, chunk) in enumerate(zip(layers, chunks, strict=True))
        ]
    return plain.model(facts, layers)


def _normed(facts: Facts, attention: AttentionSpec) -> AttentionSpec:
    """Norms without weights, after RoPE."""
    if facts.integer("expert_count") == MAVERICK_EXPERTS:
        return attention
    norm = NormSpec("", "rms", facts.number("attention.layer_norm_rms_epsilon"))
    return replace(attention, q_norm=norm, k_norm=norm, norms_after_rope=True)


def _with_chunk(facts: Facts, layer: LayerSpec, in_chunks: bool, is_rotated: bool) -> LayerSpec:
    """The layer with a chunk, or with all positions; rotated, or with a temperature."""
    attention = layer.attention
    params = replace(attention.params, chunk=CHUNK if in_chunks else 0)
    if not is_rotated:
        attention = replace(attention, rope=None, q_norm=None, k_norm=None, temperature=TEMPERATURE)
    elif in_chunks and attention.rope is not None:
        attention = replace(attention, rope=window_rope(facts, attention.rope))
    return replace(layer, mixer=replace(attention, params=params))


ARCHITECTURES = {"llama4": llama4}
