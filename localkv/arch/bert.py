"""Encoders: BERT and its kin, whose tokens see all of their text.

After the files of llama.cpp's `src/models/` that bear the architectures' names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localkv.arch import plain
from localkv.arch.checkpoint import (
    Checkpoint,
    Config,
    Keys,
    Named,
    Weight,
    common_keys,
    with_one_added,
)
from localkv.arch.experts import dense, experts
from localkv.arch.facts import Facts
from localkv.arch.spec import (
    Activation,
    AttentionSpec,
    EncoderAttentionSpec,
    Ffn,
    LayerSpec,
    ModelSpec,
    NormSpec,
)
from localkv.arch.windows import layers_with_windows, window_rope, windows
from localkv.errors import ModelFileError

JINA_ALIBI = 8.0
MODERN_PERIOD, GEMMA_PERIOD = 3, 6
WINDOW_THETA = 10000.0
MEAN, CLS = 1, 2
"""Numbers of `classifier.pooling_type`."""


def _rows(facts: Facts, tensor: str) -> int:
    """Rows of a tensor that the file has.

    Raises:
        ModelFileError: it is missing.
    """
    shape = facts.shapes.get(tensor, ())
    if not shape:
        raise ModelFileError(f"missing tensor {tensor!r}")
    return shape[0] if len(shape) > 1 else 1


def _sums_normed(
    facts: Facts, attention: AttentionSpec, ffns: Sequence[Ffn], **more: Any
) -> ModelSpec:
    """BERT's layers, which norm their sums. The last one's second norm is the model's last.

    Args:
        attention: of each layer.
        ffns: of all layers.
        more: fields of `ModelSpec`.
    """
    second = "blk.0.attn_norm_2.weight" in facts.shapes
    layer = LayerSpec(
        EncoderAttentionSpec(attention),
        None,
        None,
        None,
        attn_sum_norm=facts.layer_norm("attn_output_norm"),
        attn_norm_2=facts.layer_norm("attn_norm_2") if second else None,
        ffn_sum_norm=facts.layer_norm("layer_output_norm"),
    )
    layers = [replace(layer, ffn=ffn) for ffn in ffns]
    layers[-1] = replace(layers[-1], ffn_sum_norm=None)
    types = "token_types.weight"
    return plain.encoder(
        facts,
        layers,
        output_norm=facts.layer_norm(f"blk.{facts.n_layers - 1}.layer_output_norm"),
        n_token_types=_rows(facts, types) if types in facts.shapes else 0,
        embedding_norm=facts.layer_norm("token_embd_norm"),
        **more,
    )


def bert(facts: Facts) -> ModelSpec:
    """Positions are learned."""
    attention = replace(plain.attention(facts, interleaved=False), rope=None)
    mlp = plain.mlp(facts, "gelu", gated=False)
    n_positions = _rows(facts, "position_embd.weight")
    return _sums_normed(facts, attention, [mlp] * facts.n_layers, n_positions=n_positions)


def nomic_bert(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=False)
    return _sums_normed(facts, attention, [plain.mlp(facts)] * facts.n_layers)


def nomic_bert_moe(facts: Facts) -> ModelSpec:
    """Some layers have experts, at equal distances."""
    attention = plain.attention(facts, interleaved=False)
    mlp = replace(dense(facts), activation="gelu", gated=False)
    every = facts.integer("moe_every_n_layers", 0)
    ffns: list[Ffn] = [mlp] * facts.n_layers
    if every:
        moe = experts(facts, renormalise=False, scaled=True, activation="gelu", gated=False)
        ffns = [moe if i % every == 1 else mlp for i in range(facts.n_layers)]
    return _sums_normed(facts, attention, ffns)


def jina_bert_v2(facts: Facts) -> ModelSpec:
    """Attention is biased by distance; q and k may be normed, and attention's sum twice."""
    attention = plain.by_distance(plain.attention(facts, interleaved=False), JINA_ALIBI)
    if "blk.0.attn_q_norm.weight" in facts.shapes:
        eps = facts.layer_norm("").eps
        q_norm, k_norm = (NormSpec(f"attn_{x}_norm", "layer", eps, "row") for x in "qk")
        attention = replace(attention, q_norm=q_norm, k_norm=k_norm)
    mlp = plain.mlp(facts, "gelu")
    if "blk.0.ffn_gate.weight" not in facts.shapes:
        is_fused = _rows(facts, "blk.0.ffn_up.weight") == 2 * mlp.n_ff
        mlp = replace(mlp, gated=is_fused)
    return _sums_normed(facts, attention, [mlp] * facts.n_layers)


