"""What the architectures of the random models are made of, written down once more for the tests.

It shares nothing with `localkv/arch`: a mistake there shows as a difference.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """How an architecture differs from Llama.

    Attributes:
        norm: "rms", or LayerNorm with a weight ("layer"), with a bias too ("layer+b"), with neither
            ("bare").
        halves: RoPE turns channels i and i + n / 2 together, not 2i and 2i + 1.
        activation: "silu", "gelu", "relu2" or "xielu".
        gated: the feed-forward block has a gate.
        fused_up: `ffn_up` holds gate and up.
        attn_norm, ffn_norm: their names, "" if there is none.
        parallel: both blocks read the layer's input.
        post_norms: there are norms behind both blocks.
        qk_norm: "head" (one weight), "heads" (one of each head), "row" (all heads at once) or "".
        qk_norm_last: after RoPE.
        embedding_by_width: the embedding is multiplied by the root of its width.
        divides_logits: by `logit_scale`, instead of multiplying.
        period: of layers with windows, the last of which sees everything.
        window_theta: RoPE's base in layers with a window; 0 for that of the others.
        window_scaled: RoPE is scaled there as in the others.
        full_turns: layers that see everything have RoPE.
        unrotated: of this number of layers one has no RoPE; 0 for none.
        sinks: each head has a logit without a value.
        fixed_theta: RoPE's base, whatever the file says; 0 if it may say.
        half_width: `feed_forward_length` is twice the width.
        positions: they are learned: rows that are added to the tokens' rows, in place of RoPE.
        normed_embedding: the embedding is normed.
        alibi: logits of attention are less by distance, in place of RoPE; the last slope is
            2 ** -alibi.
        sub_norms: there are norms before the last matrices of both blocks.
        unscaled: logits of attention are divided by the channels of a head, not their root.
    """

    norm: str = "rms"
    halves: bool = False
    activation: str = "silu"
    gated: bool = True
    fused_up: bool = False
    attn_norm: str = "attn_norm"
    ffn_norm: str = "ffn_norm"
    parallel: bool = False
    post_norms: bool = False
    qk_norm: str = ""
    qk_norm_last: bool = False
    embedding_by_width: bool = False
    divides_logits: bool = False
    period: int = 0
    window_theta: float = 0.0
    window_scaled: bool = True
    full_turns: bool = True
    unrotated: int = 0
    sinks: bool = False
    fixed_theta: float = 0.0
    half_width: bool = False
    positions: bool = False
    normed_embedding: bool = False
    alibi: float = 0.0
    unscaled: bool = False
    sub_norms: bool = False


def _beside(norm: str, **others: object) -> Traits:
    return Traits(norm, ffn_norm="attn_norm", parallel=True, **others)


def _gemma(**others: object) -> Traits:
    return Traits(halves=True, activation="gelu", embedding_by_width=True, **others)


_LLAMA, _HALVES = Traits(), Traits(halves=True)
_MLP = {"halves": True, "gated": False}
_POST_ONLY = {"halves": True, "attn_norm": "", "ffn_norm": "", "post_norms": True}
_GRANITE = Traits(divides_logits=True)

TRAITS: dict[str, Traits] = {
    **dict.fromkeys(("llama", "mistral3", "internlm2", "ernie4_5", "xverse", "baichuan"), _LLAMA),
    **dict.fromkeys(("nanbeige", "deci"), _LLAMA),
    **dict.fromkeys(("qwen2", "qwen2moe", "qwen2vl", "exaone", "paddleocr"), _HALVES),
    **dict.fromkeys(
        ("qwen3", "qwen3moe", "qwen3vl", "openelm"), Traits(halves=True, qk_norm="head")
    ),
    "smollm3": Traits(unrotated=4),
    "chatglm": Traits(fused_up=True),
    "pangu-embedded": _HALVES,
    "maincoder": Traits(qk_norm="head", qk_norm_last=True),
    "cogvlm": Traits(halves=True, fixed_theta=10000.0),
    "seed_oss": Traits(halves=True, ffn_norm="post_attention_norm"),
    "arcee": Traits(activation="relu2", gated=False),
    "qwen": Traits(halves=True, half_width=True),
    "gemma": _gemma(),
    "gemma2": _gemma(post_norms=True, period=2),
    "gemma3": _gemma(
        post_norms=True, qk_norm="head", period=6, window_theta=10000.0, window_scaled=False
    ),
    "command-r": _beside("layer"),
    "cohere2": _beside("layer", period=4, full_turns=False),
    "phi2": _beside("layer+b", **_MLP, activation="gelu"),
    "phi3": Traits(halves=True, fused_up=True),
    "granite": _GRANITE,
    "minicpm": _GRANITE,
    "granite_swa": Traits(divides_logits=True, sinks=True),
    "olmo": Traits("bare"),
    "olmo2": Traits(**_POST_ONLY, qk_norm="row", period=4, window_scaled=False),
    "exaone4": Traits(**_POST_ONLY, qk_norm="head"),
    "glm4": Traits(fused_up=True, post_norms=True),
    "hunyuan-dense": Traits(halves=True, qk_norm="head", qk_norm_last=True),
    "hunyuan_vl": Traits(halves=True, qk_norm="head", qk_norm_last=True),
    "starcoder2": Traits("layer+b", **_MLP, activation="gelu"),
    "codeshell": Traits("layer+b", **_MLP, activation="gelu"),
    "nemotron": Traits("layer+b", **_MLP, activation="relu2"),
    "jais2": Traits("layer+b", **_MLP, activation="relu2"),
    **dict.fromkeys(
        ("gpt2", "starcoder"), Traits("layer+b", **_MLP, activation="gelu", positions=True)
    ),
    "bitnet": Traits(halves=True, sub_norms=True),
    "bloom": Traits("layer+b", **_MLP, activation="gelu", alibi=8.0, normed_embedding=True),
    "mpt": Traits("layer+b", **_MLP, activation="gelu", alibi=4.0),
    "jais": Traits("layer+b", alibi=6.0, unscaled=True),
    "refact": Traits(alibi=8.0),
    "gptneox": Traits("layer+b", **_MLP, activation="gelu", parallel=True),
    "falcon": _beside("layer+b", **_MLP, activation="gelu"),
    "orion": Traits("layer+b", halves=True),
    "stablelm": Traits("layer+b", halves=True),
    "apertus": Traits(**_MLP, activation="xielu", qk_norm="head"),
    "plamo": _beside("rms", halves=True),
    "plamo3": Traits(
        halves=True,
        fused_up=True,
        post_norms=True,
        qk_norm="head",
        period=8,
        window_theta=10000.0,
        window_scaled=False,
    ),
}
"""By `general.architecture`."""

SHAPES = {
    ("baichuan", "13b"): Traits(alibi=8.0),
    ("stablelm", "parallel"): _beside("layer+b", halves=True, qk_norm="heads"),
    ("falcon", "40b"): Traits(
        "layer+b",
        **_MLP,
        activation="gelu",
        attn_norm="attn_norm_2",
        ffn_norm="attn_norm",
        parallel=True,
    ),
    ("command-r", "plus"): _beside("layer", qk_norm="heads"),
    ("exaone4", "32b"): Traits(**_POST_ONLY, qk_norm="head", period=4, full_turns=False),
}
"""Shapes of an architecture that its larger models have, by a name of the tests' own."""
