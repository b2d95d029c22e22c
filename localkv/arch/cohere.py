"""Command R: attention and feed-forward side by side, after one LayerNorm.

After llama.cpp's `src/models/command-r.cpp`.
"""

from __future__ import annotations

from localkv.arch import plain
from localkv.arch.facts import Facts
from localkv.arch.spec import LayerSpec, ModelSpec
from localkv.errors import ModelFileError

PLUS_LAYERS = 64
"""Command R+ has as many layers or more, and norms of q and k over all heads."""


def command_r(facts: Facts) -> ModelSpec:
    if facts.n_layers >= PLUS_LAYERS:
        raise ModelFileError("Command R+ (norms of q and k over all heads) is not supported")
    norm = facts.layer_norm("attn_norm")
    layer = LayerSpec(
        plain.attention(facts, interleaved=True), plain.mlp(facts), norm, norm, parallel=True
    )
    return plain.model(
        facts,
        [layer] * facts.n_layers,
        output_norm=facts.layer_norm("output_norm"),
        logit_scale=facts.number("logit_scale"),
    )


ARCHITECTURES = {"command-r": command_r}
