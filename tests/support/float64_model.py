"""The forward pass once more, in float64 numpy, written to be read next to the papers.

It shares no code with the package: a token at a time, a head at a time, no cache but a list.
"""

from __future__ import annotations

import math

import numpy as np

from support.random_model import RandomModel

EPS = float(np.float32(1e-5))


def rms_norm(x: np.ndarray, weight: np.ndarray | float) -> np.ndarray:
    return x / math.sqrt(float(np.mean(x * x)) + EPS) * weight


def norm(model: RandomModel, name: str, x: np.ndarray) -> np.ndarray:
    """A norm of x, of the architecture's kind."""
    if model.traits.norm == "rms":
        return rms_norm(x, model.tensors[f"{name}.weight"])
    y = rms_norm(x - x.mean(), model.tensors.get(f"{name}.weight", 1.0))
    return y + model.tensors.get(f"{name}.bias", 0.0)


def norm_heads(model: RandomModel, name: str, x: np.ndarray) -> np.ndarray:
    """The normed heads of q or k [heads, channels]."""
    weight = model.tensors[f"{name}.weight"]
    if model.traits.qk_norm == "row":
        return rms_norm(x.reshape(-1), weight).reshape(x.shape)
    if model.traits.norm != "rms":
        x = x - x.mean(axis=-1, keepdims=True)
    rows = np.array([rms_norm(row, 1.0) for row in x])
    return rows * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def xielu(model: RandomModel, layer: int, x: np.ndarray) -> np.ndarray:
    a_p, a_n, beta, eps = (
        float(np.float32(model.setting(f"xielu.{name}")[layer]))
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    )
    a_p, a_n = math.log(1 + math.exp(a_p)), beta + math.log(1 + math.exp(a_n))
    low = (np.expm1(np.minimum(x, eps)) - x) * a_n + beta * x
    return np.where(x > 0, a_p * x * x + beta * x, low)


def window_of(model: RandomModel, layer: int) -> int:
    """How many positions a layer sees; 0 for all."""
    pattern = model.setting("attention.sliding_window_pattern", model.traits.period)
    window = model.setting("attention.sliding_window", 0)
    if isinstance(pattern, list):
        return window if pattern[layer] else 0
    return window if pattern and layer % pattern < pattern - 1 else 0


def turns(model: RandomModel, layer: int) -> bool:
    """Whether a layer rotates q and k."""
    traits, every = model.traits, model.traits.unrotated
    if traits.positions or traits.alibi:
        return False
    if every and layer % every == every - 1:
        return False
    if not model.setting("rope.scaling.finetuned", True):
        return False
    pattern = model.setting("attention.rope_pattern")
    if pattern is not None:
        return pattern[layer]
    return bool(traits.full_turns or window_of(model, layer))


