"""The forward pass once more, in float64 numpy, written to be read next to the papers.

It shares no code with the package: a token at a time, a head at a time, no cache but a list.
"""

from __future__ import annotations

import math

import numpy as np

from support.random_model import RandomModel


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / math.sqrt(float(np.mean(x * x)) + float(np.float32(1e-5))) * weight


def layer_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return rms_norm(x - x.mean(), weight)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def has_window(model: RandomModel, layer: int) -> bool:
    """Gemma 3: the last layer of each period sees everything."""
    period = model.setting("attention.sliding_window_pattern", 1)
    return layer % period < period - 1


def angles(model: RandomModel, layer: int) -> tuple[np.ndarray, float]:
    """Angle per position of each pair, and the factor on cosine and sine."""
    if has_window(model, layer):
        return 10000.0 ** (-2 * np.arange(model.head_dim // 2) / model.head_dim), 1.0
    n = model.setting("rope.dimension_count", model.head_dim)
    base = model.setting("rope.freq_base", 10000.0)
    factor = model.setting("rope.scaling.factor", 1.0)
    magnitude = 1.0
    result = []
    for i in range(n // 2):
        angle = base ** (-2 * i / n)
        if "rope_freqs.weight" in model.tensors:
            angle /= float(model.tensors["rope_freqs.weight"][i])
        if model.setting("rope.scaling.type") == "yarn":
            original = model.setting("rope.scaling.original_context_length")
            # the pair index at which a channel turns `beta` times within the original context
            index = {
                beta: n * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(base))
                for beta in (32, 1)
            }
            low = max(math.floor(index[32]), 0)
            high = min(math.ceil(index[1]), n - 1)
            interpolation = min(1.0, max(0.0, (i - low) / max(high - low, 0.001)))
            angle = angle / factor * interpolation + angle * (1 - interpolation)
            magnitude = 1 + 0.1 * math.log(factor)
            multiplier = model.setting("rope.scaling.yarn_log_multiplier", 0.0)
            magnitude /= 1 + 0.1 * multiplier * math.log(factor)
        else:
            angle /= factor
        result.append(angle)
    return np.array(result), magnitude


def rotate(x: np.ndarray, position: int, model: RandomModel, layer: int) -> np.ndarray:
    freqs, magnitude = angles(model, layer)
    half = len(freqs)
    out = x.copy()
    for i in range(half):
        halves = model.arch.startswith(("qwen", "gemma"))
        a, b = (i, i + half) if halves else (2 * i, 2 * i + 1)
        pair = complex(x[a], x[b]) * magnitude * np.exp(1j * freqs[i] * position)
        out[a], out[b] = pair.real, pair.imag
    return out


def affine(model: RandomModel, name: str, x: np.ndarray) -> np.ndarray:
    y = model.tensors[f"{name}.weight"] @ x
    bias = model.tensors.get(f"{name}.bias")
    return y if bias is None else y + bias


def feed_forward(model: RandomModel, at: str, x: np.ndarray) -> np.ndarray:
    n_experts = model.setting("expert_count", 0)
    if not n_experts:
        activation = gelu if model.arch == "gemma3" else silu
        hidden = activation(affine(model, f"{at}.ffn_gate", x)) * affine(model, f"{at}.ffn_up", x)
        return affine(model, f"{at}.ffn_down", hidden)
    scores = np.exp(affine(model, f"{at}.ffn_gate_inp", x))
    scores /= scores.sum()
    chosen = np.argsort(-scores)[: model.setting("expert_used_count")]
    if model.arch != "qwen2moe":
        scores = scores / scores[chosen].sum()
    out = np.zeros_like(x)
    for e in chosen:
        gate, up, down = (
            model.tensors[f"{at}.ffn_{part}_exps.weight"][e] for part in ("gate", "up", "down")
        )
        out += scores[e] * (down @ (silu(gate @ x) * (up @ x)))
    if model.arch == "qwen2moe":
        hidden = silu(affine(model, f"{at}.ffn_gate_shexp", x))
        shared = affine(
            model, f"{at}.ffn_down_shexp", hidden * affine(model, f"{at}.ffn_up_shexp", x)
        )
        gate = model.tensors[f"{at}.ffn_gate_inp_shexp.weight"] @ x
        out += shared / (1.0 + math.exp(-float(gate)))
    return out


def float64_logits(model: RandomModel, ids: list[int]) -> np.ndarray:
    """Logits of every position: [len(ids), n_vocab]."""
    group = model.n_heads // model.n_kv_heads
    history: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(model.n_layers)]
    norm = layer_norm if model.arch == "command-r" else rms_norm
    rows = []
    for position, token in enumerate(ids):
        x = model.tensors["token_embd.weight"][token]
        if model.arch == "gemma3":
            x = x * math.sqrt(model.n_embd)
        for layer in range(model.n_layers):
            at = f"blk.{layer}"
            h = norm(x, model.tensors[f"{at}.attn_norm.weight"])
            q, k, v = (
                affine(model, f"{at}.attn_{n}", h).reshape(-1, model.head_dim) for n in "qkv"
            )
            if f"{at}.attn_q_norm.weight" in model.tensors:
                q = np.array([rms_norm(r, model.tensors[f"{at}.attn_q_norm.weight"]) for r in q])
                k = np.array([rms_norm(r, model.tensors[f"{at}.attn_k_norm.weight"]) for r in k])
            if model.arch != "smollm3" or layer % 4 != 3:
                q = np.array([rotate(r, position, model, layer) for r in q])
                k = np.array([rotate(r, position, model, layer) for r in k])
            if scale := model.setting("attention.temperature_scale", 0.0):
                length = model.setting("rope.scaling.original_context_length")
                q = q * (1 + scale * math.log(1 + position // length))
            history[layer].append((k, v))
            seen = model.setting("attention.sliding_window") if has_window(model, layer) else 0
            heads = []
            for head in range(model.n_heads):
                keys = np.array([k[head // group] for k, _ in history[layer][-seen:]])
                values = np.array([v[head // group] for _, v in history[layer][-seen:]])
                weights = keys @ q[head] / math.sqrt(model.head_dim)
                weights = np.exp(weights - weights.max())
                heads.append(weights @ values / weights.sum())
            added = affine(model, f"{at}.attn_output", np.concatenate(heads))
            if model.arch == "command-r":
                x = x + added + feed_forward(model, at, h)
                continue
            if model.arch == "gemma3":
                added = rms_norm(added, model.tensors[f"{at}.post_attention_norm.weight"])
            x = x + added
            added = feed_forward(model, at, rms_norm(x, model.tensors[f"{at}.ffn_norm.weight"]))
            if model.arch == "gemma3":
                added = rms_norm(added, model.tensors[f"{at}.post_ffw_norm.weight"])
            x = x + added
        x = norm(x, model.tensors["output_norm.weight"])
        logits = affine(model, "token_embd" if model.tied else "output", x)
        logits = logits * model.setting("logit_scale", 1.0)
        cap = model.setting("final_logit_softcapping")
        rows.append(cap * np.tanh(logits / cap) if cap else logits)
    return np.array(rows)
