"""LFM2: short convolutions, with attention in some layers.

After llama.cpp's `src/models/lfm2.cpp` and `lfm2moe.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localkv.arch import plain
from localkv.arch.checkpoint import GATING, Checkpoint, Config, Keys, Named, Weight, moe_keys
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


def _checkpoint_keys(config: Config) -> Keys:
    """Layers of convolutions have no KV heads."""
    n_kv, kinds = config.n_kv_heads, config.layer_types
    return moe_keys(config) | {
        "attention.head_count_kv": [n_kv if kind == "full_attention" else 0 for kind in kinds],
        "vocab_size": config.integer("vocab_size"),
        "shortconv.l_cache": config.integer("conv_L_cache"),
        "attention.layer_norm_rms_epsilon": config.number("norm_eps"),
    }


def _dense_keys(config: Config) -> Keys:
    width = config.integer("block_ff_dim", "intermediate_size")
    if config.flag("block_auto_adjust_ff_dim"):
        width = 2 * width // 3
        if config.has("block_ffn_dim_multiplier"):
            width = int(config.number("block_ffn_dim_multiplier") * width)
        unit = max(1, config.integer("block_multiple_of", default=256))
        width = -(-width // unit) * unit
    return _checkpoint_keys(config) | {"feed_forward_length": width}


def _moe_checkpoint_keys(config: Config) -> Keys:
    keys = _checkpoint_keys(config)
    keys.pop("expert_weights_norm", None)
    keys.pop("expert_weights_scale", None)
    return keys | {
        "leading_dense_block_count": config.integer("num_dense_layers"),
        "expert_gating_func": GATING["sigmoid"],
    }


def _weights(config: Config, name: str, weight: Weight) -> Named:
    if "conv.conv" in name:
        weight = weight.reshaped((weight.shape[0], weight.shape[-1]))
    name = (
        name.removesuffix(".expert_bias") + ".expert_bias.bias"
        if name.endswith(".expert_bias")
        else name
    )
    yield name, weight


CHECKPOINTS = {
    "Lfm2ForCausalLM": Checkpoint("lfm2", keys=_dense_keys, weights=_weights),
    "Lfm2MoeForCausalLM": Checkpoint(
        "lfm2moe",
        keys=_moe_checkpoint_keys,
        weights=_weights,
        renamed={r"^model\.(layers\.\d+\.feed_forward\.experts\.)": r"\1"},
    ),
}
