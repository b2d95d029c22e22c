"""Models with LayerNorm before both blocks: GPT-NeoX's descendants, StarCoder 2, StableLM.

After llama.cpp's `src/models/starcoder2.cpp`, `stablelm.cpp` and `nemotron.cpp`.
"""

from __future__ import annotations

from localkv.arch import plain
from localkv.arch.cohere import heads_normed
from localkv.arch.facts import Facts
from localkv.arch.spec import LayerSpec, ModelSpec


def _model(facts: Facts, layer: LayerSpec) -> ModelSpec:
    return plain.model(facts, [layer] * facts.n_layers, output_norm=facts.layer_norm("output_norm"))


def starcoder2(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=False)
    mlp = plain.mlp(facts, "gelu", gated=False)
    return _model(facts, plain.layer_normed(facts, attention, mlp))


def nemotron(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=False)
    mlp = plain.mlp(facts, "relu2", gated=False)
    return _model(facts, plain.layer_normed(facts, attention, mlp))


def stablelm(facts: Facts) -> ModelSpec:
    """The 12B model has norms of q and k, and its blocks side by side."""
    attention, mlp = plain.attention(facts, interleaved=False), plain.mlp(facts)
    if "blk.0.attn_q_norm.weight" in facts.shapes:
        attention = heads_normed(facts, attention)
    if "blk.0.ffn_norm.weight" in facts.shapes:
        return _model(facts, plain.layer_normed(facts, attention, mlp))
    return _model(facts, plain.side_by_side(facts, attention, mlp))


ARCHITECTURES = {"nemotron": nemotron, "stablelm": stablelm, "starcoder2": starcoder2}
