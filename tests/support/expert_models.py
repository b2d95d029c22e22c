"""Small random models, mostly with routed experts, of architectures that conformance data has not.

`tests/data/make_llama_cpp_experts.py` writes them, too, and stores llama.cpp's logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

N_EMBD, HEAD, N_HEADS, N_KV_HEADS, N_VOCAB = 128, 64, 2, 1, 96
N_EXPERTS, N_USED, N_FF, N_DENSE, N_SHARED = 8, 2, 32, 96, 64
IDS = [(i * 37 + 11) % N_VOCAB for i in range(60)]
SHOWN = (3, 17, 38, 59)
"""Positions whose logits are stored."""


@dataclass(frozen=True)
class ExpertModel:
    """A model as its file has it.

    Attributes:
        architecture: the file's.
        n_layers: its blocks.
        keys: without the architecture's prefix, and without sizes of the plain layer.
        dense: layers without experts.
        norms: each layer's, by name.
        head_norms: q and k have norms of each head.
        gate: attention's output has a gate, of each "channel" or of each "head", or none: "".
        selection_bias: the tensor's name, or empty.
        n_shared: width of the shared expert, or 0.
        fused: gate and up are one stack.
        layer_norm: the norms are LayerNorm.
        tied: the output matrix is the embedding.
        divisors: there is `rope_freqs.weight`.
        n_kv_heads: heads of K and V.
        n_heads: heads of q of each layer, where they differ.
        value_dim: channels of a head of V.
        sinks: layers whose heads have sinks.
        predicts: the last of the blocks predicts a further token.
        beside: layers have a dense block beside the experts.
        biased: norms and matrices of attention have biases, as the output has.
        joined: layers with one matrix for q, k and v.
    """

    architecture: str
    n_layers: int
    keys: dict[str, Any] = field(default_factory=dict)
    dense: tuple[int, ...] = ()
    norms: tuple[str, ...] = ("attn_norm", "ffn_norm")
    head_norms: bool = False
    gate: str = ""
    selection_bias: str = ""
    n_shared: int = 0
    fused: bool = False
    layer_norm: bool = False
    tied: bool = False
    divisors: bool = False
    n_kv_heads: int = N_KV_HEADS
    n_heads: tuple[int, ...] = ()
    value_dim: int = HEAD
    sinks: tuple[int, ...] = ()
    predicts: bool = False
    joined: tuple[int, ...] = ()
    biased: bool = False
    beside: bool = False

    def all_keys(self) -> dict[str, Any]:
        kind = "layer_norm" if self.layer_norm else "layer_norm_rms"
        return {
            "block_count": self.n_layers,
            "context_length": 512,
            "vocab_size": N_VOCAB,
            "embedding_length": N_EMBD,
            "feed_forward_length": N_DENSE,
            "attention.head_count": list(self.n_heads) or N_HEADS,
            "attention.head_count_kv": self.n_kv_heads,
            "attention.key_length": HEAD,
            "attention.value_length": self.value_dim,
            f"attention.{kind}_epsilon": 1e-5,
            "rope.dimension_count": HEAD,
            "expert_count": N_EXPERTS,
            "expert_used_count": N_USED,
            "expert_feed_forward_length": N_FF,
            **self.keys,
        }

    def write(self, path: Path) -> Path:
        """Matrices in F16, routers and vectors in F32; the values are the name's."""
        rng = np.random.default_rng(sum(self.architecture.encode()))
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_string("tokenizer.ggml.model", "no_vocab")
        for key, value in self.all_keys().items():
            _add(writer, f"{self.architecture}.{key}", value)

        def matrix(name: str, *shape: int, gain: float = 1.0, is_router: bool = False) -> None:
            values = rng.standard_normal(shape) * gain / np.sqrt(shape[-1])
            kind = np.float32 if is_router else np.float16
            writer.add_tensor(f"{name}.weight", values.astype(kind))

        def vector(name: str, *shape: int, centre: float = 1.0) -> None:
            values = centre + 0.3 * rng.standard_normal(shape)
            writer.add_tensor(name, values.astype(np.float32))

        self._tensors(matrix, vector)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _tensors(self, matrix: Callable[..., None], vector: Callable[..., None]) -> None:
        matrix("token_embd", N_VOCAB, N_EMBD, gain=np.sqrt(N_EMBD))
        if not self.tied:
            matrix("output", N_VOCAB, N_EMBD)
        vector("output_norm.weight", N_EMBD)
        if self.biased:
            vector("output_norm.bias", N_EMBD, centre=0.0)
            vector("output.bias", N_VOCAB, centre=0.0)
        if self.divisors:
            vector("rope_freqs.weight", HEAD // 2, centre=3.0)
        for i in range(self.n_layers):
            at = f"blk.{i}."
            if self.predicts and i == self.n_layers - 1:
                matrix(f"{at}nextn.eh_proj", N_EMBD, 2 * N_EMBD, gain=1.4)
                for name in ("enorm", "hnorm", "shared_head_norm"):
                    vector(f"{at}nextn.{name}.weight", N_EMBD)
            for name in self.norms:
                vector(f"{at}{name}.weight", N_EMBD)
            n_heads = self.n_heads[i] if self.n_heads else N_HEADS
            rows = n_heads * HEAD, self.n_kv_heads * HEAD, self.n_kv_heads * self.value_dim
            if i in self.joined:
                matrix(f"{at}attn_qkv", sum(rows), N_EMBD, gain=1.3)
            else:
                matrix(f"{at}attn_q", rows[0], N_EMBD, gain=1.3)
                matrix(f"{at}attn_k", rows[1], N_EMBD, gain=1.3)
                matrix(f"{at}attn_v", rows[2], N_EMBD)
            matrix(f"{at}attn_output", N_EMBD, n_heads * self.value_dim)
            if self.biased:
                for name in (*self.norms, "attn_output"):
                    vector(f"{at}{name}.bias", N_EMBD, centre=0.0)
                for name, size in zip("qkv", rows, strict=True):
                    vector(f"{at}attn_{name}.bias", size, centre=0.0)
            if self.gate:
                rows = n_heads * (HEAD if self.gate == "channel" else 1)
                matrix(f"{at}attn_gate", rows, N_EMBD, gain=2.0)
            if i in self.sinks:
                vector(f"{at}attn_sinks.weight", n_heads, centre=0.5)
            if self.head_norms:
                vector(f"{at}attn_q_norm.weight", HEAD, centre=1.3)
                vector(f"{at}attn_k_norm.weight", HEAD, centre=1.3)
            if i in self.dense:
                _block(matrix, f"{at}ffn_", "", N_DENSE)
                continue
            matrix(f"{at}ffn_gate_inp", N_EXPERTS, N_EMBD, gain=2.0, is_router=True)
            if self.fused:
                matrix(f"{at}ffn_gate_up_exps", N_EXPERTS, 2 * N_FF, N_EMBD)
            else:
                matrix(f"{at}ffn_gate_exps", N_EXPERTS, N_FF, N_EMBD)
                matrix(f"{at}ffn_up_exps", N_EXPERTS, N_FF, N_EMBD)
            matrix(f"{at}ffn_down_exps", N_EXPERTS, N_EMBD, N_FF, gain=1.5)
            if self.selection_bias:
                vector(f"{at}{self.selection_bias}", N_EXPERTS, centre=0.0)
            if self.n_shared:
                _block(matrix, f"{at}ffn_", "_shexp", self.n_shared)
            if self.beside:
                _block(matrix, f"{at}ffn_", "", N_DENSE)


def _block(matrix: Callable[..., None], prefix: str, suffix: str, width: int) -> None:
    matrix(f"{prefix}gate{suffix}", width, N_EMBD)
    matrix(f"{prefix}up{suffix}", width, N_EMBD)
    matrix(f"{prefix}down{suffix}", N_EMBD, width)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case str():
            writer.add_string(key, value)
        case float():
            writer.add_float32(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            writer.add_uint32(key, value)


YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
SIGMOID = {
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
    "leading_dense_block_count": 1,
}
BIAS = "exp_probs_b.bias"

GLM = ExpertModel(
    "glm4moe",
    4,
    {**SIGMOID, "expert_shared_count": 1, "nextn_predict_layers": 1},
    dense=(0,),
    norms=("attn_norm", "post_attention_norm"),
    head_norms=True,
    selection_bias=BIAS,
    n_shared=N_FF,
    predicts=True,
)
"""A GLM with a block that predicts a further token."""

GROK = {
    "embedding_scale": 2.0,
    "logit_scale": 0.4,
    "attention.output_scale": 0.1,
    "attn_logit_softcapping": 6.0,
    "final_logit_softcapping": 3.0,
}
AROUND = ("attn_norm", "attn_output_norm", "ffn_norm")

EXPERT_MODELS = {
    "dbrx": ExpertModel(
        "dbrx",
        2,
        {"feed_forward_length": N_FF, "attention.clamp_kqv": 0.8},
        norms=("attn_norm", "attn_output_norm"),
        layer_norm=True,
        joined=(0, 1),
    ),
    "grok": ExpertModel("grok", 2, GROK, norms=(*AROUND, "post_ffw_norm"), beside=True),
    "grok-1": ExpertModel("grok", 2, GROK, norms=(*AROUND, "layer_output_norm")),
    "muse-glimmer": ExpertModel(
        "muse-glimmer",
        4,
        {
            "expert_count": 0,
            "expert_used_count": 0,
            "attention.sliding_window": 20,
            "attention.sliding_window_pattern": [True, False, True, True],
            "rope.freq_base_swa": 500.0,
            "logit_scale": 0.4,
            "final_logit_softcapping": 3.0,
        },
        dense=(0, 1, 2, 3),
        norms=("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
        head_norms=True,
        gate="channel",
    ),
    "phimoe": ExpertModel("phimoe", 2, {"feed_forward_length": N_FF}, biased=True),
    "deepseek": ExpertModel(
        "deepseek",
        2,
        {"leading_dense_block_count": 1, "expert_shared_count": 2, "expert_weights_scale": 1.5},
        dense=(0,),
        n_shared=2 * N_FF,
    ),
    "deepseek2-ocr": ExpertModel(
        "deepseek2-ocr",
        2,
        {"leading_dense_block_count": 1, "expert_shared_count": 2, "expert_weights_scale": 1.5},
        dense=(0,),
        n_shared=2 * N_FF,
        n_kv_heads=N_HEADS,
    ),
    "bailingmoe": ExpertModel(
        "bailingmoe",
        2,
        {"expert_shared_count": 2, "expert_weights_scale": 1.5, "expert_weights_norm": True},
        n_shared=2 * N_FF,
    ),
    "hy_v3": ExpertModel(
        "hy_v3",
        2,
        {
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "expert_shared_feed_forward_length": N_SHARED,
        },
        dense=(0,),
        head_norms=True,
        selection_bias="exp_probs_b",
        n_shared=N_SHARED,
        fused=True,
        tied=True,
    ),
    "mellum": ExpertModel(
        "mellum",
        4,
        {
            **YARN,
            "attention.sliding_window": 20,
            "attention.sliding_window_pattern": [True, False, True, True],
            "rope.freq_base_swa": 500.0,
        },
        head_norms=True,
    ),
    "exaone-moe": ExpertModel(
        "exaone-moe",
        4,
        {**SIGMOID, "attention.sliding_window": 20, "expert_shared_feed_forward_length": N_SHARED},
        dense=(0,),
        head_norms=True,
        selection_bias=BIAS,
        n_shared=N_SHARED,
        divisors=True,
    ),
    "afmoe": ExpertModel(
        "afmoe",
        4,
        {**SIGMOID, "attention.sliding_window": 20, "expert_shared_count": 1},
        dense=(0,),
        norms=("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
        head_norms=True,
        gate="channel",
        selection_bias=BIAS,
        n_shared=N_FF,
    ),
    "step35": ExpertModel(
        "step35",
        4,
        {
            **SIGMOID,
            "attention.sliding_window": 20,
            "attention.sliding_window_pattern": [False, True, True, False],
            "rope.freq_base": 5000.0,
            "expert_shared_feed_forward_length": N_SHARED,
            "swiglu_clamp_exp": [0.0, 0.0, 0.7, 0.5],
            "swiglu_clamp_shexp": [0.0, 0.4, 0.0, 0.6],
        },
        dense=(0,),
        head_norms=True,
        gate="head",
        selection_bias=BIAS,
        n_shared=N_SHARED,
        divisors=True,
        n_heads=(2, 3, 3, 2),
    ),
    "laguna": ExpertModel(
        "laguna",
        4,
        {
            **SIGMOID,
            **YARN,
            "rope.dimension_count": HEAD // 2,
            "rope.dimension_count_swa": HEAD,
            "rope.freq_base_swa": 500.0,
            "attention.sliding_window": 20,
            "expert_shared_feed_forward_length": N_SHARED,
        },
        dense=(0,),
        head_norms=True,
        gate="head",
        selection_bias=BIAS,
        n_shared=N_SHARED,
        n_heads=(3, 2, 2, 2),
    ),
    "laguna-m": ExpertModel(
        "laguna",
        2,
        {**SIGMOID, "expert_shared_feed_forward_length": N_SHARED},
        dense=(0,),
        head_norms=True,
        gate="channel",
        selection_bias=BIAS,
        n_shared=N_SHARED,
    ),
    "mimo2": ExpertModel(
        "mimo2",
        4,
        {
            "attention.sliding_window": 20,
            "attention.sliding_window_pattern": [False, True, True, False],
            "rope.dimension_count": HEAD // 2,
            "rope.freq_base": 5000.0,
            "attention.value_scale": 0.707,
        },
        dense=(0,),
        selection_bias=BIAS,
        value_dim=HEAD // 2,
        sinks=(1, 2),
    ),
    "maple": ExpertModel(
        "maple",
        3,
        {
            "attention.sliding_window": 20,
            "attention.sliding_window_pattern": [True, False, True],
            "rope.freq_base_swa": 500.0,
            "swiglu_clamp_exp": [0.7, 0.9, 0.5],
        },
        head_norms=True,
    ),
    "spark2_5": ExpertModel(
        "spark2_5",
        3,
        {
            "attention.sliding_window": 20,
            "attention.sliding_window_pattern": [True, False, True],
            "rope.freq_base_swa": 500.0,
            "expert_count": 0,
            "expert_used_count": 0,
        },
        dense=(0, 1, 2),
        gate="head",
        n_heads=(2, 3, 2),
    ),
    "cohere2moe": ExpertModel(
        "cohere2moe",
        5,
        {
            **SIGMOID,
            "attention.sliding_window": 20,
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": N_SHARED,
            "logit_scale": 0.25,
        },
        dense=(0,),
        norms=("attn_norm",),
        n_shared=N_SHARED,
        fused=True,
        layer_norm=True,
        tied=True,
    ),
}
"""By a name of the tests' own, mostly the architecture's."""
