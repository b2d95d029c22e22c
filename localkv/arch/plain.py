"""The plain Llama layer, from which the families say how they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from localkv.arch.facts import Facts
from localkv.arch.ffn_spec import MlpSpec, MoeSpec
from localkv.arch.mixer_spec import AttentionParams, AttentionSpec
from localkv.arch.spec import LayerSpec, ModelSpec
from localkv.errors import ModelFileError


def attention(facts: Facts, *, interleaved: bool, divisors: bool = False) -> AttentionSpec:
    """Grouped queries over the whole context, RoPE, and a scale of 1 / sqrt(channels of a head).

    Args:
        interleaved: see `RopeSpec`.
        divisors: the architecture takes `rope_freqs.weight`.
    """
    n_heads, n_kv_heads, head_dim = facts.heads()
    return AttentionSpec(
        n_heads,
        n_kv_heads,
        head_dim,
        head_dim,
        AttentionParams(1.0 / math.sqrt(head_dim)),
        facts.rope(head_dim, interleaved=interleaved, divisors=divisors),
    )


def head_norms(facts: Facts) -> dict[str, Any]:
    """RMSNorm over each head of q and of k, for `dataclasses.replace` of an attention."""
    return {"q_norm": facts.rms_norm("attn_q_norm"), "k_norm": facts.rms_norm("attn_k_norm")}


def mlp(facts: Facts) -> MlpSpec:
    """A dense SwiGLU block.

    Raises:
        ModelFileError: the file has experts, which its architecture hasn't.
    """
    if facts.integer("expert_count", 0):
        raise ModelFileError(f"architecture {facts.architecture!r} with experts is not supported")
    return MlpSpec(facts.same_in_all_layers("feed_forward_length"))


def layer(facts: Facts, attention: AttentionSpec, ffn: MlpSpec | MoeSpec) -> LayerSpec:
    """RMSNorm before attention and before the feed-forward block."""
    return LayerSpec(attention, ffn, facts.rms_norm("attn_norm"), facts.rms_norm("ffn_norm"))


def model(facts: Facts, layers: Sequence[LayerSpec], **changes: Any) -> ModelSpec:
    """RMSNorm before the output; `changes` are fields of `ModelSpec`."""
    if "output_norm" not in changes:
        changes["output_norm"] = facts.rms_norm("output_norm")
    return ModelSpec(
        architecture=facts.architecture,
        name=facts.name,
        n_embd=facts.n_embd,
        n_vocab=facts.n_vocab,
        n_ctx_train=facts.n_ctx_train,
        layers=tuple(layers),
        **changes,
    )