def jina_bert_v3(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=False)
    mlp = plain.mlp(facts, "gelu", gated=False)
    return _sums_normed(facts, attention, [mlp] * facts.n_layers)


def to_both_sides(layer: LayerSpec) -> LayerSpec:
    """The layer of an encoder that is one of a causal model but for what its tokens see."""
    return replace(layer, mixer=EncoderAttentionSpec(layer.attention))


MODERN_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "geglu": "gelu",
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
}


def modern_bert(facts: Facts) -> ModelSpec:
    """The first layer's attention reads the normed embedding as it is.

    Raises:
        ModelFileError: the file has an activation that is not known, or layers that decide.
    """
    if facts.integer("decision.block_count", 0):
        raise ModelFileError("a 'modern-bert' model that decides is not supported")
    name = facts.keys.string(facts.key("hidden_activation"), default="gelu")
    if name not in MODERN_ACTIVATIONS:
        raise ModelFileError(f"activation {name!r} is not supported in {facts.architecture!r}")
    attention = plain.attention(facts, interleaved=False)
    full = attention.rope
    assert full is not None
    layer = plain.layer_normed(facts, attention, plain.mlp(facts, MODERN_ACTIVATIONS[name]))
    seen = windows(facts, MODERN_PERIOD, dense_first=True)
    rope = window_rope(facts, full, theta=WINDOW_THETA, scaled=False)
    layers = [to_both_sides(one) for one in layers_with_windows(layer, seen, rope)]
    if "blk.0.attn_norm.weight" not in facts.shapes:
        layers[0] = replace(layers[0], attn_norm=None)
    return plain.encoder(
        facts,
        layers,
        output_norm=facts.layer_norm("output_norm"),
        embedding_norm=facts.layer_norm("token_embd_norm"),
        classifier=plain.classifier(
            facts,
            "cls" if facts.integer("classifier.pooling_type", MEAN) == CLS else "mean",
            activation="gelu",
            norm=facts.layer_norm("cls.norm") if "cls.norm.weight" in facts.shapes else None,
        ),
    )


def gemma_embedding(facts: Facts) -> ModelSpec:
    """Gemma 3's layers; two matrices may follow the pooling.

    Raises:
        ModelFileError: their sizes don't lead back to the embedding's.
    """
    names = ("dense_2", "dense_3")
    dense = tuple(
        (name, _rows(facts, f"{name}.weight")) for name in names if f"{name}.weight" in facts.shapes
    )
    if dense and (len(dense) < len(names) or dense[-1][1] != facts.n_embd):
        raise ModelFileError("the matrices after the pooling don't end in the embedding's width")
    attention = replace(plain.attention(facts, interleaved=False), **plain.head_norms(facts))
    full = attention.rope
    assert full is not None
    layer = replace(
        plain.layer(facts, attention, plain.mlp(facts, "gelu")), **plain.post_norms(facts)
    )
    facts.integer("attention.sliding_window")  # no default
    rope = window_rope(facts, full, theta=WINDOW_THETA, scaled=False)
    layers = layers_with_windows(layer, windows(facts, GEMMA_PERIOD), rope)
    return plain.encoder(
        facts,
        [to_both_sides(one) for one in layers],
        output_norm=facts.rms_norm("output_norm"),
        embedding_scale=math.sqrt(facts.n_embd),
        ignored_tensors=("output.",),
        dense=dense,
    )


def _llama_like(
    facts: Facts, *, interleaved: bool, divisors: bool = False, output_norm: str = "output_norm"
) -> ModelSpec:
    attention = plain.attention(facts, interleaved=interleaved, divisors=divisors)
    layer = to_both_sides(plain.layer(facts, attention, plain.mlp(facts)))
    return plain.encoder(
        facts,
        [layer] * facts.n_layers,
        output_norm=facts.rms_norm(output_norm),
        ignored_tensors=("output.",),
    )


def eurobert(facts: Facts) -> ModelSpec:
    return _llama_like(facts, interleaved=False)


def neo_bert(facts: Facts) -> ModelSpec:
    return _llama_like(facts, interleaved=True, output_norm="enc.output_norm")


def llama_embed(facts: Facts) -> ModelSpec:
    return _llama_like(facts, interleaved=True, divisors=True)


