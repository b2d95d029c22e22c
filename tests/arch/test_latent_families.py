"""Latent attention without absorption, in float64: whole keys and values of each head.

The models are in the manner of older files, with `attn_kv_b`, so that its parts are tested, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import reference_backend
from support.forward import IDS, logits, nmse
from support.latent_models import (
    LATENT,
    N_EMBD,
    N_HEADS,
    N_LAYERS,
    NOPE,
    ROPE,
    latent_tensors,
    write_latent,
)

EPS = float(np.float32(1e-6))


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
        else (slice(0, half), slice(half, None))
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
    made = latent_tensors(arch)
    path, want = write_latent(tmp_path / "model.gguf", arch, made), exact_logits(arch, made, IDS)
    assert nmse(logits(path, reference_backend(torch.float64), IDS, "f32"), want) < 1e-10
    assert nmse(logits(path, cpu_backend(), IDS, "f32", chunk=47), want) < 1e-8
