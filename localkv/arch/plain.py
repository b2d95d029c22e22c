"""The plain Llama layer, from which the families say how they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from localkv.arch.facts import Facts
from localkv.arch.spec import (
    Activation,
    AttentionParams,
    AttentionSpec,
    ClassifierSpec,
    Ffn,
    LayerSpec,
    Mixer,
    MlpSpec,
    ModelSpec,
    NormSpec,
)
from localkv.errors import ModelFileError

CLAMP, ALIBI = "attention.clamp_kqv", "attention.max_alibi_bias"
CHANGING = (CLAMP, ALIBI)
"""Keys that change attention, unless they are 0."""


def attention(
    facts: Facts,
    *,
    interleaved: bool,
    divisors: bool = False,
    long_divisors: bool = False,
    layer: int | None = None,
    clamps: bool = False,
) -> AttentionSpec:
    """Grouped queries over the whole context, RoPE, and a scale of 1 / sqrt(channels of a head).

    Args:
        interleaved: see `RopeSpec`.
        divisors, long_divisors: see `Facts.rope`.
        layer: the one that is meant where layers have heads of their own; None if they may not.
        clamps: the architecture takes the bound on q, k and v, if the file has one; `model` is told
            by `reads`.
    """
    n_heads, n_kv_heads, head_dim = facts.heads(layer)
    return AttentionSpec(
        n_heads,
        n_kv_heads,
        head_dim,
        head_dim,
        AttentionParams(1.0 / math.sqrt(head_dim)),
        facts.rope(
            head_dim, interleaved=interleaved, divisors=divisors, long_divisors=long_divisors
        ),
        clamp=facts.number(CLAMP, 0.0) if clamps else 0.0,
    )


def by_distance(attention: AttentionSpec, alibi: float) -> AttentionSpec:
    """Attention that is biased by distance, in place of RoPE; see `AttentionParams.alibi`."""
    return replace(attention, rope=None, params=replace(attention.params, alibi=alibi))


def head_norms(facts: Facts) -> dict[str, Any]:
    """RMSNorm over each head of q and of k, for `dataclasses.replace` of an attention."""
    return {"q_norm": facts.rms_norm("attn_q_norm"), "k_norm": facts.rms_norm("attn_k_norm")}


def row_norms(facts: Facts) -> dict[str, Any]:
    """RMSNorm over all heads of q, and of k, at once, for `replace` of an attention."""
    return {name: replace(norm, span="row") for name, norm in head_norms(facts).items()}


def post_norms(facts: Facts) -> dict[str, Any]:
    """RMSNorm after attention and after the feed-forward block, for `replace` of a layer."""
    return {
        "post_attn_norm": facts.rms_norm("post_attention_norm"),
        "post_ffn_norm": facts.rms_norm("post_ffw_norm"),
    }


def mlp(
    facts: Facts, activation: Activation = "silu", *, gated: bool = True, layer: int | None = None
) -> MlpSpec:
    """A dense block.

    Args:
        layer: the one that is meant where layers have widths of their own; None if they may not.

    Raises:
        ModelFileError: the file has experts, which its architecture hasn't, or no width.
    """
    if facts.integer("expert_count", 0):
        raise ModelFileError(f"architecture {facts.architecture!r} with experts is not supported")
    name = "feed_forward_length"
    n_ff = facts.same_in_all_layers(name) if layer is None else facts.per_layer(name)[layer]
    if not n_ff:
        raise ModelFileError(f"key {facts.key(name)!r} is 0")
    return MlpSpec(n_ff, activation, gated)


def layer(facts: Facts, attention: Mixer, ffn: Ffn) -> LayerSpec:
    """RMSNorm before attention and before the feed-forward block."""
    return LayerSpec(attention, ffn, facts.rms_norm("attn_norm"), facts.rms_norm("ffn_norm"))


def layer_normed(facts: Facts, attention: AttentionSpec, ffn: Ffn) -> LayerSpec:
    """LayerNorm before attention and before the feed-forward block."""
    return LayerSpec(attention, ffn, facts.layer_norm("attn_norm"), facts.layer_norm("ffn_norm"))


def side_by_side(facts: Facts, attention: AttentionSpec, ffn: Ffn) -> LayerSpec:
    """Attention and the feed-forward block both read one LayerNorm of the layer's input."""
    norm = facts.layer_norm("attn_norm")
    return LayerSpec(attention, ffn, norm, norm, parallel=True)


def model(
    facts: Facts,
    layers: LayerSpec | Sequence[LayerSpec],
    *,
    reads: Sequence[str] = (),
    **changes: Any,
) -> ModelSpec:
    """RMSNorm before the output; `changes` are fields of `ModelSpec`.

    Args:
        layers: all of them, or what each of them is.
        reads: keys of `CHANGING` that the layers have taken in.

    Raises:
        ModelFileError: the file is of a model that attends in a way that no architecture here has.
    """
    _refuse_unknown(facts, reads)
    if not facts.boolean("attention.causal", True):
        raise ModelFileError(
            f"architecture {facts.architecture!r} with tokens that see those after them is not "
            "supported"
        )
    if "output_norm" not in changes:
        changes["output_norm"] = facts.rms_norm("output_norm")
    blocks = range(facts.n_layers, facts.n_layers + facts.n_prediction_layers)
    changes["ignored_tensors"] = (
        *(f"blk.{i}." for i in blocks),
        *changes.get("ignored_tensors", ()),
    )
    return _model_spec(facts, layers, **changes)


def encoder(
    facts: Facts, layers: Sequence[LayerSpec], *, output_norm: NormSpec, **changes: Any
) -> ModelSpec:
    """A model that reads texts and writes none; `changes` are fields of `ModelSpec`.

    Raises:
        ModelFileError: the file is of a model that attends in a way that no architecture here has.
    """
    _refuse_unknown(facts)
    if facts.boolean("attention.causal", False):
        raise ModelFileError(
            f"architecture {facts.architecture!r} with tokens that see only those before them is "
            "not supported"
        )
    changes.setdefault("classifier", classifier(facts, "cls"))
    return _model_spec(facts, layers, output_norm=output_norm, **changes)


def classifier(
    facts: Facts, pooling: Literal["mean", "cls", "last"], **changes: Any
) -> ClassifierSpec | None:
    """The head that scores texts, if the file has one; `changes` are fields of `ClassifierSpec`.

    Args:
        pooling: the hidden state that it reads.
    """

    def rows(name: str) -> int:
        shape = facts.shapes.get(name, (0,))
        return shape[0] if len(shape) > 1 else min(1, shape[0])

    n_hidden, n_classes = rows("cls.weight"), rows("cls.output.weight")
    if not n_hidden and not n_classes:
        return None
    return ClassifierSpec(pooling, n_hidden, n_classes, **changes)


def _refuse_unknown(facts: Facts, reads: Sequence[str] = ()) -> None:
    for key in CHANGING:
        if key not in reads and facts.number(key, 0.0):
            raise ModelFileError(f"key {facts.key(key)!r} is not supported, unless it is 0")


def _model_spec(facts: Facts, layers: LayerSpec | Sequence[LayerSpec], **changes: Any) -> ModelSpec:
    return ModelSpec(
        architecture=facts.architecture,
        name=facts.name,
        n_embd=facts.n_embd,
        n_vocab=facts.n_vocab,
        n_ctx_train=facts.n_ctx_train,
        layers=(layers,) * facts.n_layers if isinstance(layers, LayerSpec) else tuple(layers),
        **changes,
    )
