"""Models with LayerNorm: GPT-2 and GPT-NeoX, Falcon, StarCoder, StableLM, Nemotron and their kin.

After the files of llama.cpp's `src/models/` that bear the architectures' names.
"""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import plain
from localkv.arch.cohere import heads_normed
from localkv.arch.facts import Facts
from localkv.arch.spec import LayerSpec, ModelSpec
from localkv.errors import ModelFileError


def _model(facts: Facts, layer: LayerSpec, n_positions: int = 0) -> ModelSpec:
    norm = facts.layer_norm("output_norm")
    return plain.model(facts, layer, output_norm=norm, n_positions=n_positions)


def gpt2(facts: Facts) -> ModelSpec:
    """Positions are learned, as many as the context has tokens."""
    attention = replace(plain.attention(facts, interleaved=False), rope=None)
    layer = plain.layer_normed(facts, attention, plain.mlp(facts, "gelu", gated=False))
    return _model(facts, layer, facts.n_ctx_train)


def ungated_gelu(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=False)
    mlp = plain.mlp(facts, "gelu", gated=False)
    return _model(facts, plain.layer_normed(facts, attention, mlp))


BLOOM_ALIBI = 8.0


def bloom(facts: Facts) -> ModelSpec:
    """The embedding is normed, and attention biased by distance."""
    attention = plain.by_distance(plain.attention(facts, interleaved=False), BLOOM_ALIBI)
    layer = plain.layer_normed(facts, attention, plain.mlp(facts, "gelu", gated=False))
    norms = {name: facts.layer_norm(name) for name in ("output_norm", "token_embd_norm")}
    return plain.model(
        facts, layer, output_norm=norms["output_norm"], embedding_norm=norms["token_embd_norm"]
    )


def mpt(facts: Facts) -> ModelSpec:
    """Attention is biased by distance, or positions are learned; q, k and v may be clamped.

    Raises:
        ModelFileError: q and k have norms.
    """
    if "blk.0.attn_q_norm.weight" in facts.shapes:
        raise ModelFileError("norms of q and k in 'mpt' are not supported")
    attention = plain.attention(facts, interleaved=False, clamps=True)
    attention = plain.by_distance(attention, facts.number(plain.ALIBI, 0.0))
    layer = plain.layer_normed(facts, attention, plain.mlp(facts, "gelu", gated=False))
    n_positions = facts.n_ctx_train if "position_embd.weight" in facts.shapes else 0
    norm = facts.layer_norm("output_norm")
    return plain.model(
        facts, layer, reads=plain.CHANGING, output_norm=norm, n_positions=n_positions
    )


def jais(facts: Facts) -> ModelSpec:
    """Attention is biased by distance, and logits are divided by the channels of a head."""
    attention = plain.attention(facts, interleaved=False)
    attention = plain.by_distance(attention, facts.number(plain.ALIBI, 0.0))
    params = replace(attention.params, softmax_scale=1.0 / attention.key_dim)
    layer = plain.layer_normed(facts, replace(attention, params=params), plain.mlp(facts))
    return plain.model(
        facts, layer, reads=(plain.ALIBI,), output_norm=facts.layer_norm("output_norm")
    )


def ungated_relu2(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=False)
    mlp = plain.mlp(facts, "relu2", gated=False)
    return _model(facts, plain.layer_normed(facts, attention, mlp))


def orion(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=False)
    return _model(facts, plain.layer_normed(facts, attention, plain.mlp(facts)))


def gptneox(facts: Facts) -> ModelSpec:
    """Both blocks read the layer's input, each through a norm of its own, if the file says so."""
    attention = plain.attention(facts, interleaved=False)
    layer = plain.layer_normed(facts, attention, plain.mlp(facts, "gelu", gated=False))
    return _model(facts, replace(layer, parallel=facts.boolean("use_parallel_residual")))


def falcon(facts: Facts) -> ModelSpec:
    """Both blocks read one norm of the layer's input; in Falcon 40B attention has its own."""
    attention = plain.attention(facts, interleaved=False)
    layer = plain.side_by_side(facts, attention, plain.mlp(facts, "gelu", gated=False))
    if "blk.0.attn_norm_2.weight" in facts.shapes:
        layer = replace(layer, attn_norm=facts.layer_norm("attn_norm_2"))
    return _model(facts, layer)


def stablelm(facts: Facts) -> ModelSpec:
    """The 12B model has norms of q and k, and its blocks side by side."""
    attention, mlp = plain.attention(facts, interleaved=False), plain.mlp(facts)
    if "blk.0.attn_q_norm.weight" in facts.shapes:
        attention = heads_normed(facts, attention)
    if "blk.0.ffn_norm.weight" in facts.shapes:
        return _model(facts, plain.layer_normed(facts, attention, mlp))
    return _model(facts, plain.side_by_side(facts, attention, mlp))
