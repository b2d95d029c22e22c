"""Arguments of `RandomModel` for the architectures without experts, by name."""

from __future__ import annotations

from typing import Any

from support.random_model import YARN, RandomModel

QKV = ("attn_q", "attn_k", "attn_v")
ALL_BIASES = (*QKV, "attn_output", "ffn_up", "ffn_down")
BY_LENGTH = {"long_factors": True}
LONG = {"rope.scaling.attn_factor": 1.19, "rope.scaling.original_context_length": 256}
SHORT = {"rope.scaling.attn_factor": 1.19, "rope.scaling.original_context_length": 4096}
PARTLY = {"rope.dimension_count": 32}
GRANITE = {
    "embedding_scale": 1.5,
    "residual_scale": 0.5,
    "logit_scale": 2.0,
    "attention.scale": 0.0416667,
}
XIELU = {
    "xielu.alpha_n": [0.8, 0.5],
    "xielu.alpha_p": [0.9, 0.4],
    "xielu.beta": [0.5, 0.25],
    "xielu.eps": [-1e-6, -1e-6],
}
WINDOW = {"attention.sliding_window": 7}
SECTIONS = {"rope.dimension_sections": [12, 10, 10, 0]}


NARROW = {"n_heads": 2, "n_kv_heads": 1}
"""For architectures whose heads are together as wide as the embedding."""


