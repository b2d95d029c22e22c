"""gpt-oss: sinks, windows in every second layer, biases throughout, experts with a clamped SwiGLU.

After llama.cpp's `src/models/openai-moe.cpp`.
"""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import plain
from localkv.arch.experts import experts
from localkv.arch.facts import Facts
from localkv.arch.spec import LayerSpec, ModelSpec
from localkv.arch.windows import layers_with_windows, window_rope, windows

PERIOD = 2


def gpt_oss(facts: Facts) -> ModelSpec:
    attention = replace(plain.attention(facts, interleaved=False), sinks="attn_sinks")
    assert attention.rope is not None
    moe = experts(
        facts,
        gating="softmax_of_chosen",
        renormalise=False,
        activation="swiglu_oai",
        biased=True,
    )
    layer = LayerSpec(
        attention, moe, facts.rms_norm("attn_norm"), facts.rms_norm("post_attention_norm")
    )
    rope = window_rope(facts, attention.rope)
    return plain.model(facts, layers_with_windows(layer, windows(facts, PERIOD), rope))


ARCHITECTURES = {"gpt-oss": gpt_oss}
