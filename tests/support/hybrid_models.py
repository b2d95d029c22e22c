"""Small random models with recurrent layers, on which every part of the forward pass matters.

`tests/data/make_llama_cpp_hybrids.py` writes them, too, and stores llama.cpp's logits of those that
conformance data has not; `float64_hybrid.py` evaluates them all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

N_EMBD, HEAD, N_HEADS, N_KV_HEADS, N_FF, N_VOCAB, N_LAYERS = 128, 64, 2, 1, 96, 96, 4
N_EXPERTS, N_SHARED = 8, 64
IDS = [(i * 37 + 11) % N_VOCAB for i in range(60)]
SHOWN = (3, 17, 38, 59)
"""Positions whose logits are stored."""
EPS = 1e-5

SSM = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 256,
    "ssm.state_size": 32,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
}
NET = {**SSM, "ssm.state_size": 64}
LAYERS = {
    "qwen35": ["delta", "delta", "delta", "gated"],
    "lfm2": ["conv", "attention", "conv", "attention"],
    "granitehybrid": ["mamba", "attention", "mamba", "attention"],
    "nemotron_h": ["mamba", "attention", "mlp", "mamba"],
    "nemotron_h_moe": ["mamba", "experts", "attention", "experts"],
    "nemotron_h_super": ["mamba", "experts", "attention", "experts"],
    "falcon-h1": ["both"] * 4,
    "kimi-linear": ["kimi", "kimi", "latent", "kimi"],
    "bailingmoe3": ["kimi", "latent", "kimi", "latent"],
    "qwen35moe": ["delta", "delta", "delta", "gated"],
    "qwen3next": ["delta", "delta", "delta", "gated"],
    "deepseek2": ["latent"] * 4,
}
"""The kinds of layers that each architecture has."""
HEADS = {"nemotron_h_moe": "attention and experts", "bailingmoe3": "latent", "deepseek2": "latent"}
"""What the block is that predicts a further token; "gated" in Qwen's architectures."""