def _of(arch: str, *, settings: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {"arch": arch, "settings": settings or {}, **changes}


MECHANISMS: dict[str, dict[str, Any]] = {
    "gemma2": _of(
        "gemma2",
        n_layers=3,
        tied=True,
        settings={**WINDOW, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0},
    ),
    "phi3-short": _of("phi3", **NARROW, fused_qkv=True, **BY_LENGTH, settings=SHORT),
    "phi3-long": _of(
        "phi3", **NARROW, fused_qkv=True, tied=True, **BY_LENGTH, settings={**LONG, **PARTLY}
    ),
    "phi2": _of("phi2", n_heads=2, fused_qkv=True, biases=(*ALL_BIASES, "output"), settings=PARTLY),
    "granite": _of("granite", tied=True, settings=GRANITE),
    "olmo3": _of("olmo2", **NARROW, n_layers=4, settings={**WINDOW, **YARN}),
    "cohere2": _of(
        "cohere2", **NARROW, n_layers=4, tied=True, settings={**WINDOW, "logit_scale": 0.5}
    ),
    "hunyuan-dense": _of("hunyuan-dense", tied=True, settings={"rope.scaling.alpha": 50.0}),
    "nemotron": _of("nemotron", **NARROW, settings=PARTLY),
    "apertus": _of("apertus", freq_factors=True, settings=XIELU),
    "stablelm-parallel": _of(
        "stablelm", **NARROW, shape="parallel", settings={"rope.dimension_count": 16}
    ),
    "gpt2": _of(
        "gpt2", n_heads=2, n_kv_heads=2, fused_qkv=True, tied=True, biases=ALL_BIASES, n_ctx=600
    ),
    "bitnet": _of("bitnet", **NARROW, tied=True),
    "bloom": _of("bloom", n_heads=2, n_kv_heads=2, fused_qkv=True, tied=True, biases=ALL_BIASES),
    "mpt": _of(
        "mpt",
        n_embd=384,
        n_heads=6,
        n_kv_heads=6,
        fused_qkv=True,
        settings={"attention.max_alibi_bias": 4.0, "attention.clamp_kqv": 0.9},
    ),
    "olmo-clamped": _of("olmo", **NARROW, settings={"attention.clamp_kqv": 0.8}),
    "openelm": _of(
        "openelm", n_heads=(4, 6), n_kv_heads=(2, 3), n_ff=(96, 160), fused_qkv=True, tied=True
    ),
    "granite_swa": _of(
        "granite_swa",
        n_layers=4,
        settings={
            **GRANITE,
            **WINDOW,
            "attention.sliding_window_pattern": [True, False, True, False],
            "attention.rope_pattern": [True, False, False, True],
        },
    ),
}
"""One of each mechanism."""

DENSE: dict[str, dict[str, Any]] = {
    **MECHANISMS,
    "command-r-plus": _of(
        "command-r",
        shape="plus",
        n_layers=64,
        n_embd=32,
        n_ff=32,
        head_dim=16,
        n_heads=2,
        n_kv_heads=1,
        tied=True,
        settings={"logit_scale": 0.5},
    ),
    "gemma": _of("gemma", tied=True, n_kv_heads=1),
    "granite-no-rope": _of("granite", settings={**GRANITE, "rope.scaling.finetuned": False}),
    "minicpm": _of(
        "minicpm",
        **BY_LENGTH,
        settings={**GRANITE, **LONG, "attention.scale": 0.0, "rope.scaling.type": "longrope"},
    ),
    "llama-longrope": _of("llama", **BY_LENGTH, settings={**LONG, "rope.scaling.type": "longrope"}),
    "olmo": _of("olmo", **NARROW),
    "olmo2": _of("olmo2", n_heads=2),
    "glm4": _of("glm4", biases=QKV, settings=PARTLY),
    "chatglm": _of("chatglm", **NARROW, biases=QKV, fused_qkv=True, settings=PARTLY),
    "exaone": _of("exaone", freq_factors=True),
    "exaone4": _of("exaone4", **NARROW, freq_factors=True),
    "exaone4-32b": _of(
        "exaone4",
        shape="32b",
        n_layers=64,
        n_embd=32,
        n_ff=32,
        head_dim=16,
        n_heads=2,
        n_kv_heads=1,
        settings=WINDOW,
    ),
    "internlm2": _of("internlm2", **NARROW),
    "xverse": _of("xverse", n_heads=2),
    "baichuan": _of(
        "baichuan", n_layers=32, n_embd=64, n_ff=64, n_heads=2, n_kv_heads=2, head_dim=32
    ),
    "nanbeige": _of("nanbeige", freq_factors=True),
    "pangu-embedded": _of("pangu-embedded", biases=(*QKV, "attn_output")),
    "maincoder": _of("maincoder"),
    "paddleocr": _of("paddleocr", settings={"rope.dimension_sections": [8, 12, 12, 0]}),
    "cogvlm": _of(
        "cogvlm", n_kv_heads=4, n_embd=256, fused_qkv=True, settings={"rope.freq_base": 5e5}
    ),
    "seed_oss": _of("seed_oss", biases=QKV),
    "ernie4_5": _of("ernie4_5", tied=True),
    "arcee": _of("arcee", settings=YARN),
    "qwen": _of("qwen", n_kv_heads=4, n_embd=256, fused_qkv=True, biases=QKV),
    "qwen2vl": _of("qwen2vl", **NARROW, biases=QKV, settings=SECTIONS),
    "qwen3vl": _of("qwen3vl", tied=True, settings={**SECTIONS, "rope.freq_base": 5e6}),
    "hunyuan_vl": _of("hunyuan_vl", tied=True, settings=SECTIONS),
    "starcoder2": _of("starcoder2", **NARROW, biases=ALL_BIASES),
    "starcoder": _of("starcoder", n_heads=2, n_kv_heads=1, fused_qkv=True, biases=ALL_BIASES),
    "jais": _of(
        "jais",
        n_heads=2,
        n_kv_heads=2,
        fused_qkv=True,
        biases=(*ALL_BIASES, "ffn_gate"),
        settings={"attention.max_alibi_bias": 6.0},
    ),
    "refact": _of("refact", n_kv_heads=1),
    "baichuan-13b": _of(
        "baichuan",
        shape="13b",
        n_layers=40,
        n_embd=64,
        n_ff=64,
        n_heads=2,
        n_kv_heads=2,
        head_dim=32,
    ),
    "codeshell": _of("codeshell", **NARROW, biases=ALL_BIASES),
    "jais2": _of("jais2", biases=ALL_BIASES),
    "gptneox": _of(
        "gptneox",
        fused_qkv=True,
        biases=ALL_BIASES,
        settings={**PARTLY, "use_parallel_residual": True},
        n_kv_heads=4,
        n_embd=256,
    ),
    "falcon": _of("falcon", fused_qkv=True, n_embd=256, n_kv_heads=1),
    "falcon-40b": _of("falcon", shape="40b", fused_qkv=True, n_embd=256),
    "orion": _of("orion", **NARROW),
    "stablelm": _of("stablelm", **NARROW, biases=QKV, settings={"rope.dimension_count": 16}),
    "plamo": _of("plamo", **NARROW),
    "plamo3": _of(
        "plamo3",
        n_layers=3,
        fused_qkv=True,
        settings={
            **WINDOW,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base": 1e5,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 4.0,
        },
    ),
    "deci": _of("deci", n_layers=3, n_heads=(4, 0, 6), n_kv_heads=(2, 0, 3), n_ff=(96, 160, 64)),
}
"""All of them, the larger shapes of some among them."""


def dense_variant(name: str) -> RandomModel:
    return RandomModel(**DENSE[name])
