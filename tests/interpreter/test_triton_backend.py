"""Whole models on the backend's table, against the reference's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType
from random_model import variant
from test_model import logits, nmse

from localkv.config import ModelConfig
from localkv.kernels.attention import attention
from localkv.kernels.backend import Backend, TokenInputs
from localkv.kernels.gpu.attention import PackedAttention
from localkv.kernels.gpu.rope_store import QueryKeySteps, rope_store
from localkv.kernels.gpu.tile_sizes import INTERPRETER
from localkv.kernels.gpu.triton_backend import triton_backend
from localkv.kernels.layer_weights import AttentionWeights
from localkv.kernels.reference_backend import reference_backend
from localkv.kv_cache import Batch, LayerCache, SegmentBatch
from localkv.loader.weights import load_model

IDS = [(i * 37 + 11) % 96 for i in range(12)]


def store_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weights: AttentionWeights,
    config: ModelConfig,
    inputs: TokenInputs,
    cache: LayerCache,
    segments: tuple[SegmentBatch, ...],
) -> torch.Tensor:
    steps = QueryKeySteps(
        weights.attn_q_norm, weights.attn_k_norm, config.rms_eps, inputs.rope, inputs.q_scale
    )
    return rope_store(q, k, v, steps, cache, segments)


def backend() -> Backend:
    """Every kernel, in the interpreter."""
    packed = PackedAttention(INTERPRETER)

    def run_attention(
        q: torch.Tensor, cache: LayerCache, batch: Batch, softmax_scale: float
    ) -> torch.Tensor:
        return attention(packed, q, cache, batch, softmax_scale).flatten(1)

    return triton_backend(store_heads, run_attention, device=torch.device("cpu"), kernels={})


@pytest.mark.parametrize(
    ("name", "weight_type"),
    [
        ("llama-tied", GGMLType.Q8_0),
        ("llama-fused-qkv", GGMLType.Q4_0),
        ("llama-biases", GGMLType.Q4_1),
        ("qwen3", GGMLType.F16),
        ("qwen2moe", GGMLType.Q8_0),
        ("qwen3moe", GGMLType.F32),
    ],
)
def test_models(name: str, weight_type: GGMLType, tmp_path: Path) -> None:
    """A prompt, and tokens one at a time."""
    path = variant(name).write(tmp_path / "model.gguf", weight_type)
    want = logits(path, reference_backend(torch.float64), IDS, "f32")
    exact = weight_type == GGMLType.F32
    assert nmse(logits(path, backend(), IDS, "f32"), want) < (1e-9 if exact else 1e-5)
    assert nmse(logits(path, backend(), IDS[:3], "f32", chunk=1), want[:3]) < 1e-9


def test_a_tied_embedding_is_held_once(tmp_path: Path) -> None:
    path = variant("llama-tied").write(tmp_path / "model.gguf", GGMLType.Q8_0)
    model, _ = load_model(path, backend())
    assert model.weights.output.weight is model.weights.token_embd
    assert not model.weights.token_embd.reads_rows
