"""Models whose layers are of different sizes: Nemotron Super (found by search) and OpenELM.

After llama.cpp's `src/models/deci.cpp` and `openelm.cpp`.
"""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import plain
from localkv.arch.facts import Facts
from localkv.arch.spec import AttentionSpec, LayerSpec, ModelSpec
from localkv.errors import ModelFileError


def _deci_attention(facts: Facts, index: int) -> AttentionSpec | None:
    """None in a layer without heads.

    Raises:
        ModelFileError: the layer has a matrix in place of attention.
    """
    if not facts.per_layer("attention.head_count")[index]:
        return None
    if not facts.per_layer("attention.head_count_kv")[index]:
        raise ModelFileError(f"layer {index} has heads but no KV heads, which is not supported")
    return plain.attention(facts, interleaved=True, divisors=True, long_divisors=True, layer=index)


def _deci_layer(facts: Facts, index: int) -> LayerSpec:
    """Attention, a feed-forward block, both or neither.

    Raises:
        ModelFileError: there is only attention, and no model shows what follows it then.
    """
    attention = _deci_attention(facts, index)
    attn_norm = None if attention is None else facts.rms_norm("attn_norm")
    if facts.per_layer("feed_forward_length")[index]:
        mlp = plain.mlp(facts, layer=index)
        return LayerSpec(attention, mlp, attn_norm, facts.rms_norm("ffn_norm"))
    if attention is not None:
        raise ModelFileError(f"layer {index} has only attention, which is not supported")
    return LayerSpec(None, None, None, None)


def deci(facts: Facts) -> ModelSpec:
    return plain.model(facts, [_deci_layer(facts, i) for i in range(facts.n_layers)])


def openelm(facts: Facts) -> ModelSpec:
    layers = []
    for i in range(facts.n_layers):
        attention = plain.attention(facts, interleaved=False, layer=i)
        attention = replace(attention, **plain.head_norms(facts))
        layers.append(plain.layer(facts, attention, plain.mlp(facts, layer=i)))
    return plain.model(facts, layers)
