"""Shapes of well-known models against what is published of them."""

from __future__ import annotations

import math
import tomllib

import pytest

from localkv.errors import UsageError
from localkv.loader.known_models import KNOWN_MODELS, shape_tensors
from support.paths import ROOT

BILLIONS = {
    "llama-8b": 8.03,
    "llama-70b": 70.6,
    "mistral-7b": 7.25,
    "mistral-small-24b": 23.6,
    "smollm3-3b": 3.08,
    "qwen3-0.6b": 0.6,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "gemma3-1b": 1.0,
    "gemma3-4b": 3.88,
    "gemma3-12b": 11.8,
    "gemma3-27b": 27.0,
    "gemma4-e2b": 4.65,
    "gemma4-e4b": 7.5,
    "gemma4-26b-a4b": 25.2,
    "gemma4-31b": 30.7,
    "qwen35-0.8b": 0.75,
    "qwen35-9b": 8.95,
    "qwen35-27b": 26.9,
    "qwen3.6-27b": 26.9,
    "qwen35-35b-a3b": 34.7,
    "qwen3.6-35b-a3b": 34.7,
    "qwen3-next-80b-a3b": 79.7,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671.0,
    "glm-4.7-flash": 30.0,
    "glm-4-9b": 9.4,
    "glm-4.5-air": 107.0,
    "lfm2-350m": 0.354,
    "lfm2-1.2b": 1.17,
    "lfm2-2.6b": 2.57,
    "phi-4": 14.7,
    "phi-4-mini": 3.84,
    "granite-3.3-2b": 2.53,
    "granite-3.3-8b": 8.17,
    "granite-4-micro": 3.4,
    "granite-4-h-micro": 3.19,
    "granite-4-h-tiny": 6.94,
    "nemotron-3-nano-30b-a3b": 31.6,
    "olmo3-7b": 7.3,
    "olmo3-32b": 32.2,
    "command-r7b": 8.03,
    "exaone4-32b": 32.0,
    "seed-oss-36b": 36.2,
    "minimax-m2": 228.7,
    "ling-3-flash": 124.0,
    "kimi-linear-48b-a3b": 48.0,
    "bonsai-8b": 8.19,
    "step-3.5-flash": 196.8,
    "mimo-v2-flash": 309.0,
    "llama4-scout": 107.8,
}
"""Parameters of the text model, as its card or its checkpoint says."""

PUBLISHED = tomllib.loads((ROOT / "tests" / "data" / "published_shapes.toml").read_text())
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "v_head_dim": "attention.value_length_mla",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "routed_scaling_factor": "expert_weights_scale",
}
"""Keys of a model file by their names in a published configuration."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_is_the_published_one(name: str) -> None:
    published = dict(PUBLISHED[name])
    assert published.pop("source")
    known = {**KNOWN_MODELS[name].keys, "vocab_size": KNOWN_MODELS[name].n_vocab}
    assert {key: known[KEYS.get(key, key)] for key in published} == published


@pytest.mark.parametrize("name", BILLIONS)
def test_a_shape_has_the_parameters_of_the_model(name: str) -> None:
    n = sum(math.prod(tensor.shape) for tensor in shape_tensors(name, "q4_0"))
    assert n == pytest.approx(1e9 * BILLIONS[name], rel=0.03)


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_shape_has_a_specification(name: str) -> None:
    spec = KNOWN_MODELS[name].spec
    assert spec.name == name
    assert spec.n_layers == KNOWN_MODELS[name].keys["block_count"]


def test_rows_that_are_no_whole_blocks_take_another_type() -> None:
    formats = {t.name: t.format.name for t in shape_tensors("gemma3-1b", "q4_K")}
    assert formats["blk.0.attn_q.weight"] == "q5_0"  # 1152 is no multiple of 256
    assert formats["blk.0.ffn_down.weight"] == "q4_K"
    assert formats["token_embd.weight"] == "q8_0"  # the output matrix, too: q6_K, if it could
    assert formats["blk.0.attn_norm.weight"] == "f32"
    with pytest.raises(UsageError, match="unknown shape"):
        shape_tensors("gemma3-2b", "q4_K")
