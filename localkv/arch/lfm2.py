"""LFM2: short convolutions, with attention in some layers.

After llama.cpp's `src/models/lfm2.cpp` and `lfm2moe.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localkv.arch import plain
from localkv.arch.experts import dense, experts
from localkv.arch.facts import Facts
from localkv.arch.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, ShortConvSpec
from localkv.errors import ModelFileError


def _mixers(facts: Facts) -> list[AttentionSpec | ShortConvSpec]:
    """Each layer's mixer; layers without KV heads are convolutions."""
    conv = ShortConvSpec(facts.n_embd, facts.integer("shortconv.l_cache"))
    window = facts.integer("attention.sliding_window", 0)

    def attention(layer: int) -> AttentionSpec:
        spec = plain.attention(facts, interleaved=False, layer=layer)
        params = replace(spec.params, window=window)
        return replace(spec, params=params, **plain.head_norms(facts))

    kv_heads = facts.per_layer("attention.head_count_kv")
    if not any(kv_heads):
        raise ModelFileError("a model of recurrent layers only is not supported")
    return [attention(i) if n else conv for i, n in enumerate(kv_heads)]


def _model(facts: Facts, ffns: Sequence[MlpSpec | MoeSpec]) -> ModelSpec:
    norms = facts.rms_norm("attn_norm"), facts.rms_norm("ffn_norm")
    layers = [
        LayerSpec(mixer, ffn, *norms) for mixer, ffn in zip(_mixers(facts), ffns, strict=True)
    ]
    return plain.model(facts, layers, output_norm=facts.rms_norm("token_embd_norm"))


def lfm2(facts: Facts) -> ModelSpec:
    return _model(facts, [plain.mlp(facts, layer=i) for i in range(facts.n_layers)])


def lfm2moe(facts: Facts) -> ModelSpec:
    """Experts chosen by a sigmoid and a bias, after some dense layers."""
    moe = experts(facts, gating=None, scaled=True, selection_bias=True)
    n_dense = facts.integer("leading_dense_block_count", 0)
    ffns = [dense(facts) if i < n_dense else moe for i in range(facts.n_layers)]
    return _model(facts, ffns)
