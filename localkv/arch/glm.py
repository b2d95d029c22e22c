"""GLM 4: norms before and after each block. After llama.cpp's `src/models/glm4.cpp`."""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import plain
from localkv.arch.facts import Facts
from localkv.arch.spec import ModelSpec


def glm4(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=not facts.turns_sections())
    layer = replace(plain.layer(facts, attention, plain.mlp(facts)), **plain.post_norms(facts))
    return plain.model(facts, [layer] * facts.n_layers)
