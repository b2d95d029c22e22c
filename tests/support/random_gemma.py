"""Small random models of Gemma 3n and 4, on which every part of the graph matters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType

D, P, RANK, EPS = 64, 32, 16, 1e-5
UNROTATED = 1e30


@dataclass
class RandomGemma:
    """Sizes, settings and float64 weights; `write` makes a GGUF file of it.

    Layers 0, 1 and 3 have a window, 2 and 4 don't; the last `shared` have no K and V. Full layers
    have heads of 128 channels in Gemma 4, all others of 64.
    """

    arch: str = "gemma4"
    shared: int = 2
    experts: bool = False
    v_from_k: bool = False
    per_layer: bool = True
    seed: int = 0
    n_vocab: int = 96
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    windows = (7, 7, 0, 7, 0)
    sparsity = (1.2, 0.5, 0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.n_layers = len(self.windows)
        self._make()

    def head_dim(self, layer: int) -> int:
        return 128 if self.arch == "gemma4" and not self.windows[layer] else 64

    def n_kv_heads(self, layer: int) -> int:
        return 1 if self.arch == "gemma4" and not self.windows[layer] else 2

    def source(self, layer: int) -> int:
        """The layer whose K and V it reads."""
        own = [i for i in range(self.n_layers - self.shared) if self.kind(i) == self.kind(layer)]
        return layer if layer < self.n_layers - self.shared else own[-1]

    def kind(self, layer: int) -> bool:
        return self.windows[layer] > 0

    def matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        values = self.rng.standard_normal(shape) * gain / np.sqrt(shape[-1])
        self.tensors[name] = values.astype(np.float32).astype(np.float64)

    def vector(self, name: str, size: int, centre: float = 1.0) -> None:
        values = centre + 0.3 * self.rng.standard_normal(size)
        self.tensors[name] = values.astype(np.float32).astype(np.float64)

    def _make(self) -> None:
        self.matrix("token_embd.weight", self.n_vocab, D)
        self.vector("output_norm.weight", D)
        if self.arch == "gemma4":
            factors = np.where(np.arange(64) < 16, 1.0, np.float32(UNROTATED))
            self.tensors["rope_freqs.weight"] = factors.astype(np.float64)
        if self.per_layer:
            width = self.n_layers * P
            self.matrix("per_layer_token_embd.weight", self.n_vocab, width, gain=np.sqrt(5))
            self.matrix("per_layer_model_proj.weight", width, D, gain=8)
            self.vector("per_layer_proj_norm.weight", P)
        if self.arch == "gemma3n":
            self.matrix("altup_proj.weight", 3, D, D)
            self.matrix("altup_unembd_proj.weight", 3, D, D)
        for layer in range(self.n_layers):
            self._make_layer(layer)

    def _make_layer(self, layer: int) -> None:
        at, d, kv = f"blk.{layer}.", self.head_dim(layer), self.n_kv_heads(layer)
        for name in ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"):
            self.vector(f"{at}{name}.weight", D)
        self.matrix(f"{at}attn_q.weight", 4 * d, D)
        self.matrix(f"{at}attn_output.weight", D, 4 * d)
        self.vector(f"{at}attn_q_norm.weight", d, centre=0.4)
        if layer < self.n_layers - self.shared or self.arch == "gemma3n":
            self.matrix(f"{at}attn_k.weight", kv * d, D)
            self.vector(f"{at}attn_k_norm.weight", d, centre=0.6)
            if self.windows[layer] or not self.v_from_k:
                self.matrix(f"{at}attn_v.weight", kv * d, D)
        for name, shape in (("gate", (96, D)), ("up", (96, D)), ("down", (D, 96))):
            self.matrix(f"{at}ffn_{name}.weight", *shape)
        if self.per_layer:
            self.matrix(f"{at}inp_gate.weight", P, D)
            self.matrix(f"{at}proj.weight", D, P)
            self.vector(f"{at}post_norm.weight", D)
        if self.arch == "gemma4":
            self.vector(f"{at}layer_output_scale.weight", 1, centre=0.8)
        if self.experts:
            self._make_experts(at)
        if self.arch == "gemma3n":
            self._make_streams(at)

    def _make_experts(self, at: str) -> None:
        self.matrix(f"{at}ffn_gate_inp.weight", 6, D, gain=3)
        self.vector(f"{at}ffn_gate_inp.scale", D, centre=8.0)
        self.matrix(f"{at}ffn_gate_up_exps.weight", 6, 64, D)
        self.matrix(f"{at}ffn_down_exps.weight", 6, D, 32)
        self.vector(f"{at}ffn_down_exps.scale", 6)
        for name in ("post_ffw_norm_1", "post_ffw_norm_2", "pre_ffw_norm_2"):
            self.vector(f"{at}{name}.weight", D)

    def _make_streams(self, at: str) -> None:
        self.matrix(f"{at}laurel_l.weight", RANK, D)
        self.matrix(f"{at}laurel_r.weight", D, RANK)
        self.vector(f"{at}laurel_post_norm.weight", D)
        self.matrix(f"{at}altup_router.weight", 4, D, gain=64)
        self.vector(f"{at}altup_router_norm.weight", D)
        self.matrix(f"{at}altup_predict_coef.weight", 16, 4)
        self.matrix(f"{at}altup_correct_coef.weight", 4, 4)
        self.vector(f"{at}altup_correct_scale.weight", D)

    def keys(self) -> dict[str, Any]:
        keys: dict[str, Any] = {
            "block_count": self.n_layers,
            "context_length": 1024,
            "embedding_length": D,
            "feed_forward_length": 96,
            "attention.head_count": 4,
            "attention.head_count_kv": [self.n_kv_heads(i) for i in range(self.n_layers)],
            "attention.key_length": self.head_dim(2),
            "attention.value_length": self.head_dim(2),
            "attention.sliding_window": 7,
            "attention.sliding_window_pattern": [window > 0 for window in self.windows],
            "attention.shared_kv_layers": self.shared,
            "embedding_length_per_layer_input": P if self.per_layer else 0,
            "rope.freq_base": 1000.0,
            "rope.freq_base_swa": 100.0,
            "final_logit_softcapping": 3.0,
        }
        if self.arch == "gemma4":
            keys |= {"attention.key_length_swa": 64, "attention.value_length_swa": 64}
            keys["rope.dimension_count_swa"] = 64
        else:
            keys["activation_sparsity_scale"] = [s or -np.inf for s in self.sparsity]
        if self.experts:
            keys |= {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 32}
        return keys

    def write(self, path: Path, weight_type: GGMLType = GGMLType.F32, **changes: Any) -> Path:
        """Write the file, matrices in `weight_type`; `tensors` then hold what it decodes to.

        Args:
            changes: other values of keys, with `__` for a dot; None leaves a key out.
        """
        writer = gguf.GGUFWriter(path, self.arch)
        changed = {key.replace("__", "."): value for key, value in changes.items()}
        for key, value in {**self.keys(), **changed}.items():
            name = f"{self.arch}.{key}"
            if isinstance(value, list):
                writer.add_array(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            elif value is not None:
                writer.add_uint32(name, value)
        writer.add_float32(f"{self.arch}.attention.layer_norm_rms_epsilon", EPS)
        for name, values in self.tensors.items():
            kind = weight_type if values.ndim > 1 and values.shape[-1] % 32 == 0 else GGMLType.F32
            packed = gguf.quants.quantize(values.astype(np.float32), kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
            self.tensors[name] = gguf.quants.dequantize(packed, kind).astype(np.float64)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path
