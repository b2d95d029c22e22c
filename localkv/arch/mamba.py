"""Mamba-2 with attention: Granite 4, Nemotron-H and Falcon-H1.

After llama.cpp's `src/models/granite-hybrid.cpp`, `nemotron-h.cpp`, `nemotron-h-moe.cpp`,
`falcon-h1.cpp` and `mamba-base.cpp`.
"""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import granite, plain
from localkv.arch.experts import experts
from localkv.arch.facts import Facts
from localkv.arch.spec import (
    AttentionParams,
    AttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    PredictionSpec,
)
from localkv.errors import ModelFileError


def mamba2(facts: Facts, eps: float) -> Mamba2Spec:
    """Heads, groups and states as the keys say; Falcon-H1 may have no norm of the output.

    Args:
        eps: of the norm.

    Raises:
        ModelFileError: the sizes contradict each other.
    """
    width, n_heads = facts.integer("ssm.inner_size"), facts.integer("ssm.time_step_rank")
    n_groups = facts.integer("ssm.group_count")
    if width % n_heads or n_heads % n_groups:
        raise ModelFileError(
            f"{width} channels, {n_heads} heads and {n_groups} groups don't divide evenly"
        )
    normed = any(name.endswith(".ssm_norm.weight") for name in facts.shapes)
    return Mamba2Spec(
        n_heads=n_heads,
        head_dim=width // n_heads,
        state_dim=facts.integer("ssm.state_size"),
        n_groups=n_groups,
        conv_kernel=facts.integer("ssm.conv_kernel"),
        norm=NormSpec("ssm_norm", "rms", eps) if normed else None,
    )


def _eps(facts: Facts) -> float:
    return facts.number("attention.layer_norm_rms_epsilon")


def _check_attends(flags: list[bool]) -> None:
    if not any(flags):
        raise ModelFileError("a model of recurrent layers only is not supported")


def granite_hybrid(facts: Facts) -> ModelSpec:
    """Granite with Mamba-2 in layers without KV heads."""
    net, kv_heads = mamba2(facts, _eps(facts)), facts.per_layer("attention.head_count_kv")
    _check_attends([n > 0 for n in kv_heads])
    ffn: MlpSpec | MoeSpec
    if facts.integer("expert_count", 0):
        ffn = experts(
            facts,
            n_ff=facts.same_in_all_layers("feed_forward_length"),
            scaled=True,
            n_ff_shared=facts.integer("expert_shared_feed_forward_length", 0),
        )
    else:
        ffn = plain.mlp(facts)
    norms = facts.rms_norm("attn_norm"), facts.rms_norm("ffn_norm")
    layers = []
    for i, n in enumerate(kv_heads):
        mixer = granite.attention(facts, i) if n else net
        layers.append(granite.residual(facts, LayerSpec(mixer, ffn, *norms)))
    return plain.model(facts, layers, **granite.scales(facts))


def nemotron_h(facts: Facts) -> ModelSpec:
    """Layers that have one block each: Mamba-2, attention without RoPE, or feed-forward: dense, or
    experts in Nemotron 3 Nano."""
    rms = "attention.layer_norm_rms_epsilon"
    eps = _eps(facts) if facts.has(rms) else facts.number("attention.layer_norm_epsilon")
    net, norm = mamba2(facts, eps), NormSpec("attn_norm", "rms", eps)
    kv_heads, widths = (
        facts.per_layer("attention.head_count_kv"),
        facts.per_layer("feed_forward_length"),
    )
    _check_attends([n > 0 and not width for n, width in zip(kv_heads, widths, strict=True)])
    layers = []
    for i, (n, width) in enumerate(zip(kv_heads, widths, strict=True)):
        if width:
            layers.append(LayerSpec(None, _squared(facts, i, width), None, norm))
        else:
            layers.append(LayerSpec(_unrotated(facts, i) if n else net, None, norm, None))
    return plain.model(
        facts,
        layers,
        output_norm=NormSpec("output_norm", "rms", eps),
        prediction=_nemotron_prediction(facts, eps),
    )


def _nemotron_prediction(facts: Facts, eps: float) -> PredictionSpec | None:
    """Attention and experts in one block, behind which there is a LayerNorm."""
    if not facts.predicts:
        return None
    every, at = facts.every_block, facts.n_layers
    width = every.per_layer("feed_forward_length")[at]
    norm, ffn_norm = NormSpec("attn_norm", "rms", eps), NormSpec("post_attention_norm", "rms", eps)
    layer = LayerSpec(_unrotated(every, at), _squared(every, at, width), norm, ffn_norm)
    found = facts.prediction(layer, norm=lambda name: NormSpec(name, "rms", eps))
    return found and replace(found, output_norm=facts.layer_norm(found.output_norm.tensor))


def _squared(facts: Facts, layer: int, width: int) -> MlpSpec | MoeSpec:
    """A dense block, or experts, which layers may have in other numbers and widths, and which may
    read a latent (Nemotron 3 Super)."""
    if not facts.integer("expert_count", 0):
        return MlpSpec(width, "relu2", gated=False)
    n_used = facts.per_layer("expert_used_count")[layer]
    return experts(
        facts,
        gating="sigmoid",
        renormalise=None,
        scaled=True,
        n_used=n_used,
        n_ff=facts.per_layer("expert_feed_forward_length", 0)[layer] or width // max(1, n_used),
        n_ff_shared=facts.integer("expert_shared_feed_forward_length"),
        selection_bias=True,
        activation="relu2",
        gated=False,
        latent_dim=facts.integer("moe_latent_size", 0),
    )


def _unrotated(facts: Facts, layer: int) -> AttentionSpec:
    spec = replace(plain.attention(facts, interleaved=False, layer=layer), rope=None)
    return _scaled(facts, spec)


def _scaled(facts: Facts, spec: AttentionSpec) -> AttentionSpec:
    scale = facts.number("attention.scale", 0.0) or spec.params.softmax_scale
    return replace(spec, params=AttentionParams(scale))


def falcon_h1(facts: Facts) -> ModelSpec:
    """Attention and Mamba-2 side by side in every layer; its factors are in the file's weights."""
    attention = _scaled(facts, plain.attention(facts, interleaved=False))
    layer = plain.layer(facts, attention, plain.mlp(facts))
    return plain.model(facts, replace(layer, beside=mamba2(facts, _eps(facts))))
