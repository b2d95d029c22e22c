"""Small random models with latent attention, in the manner of older files, with `attn_kv_b`."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

N_EMBD, N_HEADS, NOPE, ROPE, VALUE, LATENT, RANK, N_FF, N_VOCAB, N_LAYERS = (
    *(64, 4, 32, 16, 48, 64, 48, 96, 96, 2),
)


MORE = {
    "mistral4": {
        "leading_dense_block_count": N_LAYERS,
        "expert_count": 0,
        "expert_feed_forward_length": N_FF,
        "expert_shared_count": 1,
        "attention.temperature_scale": 0.5,
        "attention.temperature_length": 16,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_log_multiplier": 0.07,
    }
}
"""Keys of architectures that have some of their own."""


def latent_tensors(arch: str) -> dict[str, np.ndarray]:
    """Random values, sharp enough for attention to matter."""
    generator, made = np.random.default_rng(7), dict[str, np.ndarray]()

    def matrix(name: str, n_out: int, n_in: int, scale: float = 1.0) -> None:
        values = generator.standard_normal((n_out, n_in)) * scale / np.sqrt(n_in)
        made[f"{name}.weight"] = values.astype(np.float32)

    def norm(name: str, n: int) -> None:
        made[f"{name}.weight"] = (1 + 0.3 * generator.standard_normal(n)).astype(np.float32)

    matrix("token_embd", N_VOCAB, N_EMBD, 1.0 if arch == "minicpm3" else 8.0)
    norm("output_norm", N_EMBD)
    for i in range(N_LAYERS):
        at = f"blk.{i}."
        for name, n in (("attn_norm", N_EMBD), ("ffn_norm", N_EMBD), ("attn_kv_a_norm", LATENT)):
            norm(at + name, n)
        n_q = N_HEADS * (NOPE + ROPE)
        if arch == "plm":
            matrix(f"{at}attn_q", n_q, N_EMBD, 2.0)
        else:
            matrix(f"{at}attn_q_a", RANK, N_EMBD)
            norm(f"{at}attn_q_a_norm", RANK)
            matrix(f"{at}attn_q_b", n_q, RANK, 2.0)
            matrix(f"{at}ffn_gate", N_FF, N_EMBD)
        matrix(f"{at}attn_kv_a_mqa", LATENT + ROPE, N_EMBD, 1.5)
        matrix(f"{at}attn_kv_b", N_HEADS * (NOPE + VALUE), LATENT)
        matrix(f"{at}attn_output", N_EMBD, N_HEADS * VALUE)
        matrix(f"{at}ffn_up", N_FF, N_EMBD)
        matrix(f"{at}ffn_down", N_EMBD, N_FF)
    return made


_ADD = {
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    str: gguf.GGUFWriter.add_string,
}


def write_latent(path: Path, arch: str, made: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    keys = {
        "context_length": 512,
        "embedding_length": N_EMBD,
        "block_count": N_LAYERS,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEADS,
        "attention.head_count_kv": N_HEADS,
        "attention.key_length": NOPE + ROPE,
        "attention.value_length": VALUE,
        "attention.kv_lora_rank": LATENT,
        "attention.q_lora_rank": RANK,
        "rope.dimension_count": ROPE,
        "vocab_size": N_VOCAB,
    }
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    for key, value in {**keys, **MORE.get(arch, {})}.items():
        _ADD[type(value)](writer, f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    for name, values in made.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
