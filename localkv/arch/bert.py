"""Encoders: BERT and its kin, whose tokens see all of their text.

After llama.cpp's `src/models/bert.cpp`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localkv.arch import plain
from localkv.arch.facts import Facts
from localkv.arch.spec import EncoderAttentionSpec, LayerSpec, ModelSpec
from localkv.errors import ModelFileError


def _rows(facts: Facts, tensor: str) -> int:
    """Rows of a tensor that the file has.

    Raises:
        ModelFileError: it is missing.
    """
    shape = facts.shapes.get(tensor, ())
    if not shape:
        raise ModelFileError(f"missing tensor {tensor!r}")
    return shape[0] if len(shape) > 1 else 1


def _token_types(facts: Facts) -> int:
    """Rows of `token_types`, 0 if the file has none."""
    name = "token_types.weight"
    return _rows(facts, name) if name in facts.shapes else 0


def _model(facts: Facts, layer: LayerSpec, **changes: Any) -> ModelSpec:
    """Layers that norm their sums. The last one's second norm is the model's last."""
    last = replace(layer, ffn_sum_norm=None)
    final = facts.layer_norm(f"blk.{facts.n_layers - 1}.layer_output_norm")
    return plain.encoder(
        facts,
        [layer] * (facts.n_layers - 1) + [last],
        output_norm=final,
        n_token_types=_token_types(facts),
        embedding_norm=facts.layer_norm("token_embd_norm"),
        **changes,
    )


def _layer(facts: Facts, *, rotates: bool, gated: bool) -> LayerSpec:
    attention = plain.attention(facts, interleaved=False)
    if not rotates:
        attention = replace(attention, rope=None)
    return LayerSpec(
        EncoderAttentionSpec(attention),
        plain.mlp(facts, "silu" if gated else "gelu", gated=gated),
        None,
        None,
        attn_sum_norm=facts.layer_norm("attn_output_norm"),
        ffn_sum_norm=facts.layer_norm("layer_output_norm"),
    )


def bert(facts: Facts) -> ModelSpec:
    """Positions are learned."""
    n_positions = _rows(facts, "position_embd.weight")
    return _model(facts, _layer(facts, rotates=False, gated=False), n_positions=n_positions)