def _labels(config: Config) -> list[str]:
    """Names of classes; none for a head without names, as transformers writes them."""
    names = [name for _, name in sorted(config.table("id2label").items())]
    if len(names) == 2 and names[0] == "LABEL_0":
        return []
    return names


def _encoder_keys(config: Config) -> Keys:
    keys = common_keys(config) | {"attention.causal": False}
    if labels := _labels(config):
        keys["classifier.output_labels"] = labels
    return keys


def _bert_weights(config: Config, name: str, weight: Weight) -> Named:
    """A head with names of classes is one matrix."""
    if name.startswith("classifier.") and _labels(config) and name.count(".") == 1:
        name = name.replace("classifier.", "classifier.out_proj.")
    yield name, weight


def _offset(config: Config) -> int:
    """The first position of RoBERTa, after those that stand for padding."""
    return 1 + config.integer("pad_token_id") if config.has("pad_token_id") else 0


def _roberta_keys(config: Config) -> Keys:
    n_positions = config.integer("max_position_embeddings") - _offset(config)
    return _encoder_keys(config) | {"context_length": n_positions}


def _roberta_weights(config: Config, name: str, weight: Weight) -> Named:
    if name == "embeddings.position_embeddings.weight":
        weight = weight.rows(range(_offset(config), weight.shape[0]))
    yield from _bert_weights(config, name, weight)


def _modern_keys(config: Config) -> Keys:
    keys = _encoder_keys(config) | {
        "attention.sliding_window": config.integer("local_attention", "sliding_window"),
        "rope.scaling.type": "none",
        "vocab_size": config.integer("vocab_size"),
    }
    if config.has("norm_eps"):
        keys["attention.layer_norm_epsilon"] = config.number("norm_eps")
    period = config.integer("global_attn_every_n_layers", default=MODERN_PERIOD)
    if config.has("layer_types"):
        seen = config.has_window
        period = [*seen, False].index(False, 1)
        if seen != [i % period != 0 for i in range(config.n_layers)]:
            raise ModelFileError("config.json: layers without a window aren't at equal distances")
    if config.has("global_attn_every_n_layers") or period != MODERN_PERIOD:
        keys["attention.sliding_window_pattern"] = period
    if config.has("hidden_activation"):
        keys["hidden_activation"] = config.string("hidden_activation")
    if config.has("classifier_pooling"):
        keys["classifier.pooling_type"] = {"cls": CLS, "mean": MEAN}.get(
            config.string("classifier_pooling"), 0
        )
    return keys


def _gemma_keys(config: Config) -> Keys:
    """The window is as wide as in the file; transformers halves it, since both sides see."""
    keys = {"attention.key_length": 256, **common_keys(config)}
    keys["attention.value_length"] = keys["attention.key_length"]
    return keys | {"attention.sliding_window": config.integer("sliding_window")}


_BERT_NAMES = {r"^bert\.": "", r"\.gamma$": ".weight", r"\.beta$": ".bias"}
_NOT_ENCODING = ("embeddings.position_ids", "pooler.", "cls.", "lm_head.", "decoder.")
_BERT = Checkpoint(
    "bert", keys=_encoder_keys, weights=_bert_weights, renamed=_BERT_NAMES, left_out=_NOT_ENCODING
)
_ROBERTA = replace(_BERT, keys=_roberta_keys, weights=_roberta_weights, renamed={r"^roberta\.": ""})
_MODERN = Checkpoint(
    "modern-bert",
    keys=_modern_keys,
    weights=_bert_weights,
    vocabulary=lambda config: {"add_bos_token": True, "add_eos_token": True},
    renamed={r"^model\.": ""},
    left_out=("decoder.",),
)


CHECKPOINTS = {
    "BertModel": _BERT,
    "BertForMaskedLM": _BERT,
    "BertForSequenceClassification": _BERT,
    "RobertaModel": _ROBERTA,
    "RobertaForSequenceClassification": _ROBERTA,
    "XLMRobertaModel": _ROBERTA,
    "XLMRobertaForSequenceClassification": _ROBERTA,
    "ModernBertModel": _MODERN,
    "ModernBertForMaskedLM": _MODERN,
    "ModernBertForSequenceClassification": _MODERN,
    "Gemma3TextModel": Checkpoint(
        "gemma-embedding",
        keys=_gemma_keys,
        weights=with_one_added,
        vocabulary=lambda config: {"add_space_prefix": False},
    ),
}
