"""Models with RoPE options, whose logits tests/data/make_llama_cpp_rope.py stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as GGMLType

from support.random_model import VARIANTS, RandomModel

YARN: dict[str, Any] = {"rope_scaling": "yarn", "rope_scale": 4.0, "yarn_orig_ctx": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope_scaling": "linear", "rope_scale": 4.0}),
    "linear-by-frequency": ("qwen3", {"rope_freq_scale": 0.5}),
    "base": ("qwen3", {"rope_freq_base": 500000.0}),
    "yarn": ("qwen3", YARN),
    "yarn-numbers": (
        "llama",
        {**YARN, "yarn_ext_factor": 0.5, "yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0},
    ),
    "yarn-attention": ("llama", {**YARN, "yarn_ext_factor": 0.0, "yarn_attn_factor": 1.25}),
    "yarn-of-the-file": ("llama-yarn", {"rope_scale": 8.0}),
    "yarn-log-multiplier": ("mistral3", {"rope_scale": 2.0}),
    "linear-not-yarn": ("llama-yarn", {"rope_scaling": "linear"}),
    "none": ("llama-yarn", {"rope_scaling": "none"}),
    "windows": ("gemma3", {"rope_scale": 2.0, "rope_freq_base": 50000.0}),
    "windows-yarn": ("gemma3", YARN),
    "divisors": ("llama3-freqs", YARN),
}
"""A variant and options, by name."""


def write_case(name: str, path: Path) -> Path:
    """Matrices in F32, beside which llama.cpp doesn't round activations."""
    return RandomModel(**VARIANTS[CASES[name][0]]).write(path, GGMLType.F32)
