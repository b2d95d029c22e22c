"""Architectures: a file per family turns a model file's facts into a `ModelSpec`.

A new architecture is a function in a family's file and an entry in `FAMILIES`. A family's file is
imported when a model of that family is read. Its `CHECKPOINTS` say how Hugging Face's checkpoints
become such files.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localkv.arch.checkpoint import Checkpoint
    from localkv.arch.facts import Facts
    from localkv.arch.spec import ModelSpec

FAMILIES = {
    "llama": {
        "llama": "llama",
        "mistral3": "mistral3",
        "smollm3": "smollm3",
        "internlm2": "neighbours",
        "ernie4_5": "neighbours",
        "xverse": "neighbours",
        "chatglm": "neighbours",
        "baichuan": "baichuan",
        "bitnet": "bitnet",
        "refact": "refact",
        "nanbeige": "nanbeige",
        "paddleocr": "halves",
        "pangu-embedded": "pangu",
        "maincoder": "maincoder",
        "cogvlm": "cogvlm",
        "seed_oss": "seed_oss",
        "arcee": "arcee",
        "llama4": "llama4",
    },
    "qwen": {
        "qwen": "qwen",
        "qwen2vl": "qwen2vl",
        "qwen3vl": "qwen3vl",
        "qwen3vlmoe": "qwen3vlmoe",
        "qwen2": "qwen2",
        "qwen2moe": "qwen2moe",
        "qwen3": "qwen3",
        "qwen3moe": "qwen3moe",
        "qwen35": "qwen35",
        "qwen35moe": "qwen35moe",
        "qwen3next": "qwen3next",
    },
    "gemma": {
        "gemma": "gemma",
        "gemma2": "gemma2",
        "gemma3": "gemma3",
        "gemma3n": "gemma3n",
        "gemma4": "gemma4",
    },
    "dense": {
        "glm4": "glm4",
        "phi2": "phi2",
        "phi3": "phi3",
        "hunyuan-dense": "hunyuan_dense",
        "hunyuan_vl": "hunyuan_dense",
        "apertus": "apertus",
        "muse-glimmer": "muse_glimmer",
        "olmo": "olmo",
        "olmo2": "olmo2",
        "plamo": "plamo",
        "plamo3": "plamo3",
        "deci": "deci",
        "openelm": "openelm",
        "spark2_5": "spark",
    },
    "cohere": {"command-r": "command_r", "cohere2": "cohere2", "cohere2moe": "cohere2_moe"},
    "granite": {
        "granite": "granite",
        "granitemoe": "granite_moe",
        "granite_swa": "granite_swa",
        "minicpm": "minicpm",
    },
    "exaone": {"exaone": "exaone", "exaone4": "exaone4", "exaone-moe": "exaone_moe"},
    "layer_normed": {
        "bloom": "bloom",
        "codeshell": "ungated_gelu",
        "falcon": "falcon",
        "gpt2": "gpt2",
        "gptneox": "gptneox",
        "jais": "jais",
        "jais2": "ungated_relu2",
        "mpt": "mpt",
        "nemotron": "ungated_relu2",
        "orion": "orion",
        "stablelm": "stablelm",
        "starcoder": "gpt2",
        "starcoder2": "ungated_gelu",
    },
    "mixtures": {
        "olmoe": "olmoe",
        "dbrx": "dbrx",
        "grok": "grok",
        "phimoe": "phi_moe",
        "hunyuan-moe": "hunyuan_moe",
        "minimax-m2": "minimax_m2",
        "bailingmoe2": "bailingmoe2",
        "dots1": "dots1",
        "deepseek": "deepseek",
        "deepseek2-ocr": "deepseek_ocr",
        "bailingmoe": "bailingmoe",
        "hy_v3": "hunyuan3",
        "mellum": "mellum",
        "ernie4_5-moe": "ernie_moe",
        "glm4moe": "glm_moe",
        "gpt-oss": "gpt_oss",
        "smallthinker": "smallthinker",
        "afmoe": "afmoe",
        "step35": "step35",
        "laguna": "laguna",
        "mimo2": "mimo2",
        "maple": "maple",
    },
    "deepseek": {
        "deepseek2": "deepseek2",
        "mistral4": "mistral4",
        "minicpm3": "minicpm3",
        "plm": "plm",
    },
    "kimi": {"kimi-linear": "kimi_linear", "bailingmoe3": "ling3"},
    "bert": {
        "bert": "bert",
        "nomic-bert": "nomic_bert",
        "nomic-bert-moe": "nomic_bert_moe",
        "jina-bert-v2": "jina_bert_v2",
        "jina-bert-v3": "jina_bert_v3",
        "modern-bert": "modern_bert",
        "gemma-embedding": "gemma_embedding",
        "eurobert": "eurobert",
        "neo-bert": "neo_bert",
        "llama-embed": "llama_embed",
    },
    "lfm2": {"lfm2": "lfm2", "lfm2moe": "lfm2moe"},
    "mamba": {
        "granitehybrid": "granite_hybrid",
        "nemotron_h": "nemotron_h",
        "nemotron_h_moe": "nemotron_h",
        "falcon-h1": "falcon_h1",
    },
}
"""Each family's architectures, by `general.architecture`, and the functions of its file."""


def _spec(family: str, function: str, facts: Facts) -> ModelSpec:
    spec: ModelSpec = getattr(import_module(f"{__name__}.{family}"), function)(facts)
    return spec


ARCHS: dict[str, Callable[[Facts], ModelSpec]] = {
    architecture: partial(_spec, family, function)
    for family, functions in FAMILIES.items()
    for architecture, function in functions.items()
}
"""What makes the specification of each architecture."""


def checkpoints() -> dict[str, Checkpoint]:
    """The tables of all families, by transformers' classes of models."""
    found: dict[str, Checkpoint] = {}
    for family in FAMILIES:
        found |= getattr(import_module(f"{__name__}.{family}"), "CHECKPOINTS", {})
    return found


def checkpoint_of(class_name: str) -> Checkpoint | None:
    """How checkpoints of a class are converted; None if nobody knows."""
    return checkpoints().get(class_name)
