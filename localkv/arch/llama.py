"""Llama and what has its graph, or nearly.

After llama.cpp's `src/models/llama.cpp`, `mistral3.cpp`, `smollm3.cpp`, `internlm2.cpp`,
`ernie4-5.cpp`, `seed-oss.cpp` and `arcee.cpp`.
"""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import plain
from localkv.arch.experts import experts
from localkv.arch.facts import Facts
from localkv.arch.mixer_spec import Temperature
from localkv.arch.spec import ModelSpec

UNROTATED_INTERVAL = 4
"""SmolLM 3: every fourth layer has no RoPE."""


def llama(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=True, divisors=True)
    ffn = experts(facts) if facts.integer("expert_count", 0) else plain.mlp(facts)
    return plain.model(facts, [plain.layer(facts, attention, ffn)] * facts.n_layers)


def mistral3(facts: Facts) -> ModelSpec:
    """A Llama whose q may grow with its position, as Llama 4's does."""
    spec = llama(facts)
    scale = facts.number("attention.temperature_scale", 0.0)
    rope = spec.layers[0].attention.rope
    if not scale or rope is None:
        return spec
    temperature = Temperature(scale, rope.original_context_length)
    plain_layer = spec.layers[0]
    layer = replace(plain_layer, mixer=replace(plain_layer.attention, temperature=temperature))
    return replace(spec, layers=(layer,) * spec.n_layers)


def smollm3(facts: Facts) -> ModelSpec:
    attention, ffn = plain.attention(facts, interleaved=True), plain.mlp(facts)
    rotated = plain.layer(facts, attention, ffn)
    unrotated = plain.layer(facts, replace(attention, rope=None), ffn)
    layers = [rotated if (i + 1) % UNROTATED_INTERVAL else unrotated for i in range(facts.n_layers)]
    return plain.model(facts, layers)


def internlm2(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=True)
    return plain.model(facts, [plain.layer(facts, attention, plain.mlp(facts))] * facts.n_layers)


def seed_oss(facts: Facts) -> ModelSpec:
    """The norm before its feed-forward block is named as others name one after attention."""
    attention = plain.attention(facts, interleaved=False)
    layer = plain.layer(facts, attention, plain.mlp(facts))
    layer = replace(layer, ffn_norm=facts.rms_norm("post_attention_norm"))
    return plain.model(facts, [layer] * facts.n_layers)


def arcee(facts: Facts) -> ModelSpec:
    """A feed-forward block without a gate."""
    attention = plain.attention(facts, interleaved=True, divisors=True)
    mlp = plain.mlp(facts, "relu2", gated=False)
    return plain.model(facts, [plain.layer(facts, attention, mlp)] * facts.n_layers)


ARCHITECTURES = {
    "llama": llama,
    "mistral3": mistral3,
    "smollm3": smollm3,
    "internlm2": internlm2,
    "ernie4_5": internlm2,
    "seed_oss": seed_oss,
    "arcee": arcee,
}
