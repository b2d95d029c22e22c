"""Small random models on which every part of the forward pass matters, written as GGUF files.

Attention is sharp (logits spread over several units), heads are grouped, experts are routed, RoPE
is scaled: a mistake in any of these moves the logits by far more than the tests allow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType

from support.traits import SHAPES, TRAITS, Traits


@dataclass
class RandomModel:
    """Sizes, settings and float64 weights of a model; `write` makes a GGUF file of it.

    `settings` are metadata without the architecture's prefix, e.g. "rope.scaling.type". `n_heads`,
    `n_kv_heads` and `n_ff` may be tuples, with a number for each layer. `shape` is one of `SHAPES`.
    """

    arch: str = "llama"
    n_layers: int = 2
    n_embd: int = 128
    n_heads: int | tuple[int, ...] = 4
    n_kv_heads: int | tuple[int, ...] = 2
    head_dim: int = 64
    n_ff: int | tuple[int, ...] = 160
    n_vocab: int = 96
    n_ctx: int = 1024
    tied: bool = False
    biases: tuple[str, ...] = ()
    freq_factors: bool = False
    long_factors: bool = False
    shape: str = ""
    fused_qkv: bool = False
    separate_biases: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self._make()

    @property
    def traits(self) -> Traits:
        return SHAPES[self.arch, self.shape] if self.shape else TRAITS.get(self.arch, Traits())

    def heads(self, layer: int) -> tuple[int, int]:
        """Heads of q, and of K and V, of a layer."""
        return _of(self.n_heads, layer), _of(self.n_kv_heads, layer)

    def setting(self, key: str, default: Any = None) -> Any:
        return self.settings.get(key, default)

    def _matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        values = self.rng.standard_normal(shape) * gain / np.sqrt(shape[-1])
        self.tensors[f"{name}.weight"] = values.astype(np.float16).astype(np.float64)
        if name.rsplit(".", 1)[-1] in self.biases:
            self._vector(f"{name}.bias", shape[-2], centre=0.0)

    def _vector(self, name: str, *shape: int, centre: float = 1.0) -> None:
        values = centre + 0.3 * self.rng.standard_normal(shape)
        self.tensors[name] = values.astype(np.float32).astype(np.float64)

    def _norm(self, name: str, size: int) -> None:
        """A norm of x, if the architecture's have weights."""
        if self.traits.norm != "bare" and f"{name}.weight" not in self.tensors:
            self._vector(f"{name}.weight", size)
            if self.traits.norm == "layer+b":
                self._vector(f"{name}.bias", size, centre=0.0)

    def _make(self) -> None:
        d = self.n_embd
        gain = 1.0 if self.traits.embedding_by_width else np.sqrt(d)
        self._matrix("token_embd", self.n_vocab, d, gain=gain)
        if self.traits.normed_embedding:
            self._norm("token_embd_norm", d)
        if self.traits.positions:
            self._matrix("position_embd", self.n_ctx, d, gain=gain / 2)
        if not self.tied:
            self._matrix("output", self.n_vocab, d)
        self._norm("output_norm", d)
        half = self.setting("rope.dimension_count", self.head_dim) // 2
        factors = {"rope_freqs": 8.0} if self.freq_factors else {}
        factors |= (
            {"rope_factors_short": 3.0, "rope_factors_long": 20.0} if self.long_factors else {}
        )
        for name, largest in factors.items():
            values = np.linspace(1.0, largest, half).astype(np.float32)
            self.tensors[f"{name}.weight"] = values.astype(np.float64)
        for layer in range(self.n_layers):
            at = f"blk.{layer}"
            if self.heads(layer)[0]:
                self._make_attention(at, *self.heads(layer))
            n_ff = _of(self.n_ff, layer)
            if n_ff and self.traits.ffn_norm:
                self._norm(f"{at}.{self.traits.ffn_norm}", d)
            if self.traits.post_norms:
                self._vector(f"{at}.post_attention_norm.weight", d)
                self._vector(f"{at}.post_ffw_norm.weight", d)
            if n_ff:
                self._make_ffn(at, n_ff)
            if self.fused_qkv:
                self._fuse(at)

    def _make_attention(self, at: str, n_heads: int, n_kv_heads: int) -> None:
        d, q, kv = self.n_embd, n_heads * self.head_dim, n_kv_heads * self.head_dim
        if self.traits.attn_norm:
            self._norm(f"{at}.{self.traits.attn_norm}", d)
        self._matrix(f"{at}.attn_q", q, d, gain=1.7)
        self._matrix(f"{at}.attn_k", kv, d, gain=1.7)
        self._matrix(f"{at}.attn_v", kv, d)
        self._matrix(f"{at}.attn_output", d, q)
        if self.traits.sub_norms:
            self._vector(f"{at}.attn_sub_norm.weight", q)
            self._vector(f"{at}.ffn_sub_norm.weight", _of(self.n_ff, 0))
        if self.traits.qk_norm:
            for x, n in (("q", n_heads), ("k", n_kv_heads)):
                shapes = {"head": (self.head_dim,), "heads": (n, self.head_dim)}
                shape = shapes.get(self.traits.qk_norm, (n * self.head_dim,))
                self._vector(f"{at}.attn_{x}_norm.weight", *shape, centre=1.7)
        if self.arch == "cogvlm":  # weights for images, which text has no use for
            for name in ("attn_qkv", "attn_output", "gate", "up", "down"):
                n_in = _of(self.n_ff, 0) if name == "down" else d
                wide = {"attn_qkv": 3 * q, "gate": _of(self.n_ff, 0), "up": _of(self.n_ff, 0)}
                n_out = wide.get(name, d)
                self._matrix(f"{at}.vis_{name}", n_out, n_in)
        if self.traits.sinks:
            self._vector(f"{at}.attn_sinks.weight", n_heads, centre=2.0)

    def _make_ffn(self, at: str, n_ff: int) -> None:
        d, n_experts = self.n_embd, self.setting("expert_count", 0)
        if not n_experts:
            self._make_mlp(f"{at}.ffn_", n_ff // 2 if self.traits.half_width else n_ff)
            return
        width = self.setting("expert_feed_forward_length", n_ff)
        self._matrix(f"{at}.ffn_gate_inp", n_experts, d, gain=2.0)
        self._matrix(f"{at}.ffn_gate_exps", n_experts, width, d)
        self._matrix(f"{at}.ffn_up_exps", n_experts, width, d)
        self._matrix(f"{at}.ffn_down_exps", n_experts, d, width)
        if self.arch == "qwen2moe":
            self._swiglu(f"{at}.ffn_", "_shexp", self.setting("expert_shared_feed_forward_length"))
            self._vector(f"{at}.ffn_gate_inp_shexp.weight", d, centre=0.0)

    def _make_mlp(self, prefix: str, width: int) -> None:
        if self.traits.gated and not self.traits.fused_up:
            self._swiglu(prefix, "", width)
            return
        self._matrix(f"{prefix}up", 2 * width if self.traits.fused_up else width, self.n_embd)
        self._matrix(f"{prefix}down", self.n_embd, width)

    def _swiglu(self, prefix: str, suffix: str, width: int) -> None:
        self._matrix(f"{prefix}gate{suffix}", width, self.n_embd)
        self._matrix(f"{prefix}up{suffix}", width, self.n_embd)
        self._matrix(f"{prefix}down{suffix}", self.n_embd, width)

    def _fuse(self, at: str) -> None:
        for kind in ("weight", "bias"):
            names = [f"{at}.attn_{x}.{kind}" for x in "qkv"]
            if names[0] in self.tensors:
                parts = [self.tensors[name] for name in names]
                self.tensors[f"{at}.attn_qkv.{kind}"] = np.concatenate(parts)

    def stored_tensors(self) -> dict[str, np.ndarray]:
        """What the file holds: fused q, k, v instead of the three, if so asked.

        With `separate_biases` their biases are as they were.
        """
        split = (".attn_q.", ".attn_k.", ".attn_v.")
        return {
            name: values
            for name, values in self.tensors.items()
            if not (self.fused_qkv and any(part in name for part in split))
            or (self.separate_biases and name.endswith(".bias"))
        }

    def _name_in_file(self, name: str) -> str:
        if self.arch == "plamo3" and ".post_" in name:
            return name.removesuffix(".weight")
        return name

    def keys(self) -> dict[str, Any]:
        """The file's metadata."""
        kind = "layer_norm_rms" if self.traits.norm == "rms" else "layer_norm"
        keys = {
            "block_count": self.n_layers,
            "context_length": self.n_ctx,
            "embedding_length": self.n_embd,
            "vocab_size": self.n_vocab,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_heads,
            "attention.head_count_kv": self.n_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            **self.settings,
            f"attention.{kind}_epsilon": 1e-5,
        }
        return {
            key if key.startswith("xielu.") else f"{self.arch}.{key}": list(value)
            if isinstance(value, tuple)
            else value
            for key, value in keys.items()
        }

    def write(self, path: Path, weight_type: GGMLType = GGMLType.F16) -> Path:
        """Write the file, matrices in `weight_type`; `tensors` then hold what it decodes to."""
        writer = gguf.GGUFWriter(path, self.arch)
        writer.add_tokenizer_model("no_vocab")
        for name, value in self.keys().items():
            if isinstance(value, list):
                writer.add_array(name, value)
            elif isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, str):
                writer.add_string(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            else:
                writer.add_uint32(name, value)
        for name, values in self.stored_tensors().items():
            is_matrix = values.ndim > 1 and not name.endswith("norm.weight")
            kind = weight_type if is_matrix else GGMLType.F32
            packed = gguf.quants.quantize(values.astype(np.float32), kind)
            writer.add_tensor(self._name_in_file(name), packed, raw_dtype=kind)
            self.tensors[name] = gguf.quants.dequantize(packed, kind).astype(np.float64)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _of(value: int | tuple[int, ...], layer: int) -> int:
    return value if isinstance(value, int) else value[layer]


MOE = {"expert_count": 6, "expert_used_count": 2}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tied": True},
    "llama-mha": {"n_kv_heads": 4},
    "llama-mqa": {"n_kv_heads": 1},
    "llama-hd80": {"head_dim": 80},
    "llama-partial-rope": {"settings": {"rope.dimension_count": 32}},
    "llama-biases": {"biases": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down")},
    "llama-linear": {"settings": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}},
    "llama-yarn": {"settings": YARN},
    "llama3-freqs": {"freq_factors": True, "settings": {"rope.freq_base": 500000.0}},
    "llama-moe": {"settings": MOE},
    "llama-fused-qkv": {"fused_qkv": True, "biases": ("attn_q", "attn_k", "attn_v")},
    "mistral3": {
        "arch": "mistral3",
        "settings": {
            **YARN,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.1,
        },
    },
    "smollm3": {"arch": "smollm3", "n_layers": 4},
    "qwen2": {"arch": "qwen2", "biases": ("attn_q", "attn_k", "attn_v")},
    "qwen2moe": {
        "arch": "qwen2moe",
        "biases": ("attn_q", "attn_k", "attn_v"),
        "settings": {
            **MOE,
            "expert_feed_forward_length": 64,
            "expert_shared_feed_forward_length": 96,
        },
    },
    "qwen3": {"arch": "qwen3"},
    "qwen3moe": {"arch": "qwen3moe", "settings": {**MOE, "expert_feed_forward_length": 64}},
    "gemma3": {
        "arch": "gemma3",
        "n_layers": 3,
        "tied": True,
        "settings": {
            "attention.sliding_window": 7,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base": 100000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 4.0,
            "final_logit_softcapping": 5.0,
        },
    },
    "command-r": {"arch": "command-r", "tied": True, "settings": {"logit_scale": 0.5}},
}
"""Arguments of `RandomModel` by name: every architecture, and every part of the graph."""


def variant(name: str, **changes: Any) -> RandomModel:
    return RandomModel(**{**VARIANTS[name], **changes})