@dataclass
class HybridModel:
    """A model as its file has it; `tensors` are float64.

    Attributes:
        architecture: one of `LAYERS`.
        keys: without the architecture's prefix, and without sizes.
        predicts: a block behind the layers predicts a further token.
        in_f32: matrices that are F32 in the file.
    """

    architecture: str
    keys: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    predicts: bool = False
    in_f32: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(sum(self.architecture.encode()))
        self._matrix("token_embd", N_VOCAB, N_EMBD, gain=np.sqrt(N_EMBD))
        self._matrix("output", N_VOCAB, N_EMBD)
        final = "token_embd_norm" if self.architecture == "lfm2" else "output_norm"
        self._vector(f"{final}.weight", N_EMBD)
        for i, kind in enumerate(LAYERS[self.architecture]):
            self._layer(f"blk.{i}.", kind)
        if self.predicts:
            at = f"blk.{N_LAYERS}."
            self._layer(at, self.layers[-1])
            self._matrix(f"{at}nextn.eh_proj", N_EMBD, 2 * N_EMBD, gain=1.4)
            bailing = self.architecture == "bailingmoe3"
            last = "layer_output_norm" if bailing else "nextn.shared_head_norm"
            for name in ("nextn.enorm", "nextn.hnorm", last):
                self._vector(f"{at}{name}.weight", N_EMBD)
            self.keys = {**self.keys, "block_count": N_LAYERS + 1, "nextn_predict_layers": 1}

    @property
    def layers(self) -> list[str]:
        """What each block is, the one that predicts at the end."""
        head = HEADS.get(self.architecture, "gated")
        return [*LAYERS[self.architecture], *([head] * self.predicts)]

    @property
    def _norm_kind(self) -> str:
        """What Nemotron-H's files call it, whose norms are RMSNorm, too."""
        return "layer_norm" if self.has_lone_blocks else "layer_norm_rms"

    @property
    def has_kimi_layers(self) -> bool:
        """Whether it has Kimi Delta Attention, with experts and latent attention."""
        return "kimi" in self.layers

    @property
    def has_qwen_experts(self) -> bool:
        return self.architecture in ("qwen35moe", "qwen3next")

    @property
    def has_lone_blocks(self) -> bool:
        """Whether a layer is a mixer or a feed-forward block (Nemotron-H)."""
        return self.architecture.startswith("nemotron_h")

    def all_keys(self) -> dict[str, Any]:
        kinds = self.layers
        attending = ("attention", "gated", "both", "latent", "attention and experts")
        kv_heads = [N_KV_HEADS * (kind in attending) for kind in kinds]
        widths = [N_FF * (kind == "mlp" or "experts" in kind) for kind in kinds]
        per_layer = self.has_lone_blocks or self.architecture in ("lfm2", "granitehybrid")
        per_layer = per_layer or self.has_kimi_layers
        return {
            "block_count": N_LAYERS,
            "context_length": 512,
            "vocab_size": N_VOCAB,
            "embedding_length": N_EMBD,
            "feed_forward_length": widths if self.has_lone_blocks else N_FF,
            "attention.head_count": N_HEADS,
            "attention.head_count_kv": kv_heads if per_layer else N_KV_HEADS,
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
            f"attention.{self._norm_kind}_epsilon": EPS,
            "rope.dimension_count": HEAD,
            **self.keys,
        }

    def key(self, name: str) -> Any:
        return self.all_keys()[name]

    def write(self, path: Path) -> Path:
        """Matrices in F16, vectors in F32."""
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_string("tokenizer.ggml.model", "no_vocab")
        for key, value in self.all_keys().items():
            name = f"{self.architecture}.{key}"
            if isinstance(value, list):
                writer.add_array(name, value)
            elif isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            else:
                writer.add_uint32(name, value)
        for name, values in self.tensors.items():
            small = values.ndim == 1 or "conv" in name or name.endswith(("ssm_a", "ssm_d", "norm"))
            small |= "ssm_norm" in name or "ffn_gate_inp" in name or name in self.in_f32
            if "shortconv" in name and "proj" in name:
                small = False
            writer.add_tensor(name, values.astype(np.float32 if small else np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        values = self.rng.standard_normal(shape) * gain / np.sqrt(shape[-1])
        self.tensors[f"{name}.weight"] = values.astype(np.float16).astype(np.float64)

    def _vector(self, name: str, *shape: int, centre: float = 1.0, spread: float = 0.3) -> None:
        values = centre + spread * self.rng.standard_normal(shape)
        self.tensors[name] = values.astype(np.float32).astype(np.float64)

    def _layer(self, at: str, kind: str) -> None:
        self._vector(f"{at}attn_norm.weight", N_EMBD)
        if kind in ("attention", "gated", "both", "attention and experts"):
            q = N_HEADS * HEAD
            self._matrix(f"{at}attn_q", 2 * q if kind == "gated" else q, N_EMBD, gain=1.3)
            self._matrix(f"{at}attn_k", N_KV_HEADS * HEAD, N_EMBD, gain=1.3)
            self._matrix(f"{at}attn_v", N_KV_HEADS * HEAD, N_EMBD)
            self._matrix(f"{at}attn_output", N_EMBD, q)
            if self.architecture == "lfm2" or kind == "gated":
                self._vector(f"{at}attn_q_norm.weight", HEAD, centre=1.3)
                self._vector(f"{at}attn_k_norm.weight", HEAD, centre=1.3)
        if kind in ("mamba", "both"):
            self._mamba(at)
        if kind == "delta":
            self._delta(at)
        if kind == "kimi":
            self._kimi(at)
        if kind == "latent":
            self._latent(at)
        if kind == "conv":
            self._matrix(f"{at}shortconv.in_proj", 3 * N_EMBD, N_EMBD, gain=1.3)
            self._vector(f"{at}shortconv.conv.weight", N_EMBD, 3, centre=0.0, spread=0.8)
            self._matrix(f"{at}shortconv.out_proj", N_EMBD, N_EMBD)
        self._ffn(at, kind)

    def _ffn(self, at: str, kind: str) -> None:
        if self.has_lone_blocks:
            if kind == "mlp":
                self._matrix(f"{at}ffn_up", N_FF, N_EMBD)
                self._matrix(f"{at}ffn_down", N_EMBD, N_FF)
            if kind == "attention and experts":
                self._vector(f"{at}post_attention_norm.weight", N_EMBD)
            if "experts" in kind:
                self._experts(at)
            return
        name = {
            **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), "post_attention_norm.weight"),
            "falcon-h1": "ffn_norm",
        }
        self._vector(f"{at}{name.get(self.architecture, 'ffn_norm.weight')}", N_EMBD)
        latent = self.has_kimi_layers or self.architecture == "deepseek2"
        if self.has_qwen_experts or (latent and at != "blk.0."):
            self._experts(at, gated=True)
            return
        self._matrix(f"{at}ffn_gate", N_FF, N_EMBD)
        self._matrix(f"{at}ffn_up", N_FF, N_EMBD)
        self._matrix(f"{at}ffn_down", N_EMBD, N_FF)

    def _experts(self, at: str, *, gated: bool = False) -> None:
        """Blocks, which a router of F32 chooses among, and a shared one."""
        n_shared = self.keys.get("expert_shared_feed_forward_length", N_FF)
        if gated:
            self._matrix(f"{at}ffn_gate_exps", N_EXPERTS, N_FF, N_EMBD)
            self._matrix(f"{at}ffn_gate_shexp", n_shared, N_EMBD)
        self._matrix(f"{at}ffn_gate_inp", N_EXPERTS, N_EMBD, gain=2.0)
        latent = self.keys.get("moe_latent_size", 0)
        self._matrix(f"{at}ffn_up_exps", N_EXPERTS, N_FF, latent or N_EMBD)
        self._matrix(f"{at}ffn_down_exps", N_EXPERTS, latent or N_EMBD, N_FF, gain=1.5)
        if latent:
            self._matrix(f"{at}ffn_latent_down", latent, N_EMBD)
            self._matrix(f"{at}ffn_latent_up", N_EMBD, latent)
        if self.has_qwen_experts:
            self._vector(f"{at}ffn_gate_inp_shexp.weight", N_EMBD, centre=0.0)
        else:
            self._vector(f"{at}exp_probs_b.bias", N_EXPERTS, centre=0.0)
        self._matrix(f"{at}ffn_up_shexp", n_shared, N_EMBD)
        self._matrix(f"{at}ffn_down_shexp", N_EMBD, n_shared)

    def _mamba(self, at: str) -> None:
        width, state = self.keys["ssm.inner_size"], self.keys["ssm.state_size"]
        heads, groups = self.keys["ssm.time_step_rank"], self.keys["ssm.group_count"]
        channels = width + 2 * groups * state
        self._matrix(f"{at}ssm_in", width + channels + heads, N_EMBD, gain=1.3)
        self._vector(f"{at}ssm_conv1d.weight", channels, 4, centre=0.0, spread=0.6)
        self._vector(f"{at}ssm_conv1d.bias", channels, centre=0.0)
        self._vector(f"{at}ssm_dt.bias", heads, centre=-1.0)
        self.tensors[f"{at}ssm_a"] = -np.linspace(0.1, 2.0, heads, dtype=np.float32)[:, None]
        self._vector(f"{at}ssm_d", heads, 1)
        self._vector(f"{at}ssm_norm.weight", groups, width // groups)
        self._matrix(f"{at}ssm_out", N_EMBD, width)

    def _delta(self, at: str) -> None:
        size, keys = self.keys["ssm.state_size"], self.keys["ssm.group_count"]
        values = self.keys["ssm.time_step_rank"]
        channels = (2 * keys + values) * size
        self._matrix(f"{at}attn_qkv", channels, N_EMBD, gain=1.3)
        self._matrix(f"{at}attn_gate", values * size, N_EMBD)
        self._vector(f"{at}ssm_conv1d.weight", channels, 4, centre=0.0, spread=0.6)
        self._vector(f"{at}ssm_dt.bias", values, centre=-1.0)
        self.tensors[f"{at}ssm_a"] = -np.linspace(0.1, 2.0, values, dtype=np.float32)
        if self.architecture == "qwen3next":
            self._matrix(f"{at}ssm_ba", 2 * values, N_EMBD)
        else:
            self._matrix(f"{at}ssm_beta", values, N_EMBD)
            self._matrix(f"{at}ssm_alpha", values, N_EMBD)
        self._vector(f"{at}ssm_norm.weight", size)
        self._matrix(f"{at}ssm_out", N_EMBD, values * size)

    def _kimi(self, at: str) -> None:
        width, heads, rank = N_HEADS * HEAD, N_HEADS, HEAD
        for part in ("q", "k", "v"):
            self._matrix(f"{at}attn_{part}", width, N_EMBD, gain=1.3)
            name = f"{at}ssm_conv1d_{part}.weight"
            self._vector(name, 1, width, 1, 4, centre=0.0, spread=0.6)
        bounded = "kda.gate_lower_bound" in self.keys
        for part in ("f", "g"):
            self._matrix(f"{at}ssm_{part}_a", width if bounded else rank, N_EMBD)
            if not bounded:
                self._matrix(f"{at}ssm_{part}_b", width, rank)
        self._matrix(f"{at}ssm_beta", heads, N_EMBD)
        self._vector(f"{at}ssm_dt.bias", width, centre=-1.0)
        rates = np.linspace(0.5, 2.0, heads, dtype=np.float32)[:, None]
        self.tensors[f"{at}ssm_a"] = rates if bounded else -rates
        self._vector(f"{at}ssm_norm.weight", HEAD)
        self._matrix(f"{at}attn_output", N_EMBD, width)

    def _latent(self, at: str) -> None:
        latent, rope = self.keys["attention.kv_lora_rank"], self.keys["rope.dimension_count"]
        key, value = (self.keys[f"attention.{part}_length_mla"] for part in ("key", "value"))
        rank = self.keys.get("attention.q_lora_rank", 0)
        if rank:
            self._matrix(f"{at}attn_q_a", rank, N_EMBD)
            self._vector(f"{at}attn_q_a_norm.weight", rank)
            self._matrix(f"{at}attn_q_b", N_HEADS * key, rank, gain=1.3)
        else:
            self._matrix(f"{at}attn_q", N_HEADS * key, N_EMBD, gain=1.3)
        self._matrix(f"{at}attn_kv_a_mqa", latent + rope, N_EMBD, gain=1.3)
        self._vector(f"{at}attn_kv_a_norm.weight", latent)
        self._matrix(f"{at}attn_k_b", N_HEADS, latent, key - rope)
        self._matrix(f"{at}attn_v_b", N_HEADS, value, latent)
        if "kda.gate_lower_bound" in self.keys:
            self._matrix(f"{at}attn_gate", N_HEADS, N_EMBD, gain=2.0)
        self._matrix(f"{at}attn_output", N_EMBD, N_HEADS * value)


LATENT = {
    "attention.kv_lora_rank": 64,
    "attention.key_length": 96,
    "attention.value_length": 64,
    "attention.key_length_mla": 80,
    "attention.value_length_mla": 48,
    "rope.dimension_count": 32,
}
EXPERTS = {
    "expert_count": N_EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": N_FF,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_weights_scale": 2.5,
    "leading_dense_block_count": 1,
}
QWEN_EXPERTS = {
    "expert_count": N_EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": N_FF,
    "expert_shared_feed_forward_length": N_SHARED,
}
SCALES = {"embedding_scale": 2.0, "residual_scale": 0.7, "logit_scale": 3.0, "attention.scale": 0.2}
KEYS: dict[str, dict[str, Any]] = {
    "qwen35": {**NET, "full_attention_interval": 4, "rope.dimension_sections": [11, 11, 10, 0]},
    "lfm2": {"shortconv.l_cache": 3},
    "granitehybrid": {**SSM, **SCALES},
    "nemotron_h": SSM,
    "nemotron_h_moe": {
        **SSM,
        "expert_count": N_EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": N_FF,
        "expert_shared_feed_forward_length": N_SHARED,
        "expert_shared_count": 1,
        "expert_group_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
    },
    "nemotron_h_super": {
        **SSM,
        "expert_count": N_EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": N_FF,
        "expert_shared_feed_forward_length": N_SHARED,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "moe_latent_size": 64,
    },
    "falcon-h1": {**SSM, "rope.freq_base": 100000.0},
    "kimi-linear": {**LATENT, **EXPERTS, "ssm.conv_kernel": 4, "kda.head_dim": HEAD},
    "bailingmoe3": {
        **LATENT,
        **EXPERTS,
        "attention.q_lora_rank": 48,
        "expert_weights_norm": True,
        "expert_shared_feed_forward_length": N_SHARED,
        "ssm.conv_kernel": 4,
        "kda.head_dim": HEAD,
        "kda.gate_lower_bound": -5.0,
        "swiglu_clamp_exp": [0.0, 0.0, 0.8, 0.6],
        "swiglu_clamp_shexp": [0.0, 0.5, 0.0, 0.7],
    },
}

MORE_KEYS: dict[str, dict[str, Any]] = {
    "qwen35moe": {
        **NET,
        **QWEN_EXPERTS,
        "full_attention_interval": 4,
        "rope.dimension_sections": [11, 11, 10, 0],
    },
    "qwen3next": {**NET, **QWEN_EXPERTS, "full_attention_interval": 4},
    "deepseek2": {**LATENT, **EXPERTS, "attention.q_lora_rank": 48, "expert_weights_norm": True},
}
"""Architectures whose blocks that predict are tested here, and their layers elsewhere."""


def hybrid(architecture: str, *, predicts: bool = False) -> HybridModel:
    name = "nemotron_h_moe" if architecture == "nemotron_h_super" else architecture
    keys = KEYS[architecture] if architecture in KEYS else MORE_KEYS[architecture]
    if predicts:
        limits = {key: [*keys[key], 0.4] for key in keys if key.startswith("swiglu")}
        keys = {**keys, **limits}
    return HybridModel(name, keys, predicts=predicts)
