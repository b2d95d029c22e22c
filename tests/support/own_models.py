"""Small random models of architectures that conformance data has none of, without experts.

`tests/data/make_llama_cpp_dense.py` writes them, too, and stores llama.cpp's logits.
"""

from __future__ import annotations

from pathlib import Path

from gguf import GGMLQuantizationType as GGMLType

from support.dense_variants import dense_variant
from support.latent_models import latent_tensors, write_latent

DENSE = (
    *("bitnet", "bloom", "jais", "mpt", "refact"),
    *(
        "chatglm",
        "codeshell",
        "cogvlm",
        "deci",
        "exaone",
        "falcon",
        "falcon-40b",
        "gpt2",
        "gptneox",
    ),
    *(
        "granite_swa",
        "hunyuan_vl",
        "jais2",
        "maincoder",
        "minicpm",
        "nanbeige",
        "olmo",
        "olmo-clamped",
        "openelm",
    ),
    *("orion", "paddleocr", "pangu-embedded", "plamo", "plamo3", "qwen", "starcoder", "xverse"),
)
LATENT = ("minicpm3", "mistral4")
OWN = (*DENSE, *LATENT)
N_VOCAB = 96
IDS = [(i * 37 + 11) % N_VOCAB for i in range(40)]
SHOWN = (3, 17, 29, 39)
"""Positions whose logits are stored."""


def write_own(name: str, path: Path) -> Path:
    """Matrices in F32, beside which llama.cpp doesn't round activations."""
    if name in LATENT:
        return write_latent(path, name, latent_tensors(name))
    return dense_variant(name).write(path, GGMLType.F32)