def angles(model: RandomModel, layer: int) -> tuple[np.ndarray, float]:
    """Angle per position of each pair, and the factor on cosine and sine."""
    traits, n = model.traits, model.setting("rope.dimension_count", model.head_dim)
    base = traits.fixed_theta or model.setting("rope.freq_base", 10000.0)
    if window_of(model, layer):
        base = model.setting("rope.freq_base_swa", traits.window_theta or base)
        if not traits.window_scaled:
            return base ** (-2 * np.arange(n // 2) / n), 1.0
    alpha = model.setting("rope.scaling.alpha", 0.0)
    if alpha:
        base *= alpha ** (model.head_dim / (model.head_dim - 2))
    factor = model.setting("rope.scaling.factor", 1.0)
    magnitude = float(np.float32(model.setting("rope.scaling.attn_factor", 1.0)))
    is_long = model.n_ctx > model.setting("rope.scaling.original_context_length", model.n_ctx)
    by_length = "rope_factors_long.weight" if is_long else "rope_factors_short.weight"
    divisors = model.tensors.get("rope_freqs.weight", model.tensors.get(by_length))
    result = []
    for i in range(n // 2):
        angle = base ** (-2 * i / n)
        if divisors is not None:
            angle /= float(divisors[i])
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
        a, b = (i, i + half) if model.traits.halves else (2 * i, 2 * i + 1)
        pair = complex(x[a], x[b]) * magnitude * np.exp(1j * freqs[i] * position)
        out[a], out[b] = pair.real, pair.imag
    return out


def affine(model: RandomModel, name: str, x: np.ndarray) -> np.ndarray:
    y = model.tensors[f"{name}.weight"] @ x
    bias = model.tensors.get(f"{name}.bias")
    return y if bias is None else y + bias


def dense(model: RandomModel, layer: int, x: np.ndarray) -> np.ndarray:
    at, traits = f"blk.{layer}", model.traits
    up, gate = affine(model, f"{at}.ffn_up", x), None
    if traits.fused_up:
        gate, up = np.split(up, 2)
    elif traits.gated:
        gate = affine(model, f"{at}.ffn_gate", x)
    z = up if gate is None else gate
    match traits.activation:
        case "silu":
            hidden = silu(z)
        case "gelu":
            hidden = gelu(z)
        case "relu2":
            hidden = np.maximum(z, 0) ** 2
        case "xielu":
            hidden = xielu(model, layer, z)
    hidden = hidden if gate is None else hidden * up
    if traits.sub_norms:
        hidden = norm(model, f"{at}.ffn_sub_norm", hidden)
    return affine(model, f"{at}.ffn_down", hidden)


def feed_forward(model: RandomModel, layer: int, x: np.ndarray) -> np.ndarray:
    at, n_experts = f"blk.{layer}", model.setting("expert_count", 0)
    if not n_experts:
        return dense(model, layer, x)
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


def slope(model: RandomModel, head: int, n_heads: int) -> float:
    """ALiBi's, of a head: a power of two of heads in even steps, others between them."""
    n = 2 ** math.floor(math.log2(n_heads))
    step = head + 1 if head < n else head - n + 0.5
    return 2.0 ** (-model.traits.alibi * step / n)


def attend(
    model: RandomModel, layer: int, q: np.ndarray, history: list[tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """softmax(q . k) v of one token, whose heads are side by side in the result."""
    seen, (n_heads, n_kv_heads) = window_of(model, layer), model.heads(layer)
    scale = float(np.float32(model.setting("attention.scale", 0.0))) or 1 / math.sqrt(
        model.head_dim
    )
    scale = 1 / model.head_dim if model.traits.unscaled else scale
    cap = model.setting("attn_logit_softcapping")
    heads = []
    for head in range(n_heads):
        kv_head = head // (n_heads // n_kv_heads)
        keys = np.array([k[kv_head] for k, _ in history[-seen:]])
        values = np.array([v[kv_head] for _, v in history[-seen:]])
        scores = keys @ q[head] * scale
        scores = cap * np.tanh(scores / cap) if cap else scores
        if model.traits.alibi:
            scores = scores - slope(model, head, n_heads) * np.arange(len(keys))[::-1]
        weights = np.exp(scores - scores.max())
        total = weights.sum()
        if model.traits.sinks:
            sink = model.tensors[f"blk.{layer}.attn_sinks.weight"][head]
            total += math.exp(sink - scores.max())
        heads.append(weights @ values / total)
    return np.concatenate(heads)


def mix(
    model: RandomModel,
    layer: int,
    h: np.ndarray,
    position: int,
    history: list[tuple[np.ndarray, np.ndarray]],
) -> np.ndarray:
    """Attention of one token, whose K and V are added to `history`."""
    at, traits = f"blk.{layer}", model.traits
    q, k, v = (affine(model, f"{at}.attn_{n}", h).reshape(-1, model.head_dim) for n in "qkv")
    if bound := float(np.float32(model.setting("attention.clamp_kqv", 0.0))):
        q, k, v = (np.clip(x, -bound, bound) for x in (q, k, v))
    steps = ["norm", "turn"] if not traits.qk_norm_last else ["turn", "norm"]
    for step in steps:
        if step == "norm" and traits.qk_norm:
            q = norm_heads(model, f"{at}.attn_q_norm", q)
            k = norm_heads(model, f"{at}.attn_k_norm", k)
        if step == "turn" and turns(model, layer):
            q = np.array([rotate(r, position, model, layer) for r in q])
            k = np.array([rotate(r, position, model, layer) for r in k])
    if scale := model.setting("attention.temperature_scale", 0.0):
        length = model.setting("rope.scaling.original_context_length")
        q = q * (1 + scale * math.log(1 + position // length))
    history.append((k, v))
    mixed = attend(model, layer, q, history)
    if traits.sub_norms:
        mixed = norm(model, f"{at}.attn_sub_norm", mixed)
    return affine(model, f"{at}.attn_output", mixed)


def float64_logits(model: RandomModel, ids: list[int]) -> np.ndarray:
    """Logits of every position: [len(ids), n_vocab]."""
    traits = model.traits
    history: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(model.n_layers)]
    residual = float(np.float32(model.setting("residual_scale", 1.0)))
    rows = []

    def read(x: np.ndarray, layer: int, name: str) -> np.ndarray:
        return norm(model, f"blk.{layer}.{name}", x) if name else x

    def added(y: np.ndarray, layer: int, name: str) -> np.ndarray:
        if traits.post_norms:
            y = rms_norm(y, model.tensors[f"blk.{layer}.{name}.weight"])
        return y * residual

    for position, token in enumerate(ids):
        x = model.tensors["token_embd.weight"][token] * model.setting("embedding_scale", 1.0)
        if traits.embedding_by_width:
            x = x * math.sqrt(model.n_embd)
        if traits.positions:
            x = x + model.tensors["position_embd.weight"][position]
        if traits.normed_embedding:
            x = norm(model, "token_embd_norm", x)
        for layer in range(model.n_layers):
            before = x
            if model.heads(layer)[0]:
                mixed = mix(
                    model, layer, read(x, layer, traits.attn_norm), position, history[layer]
                )
                x = x + added(mixed, layer, "post_attention_norm")
            if f"blk.{layer}.ffn_down.weight" in model.tensors or model.setting("expert_count", 0):
                h = read(before if traits.parallel else x, layer, traits.ffn_norm)
                x = x + added(feed_forward(model, layer, h), layer, "post_ffw_norm")
        x = norm(model, "output_norm", x)
        logits = affine(model, "token_embd" if model.tied else "output", x)
        scale = float(np.float32(model.setting("logit_scale", 1.0)))
        logits = logits / scale if traits.divides_logits else logits * scale
        cap = model.setting("final_logit_softcapping")
        rows.append(cap * np.tanh(logits / cap) if cap else logits)
    return np.array(rows)
