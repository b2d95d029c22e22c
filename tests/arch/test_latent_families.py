"""Latent attention without absorption, in float64: whole keys and values of each head.

The models are in the manner of older files, with `attn_kv_b`, so that its parts are tested, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import reference_backend
from support.forward import IDS, logits, nmse

N_EMBD, N_HEADS, NOPE, ROPE, VALUE, LATENT, RANK, N_FF, N_VOCAB, N_LAYERS = (
    *(64, 4, 32, 16, 48, 64, 48, 96, 96, 2),
)
EPS = float(np.float32(1e-6))


def tensors(arch: str) -> dict[str, np.ndarray]:
    """Random values, sharp enough for attention to matter."""
    generator, made = np.random.default_rng(7), dict[str, np.ndarray]()

    def matrix(name: str, n_out: int, n_in: int, scale: float = 1.0) -> None:
        values = generator.standard_normal((n_out, n_in)) * scale / np.sqrt(n_in)
        made[f"{name}.weight"] = values.astype(np.float32)

    def norm(name: str, n: int) -> None:
        made[f"{name}.weight"] = (1 + 0.3 * generator.standard_normal(n)).astype(np.float32)

    matrix("token_embd", N_VOCAB, N_EMBD, 8.0 if arch == "plm" else 1.0)
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


def write(path: Path, arch: str, made: dict[str, np.ndarray]) -> Path:
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
    }
    for key, value in keys.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    for name, values in made.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def turned(x: np.ndarray, interleaved: bool) -> np.ndarray:
    """RoPE of [tokens, ..., ROPE]."""
    angles = np.arange(len(x))[:, None] * 10000.0 ** (-2 * np.arange(ROPE // 2) / ROPE)
    shape = (len(x), *[1] * (x.ndim - 2), ROPE // 2)
    cos, sin = np.cos(angles).reshape(shape), np.sin(angles).reshape(shape)
    half = ROPE // 2
    first, second = (
        (slice(0, None, 2), slice(1, None, 2))
        if interleaved
        else (
            slice(0, half),
            slice(half, None),
        )
    )
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., first] * sin + x[..., second] * cos
    return y


def exact_logits(arch: str, made: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    values: dict[str, Any] = {name: t.astype(np.float64) for name, t in made.items()}
    n, interleaved = len(ids), arch == "plm"
    rest = 1.0 if arch == "plm" else 1.4 / np.sqrt(N_LAYERS)
    x = values["token_embd.weight"][ids] * (1.0 if arch == "plm" else 12.0)
    for i in range(N_LAYERS):
        w = {k.split(".")[2]: v for k, v in values.items() if k.startswith(f"blk.{i}.")}
        h = rms(x, w["attn_norm"])
        if arch == "plm":
            q = h @ w["attn_q"].T
        else:
            q = rms(h @ w["attn_q_a"].T, w["attn_q_a_norm"]) @ w["attn_q_b"].T
        q = q.reshape(n, N_HEADS, -1)
        q = np.concatenate([q[..., :NOPE], turned(q[..., NOPE:], interleaved)], -1)
        row = h @ w["attn_kv_a_mqa"].T
        latent = rms(row[:, :LATENT], w["attn_kv_a_norm"])
        both = (latent @ w["attn_kv_b"].T).reshape(n, N_HEADS, -1)
        rotated = np.repeat(turned(row[:, LATENT:], interleaved)[:, None], N_HEADS, 1)
        k = np.concatenate([both[..., :NOPE], rotated], -1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(NOPE + ROPE)
        scores = np.where(np.tril(np.ones((n, n))) > 0, scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        out = np.einsum("hts,shd->thd", p, both[..., NOPE:]).reshape(n, -1)
        x = x + rest * (out @ w["attn_output"].T)
        h = rms(x, w["ffn_norm"])
        up = h @ w["ffn_up"].T
        if arch == "plm":
            hidden = np.maximum(up, 0) ** 2
        else:
            gate = h @ w["ffn_gate"].T
            hidden = gate / (1 + np.exp(-gate)) * up
        x = x + rest * (hidden @ w["ffn_down"].T)
    y = rms(x, values["output_norm.weight"]) @ values["token_embd.weight"].T
    return y * (1.0 if arch == "plm" else 256 / N_EMBD)


@pytest.mark.parametrize("arch", ["plm", "minicpm3"])
def test_absorbed_is_what_whole_keys_and_values_give(arch: str, tmp_path: Path) -> None:
    made = tensors(arch)
    path, want = write(tmp_path / "model.gguf", arch, made), exact_logits(arch, made, IDS)
    assert nmse(logits(path, reference_backend(torch.float64), IDS, "f32"), want) < 1e-10
    assert nmse(logits(path, cpu_backend(), IDS, "f32", chunk=47), want) < 1e-8
