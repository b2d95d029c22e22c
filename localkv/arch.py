"""One entry per architecture: only what a GGUF file cannot say.

Sizes and constants come from the file's metadata (`ModelConfig`), optional tensors (biases, tied
output, `rope_freqs`) from its tensor list. What is left is the shape of the graph, after
llama.cpp's `src/models/*.cpp`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ArchSpec:
    """How one architecture differs from the plain Llama graph.

    Attributes:
        rope_interleaved: RoPE rotates channel pairs (2i, 2i+1), ggml's NORM; otherwise
            (i, i + n/2), ggml's NEOX.
        rope_freqs: the optional tensor `rope_freqs.weight` divides the frequencies (Llama 3.1).
        qkv_bias: q, k and v must have biases; elsewhere biases are optional.
        qk_norm: RMSNorm over each head of q and k, before RoPE.
        no_rope_interval: every n-th layer (n-1, 2n-1, ...) has no RoPE; 0 for none.
        attention_temperature: q grows with its position if the file asks for it.
        moe: "no", "optional" (if the file has experts) or "yes".
        moe_renormalise: the weights of the chosen experts are divided by their sum.
        moe_shared_expert: one more expert sees every token, behind a sigmoid gate.
    """

    rope_interleaved: bool
    rope_freqs: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    no_rope_interval: int = 0
    attention_temperature: bool = False
    moe: str = "no"
    moe_renormalise: bool = True
    moe_shared_expert: bool = False


ARCHS = {
    "llama": ArchSpec(rope_interleaved=True, rope_freqs=True, moe="optional"),
    "mistral3": ArchSpec(
        rope_interleaved=True, rope_freqs=True, attention_temperature=True, moe="optional"
    ),
    "smollm3": ArchSpec(rope_interleaved=True, no_rope_interval=4),
    "qwen2": ArchSpec(rope_interleaved=False, qkv_bias=True),
    "qwen2moe": ArchSpec(
        rope_interleaved=False,
        qkv_bias=True,
        moe="yes",
        moe_renormalise=False,
        moe_shared_expert=True,
    ),
    "qwen3": ArchSpec(rope_interleaved=False, qk_norm=True),
    "qwen3moe": ArchSpec(rope_interleaved=False, qk_norm=True, moe="yes"),
}
