"""Gemma 3n and 4 in float64 numpy, a token at a time, a head at a time, a layer as in its papers.

It shares no code with the package. `without` names a part that is left out.
"""

from __future__ import annotations

import math

import numpy as np

from support.random_gemma import EPS, D, P, RandomGemma

Row = np.ndarray


def rms(x: Row, weight: Row | float = 1.0) -> Row:
    return x / math.sqrt(float(np.mean(x * x)) + float(np.float32(EPS))) * weight


def gelu(x: Row) -> Row:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def as_long(x: Row, z: Row) -> Row:
    return z * math.sqrt(float(x @ x) / float(z @ z))


class Evaluation:
    """A text's logits: [tokens, n_vocab], of a model less a part."""

    def __init__(self, model: RandomGemma, without: str = "") -> None:
        self.model = model
        self.without = without
        self.history: list[list[tuple[Row, Row]]] = [[] for _ in range(model.n_layers)]

    def logits(self, ids: list[int]) -> np.ndarray:
        return np.array([self.token(token, at) for at, token in enumerate(ids)])

    def w(self, name: str, layer: int | None = None) -> Row:
        at = "" if layer is None else f"blk.{layer}."
        return self.model.tensors[f"{at}{name}" if "." in name else f"{at}{name}.weight"]

    def token(self, token: int, position: int) -> Row:
        x = self.w("token_embd")[token] * math.sqrt(D)
        per_layer = self.embeddings(x, token) if self.model.per_layer else None
        many = self.model.arch == "gemma3n"
        streams = [x]
        if many:
            streams += [as_long(x, proj @ x) for proj in self.w("altup_proj")]
        for i in range(self.model.n_layers):
            own = None if per_layer is None or self.without == "per-layer input" else per_layer[i]
            if many:
                streams = self.altup_layer(streams, position, i, own)
            else:
                y = self.layer(streams[0], position, i)
                if own is not None:
                    y = y + self.added(y, i, own)
                scale = (
                    1.0
                    if self.without == "output scale"
                    else float(self.w("layer_output_scale", i)[0])
                )
                streams = [y * scale]
        if many:
            back = self.w("altup_unembd_proj")
            rest = [as_long(streams[0], p @ s) for p, s in zip(back, streams[1:], strict=True)]
            x = np.mean([streams[0], *rest], axis=0)
        else:
            x = streams[0]
        z = self.w("token_embd") @ rms(x, self.w("output_norm"))
        return z if self.without == "softcap" else 3 * np.tanh(z / 3)

    def embeddings(self, x: Row, token: int) -> Row:
        """[n_layers, P]."""
        projected = (self.w("per_layer_model_proj") @ x / math.sqrt(D)).reshape(-1, P)
        normed = np.array([rms(row, self.w("per_layer_proj_norm")) for row in projected])
        found = self.w("per_layer_token_embd")[token].reshape(-1, P) * math.sqrt(P)
        if self.without == "projected embedding":
            normed = 0 * normed
        if self.without == "token's row":
            found = 0 * found
        return (normed + found) / math.sqrt(2)

    def added(self, x: Row, i: int, own: Row) -> Row:
        gate = gelu(self.w("inp_gate", i) @ x) * own
        return rms(self.w("proj", i) @ gate, self.w("post_norm", i))

    def layer(self, x: Row, position: int, i: int, laurel: bool = False) -> Row:
        n = rms(x, self.w("attn_norm", i))
        h = x + rms(self.attention(n, position, i), self.w("post_attention_norm", i))
        if laurel:
            low = self.w("laurel_r", i) @ (self.w("laurel_l", i) @ n)
            h = (h + n + rms(low, self.w("laurel_post_norm", i))) / math.sqrt(2)
        return h + rms(self.block(h, i), self.w("post_ffw_norm", i))

    def attention(self, n: Row, position: int, i: int) -> Row:
        model, source, d = self.model, self.model.source(i), self.model.head_dim(i)
        kv = model.n_kv_heads(i)
        if self.without == "shared K and V" and source != i:
            source -= 1 if model.kind(source - 1) == model.kind(i) else 0
        q = (self.w("attn_q", i) @ n).reshape(4, d)
        q = np.array([self.turned(rms(h, self.w("attn_q_norm", i)), position, i) for h in q])
        if source == i:
            k = (self.w("attn_k", i) @ n).reshape(kv, d)
            v = k
            if f"blk.{i}.attn_v.weight" in model.tensors:
                v = (self.w("attn_v", i) @ n).reshape(kv, d)
            if self.without != "norm of V":
                v = np.array([rms(h) for h in v])
            k = np.array([self.turned(rms(h, self.w("attn_k_norm", i)), position, i) for h in k])
            if (
                self.without == "V before K's norm"
                and f"blk.{i}.attn_v.weight" not in model.tensors
            ):
                v = k
            self.history[i].append((k, v))
        window = 0 if self.without == "window" else model.windows[i]
        seen = self.history[source][-window:]
        out = []
        for head in range(4):
            keys, values = (np.array([row[j][head * kv // 4] for row in seen]) for j in (0, 1))
            logits = keys @ q[head]
            if self.without == "scale of 1":
                logits = logits / math.sqrt(d)
            p = np.exp(logits - logits.max())
            out.append(p @ values / p.sum())
        return self.w("attn_output", i) @ np.concatenate(out)

    def turned(self, x: Row, position: int, i: int) -> Row:
        d, window = len(x), self.model.windows[i]
        base = 100.0 if window and self.without != "window's RoPE" else 1000.0
        freqs = base ** (-2 * np.arange(d // 2) / d)
        if (
            "rope_freqs.weight" in self.model.tensors
            and not window
            and self.without != "proportional RoPE"
        ):
            freqs = freqs / self.w("rope_freqs")
        pairs = (x[: d // 2] + 1j * x[d // 2 :]) * np.exp(1j * freqs * position)
        return np.concatenate([pairs.real, pairs.imag])

    def block(self, h: Row, i: int) -> Row:
        m = rms(h, self.w("ffn_norm", i))
        gate = self.w("ffn_gate", i) @ m
        if self.model.arch == "gemma3n" and self.model.sparsity[i] and self.without != "sparsity":
            gate = np.maximum(gate - gate.mean() - self.model.sparsity[i] * gate.std(ddof=1), 0)
        y = self.w("ffn_down", i) @ (gelu(gate) * (self.w("ffn_up", i) @ m))
        if not self.model.experts:
            return y
        routed = rms(self.experts(h, i), self.w("post_ffw_norm_2", i))
        return rms(y, self.w("post_ffw_norm_1", i)) + routed

    def experts(self, h: Row, i: int) -> Row:
        m = rms(h, self.w("pre_ffw_norm_2", i))
        scale = 1.0 if self.without == "router's scale" else self.w("ffn_gate_inp.scale", i)
        p = np.exp(self.w("ffn_gate_inp", i) @ (scale * rms(h) / math.sqrt(D)))
        chosen = np.argsort(-p)[:2]
        out = np.zeros(D)
        for e in chosen:
            gate, up = np.split(self.w("ffn_gate_up_exps", i)[e] @ m, 2)
            y = self.w("ffn_down_exps", i)[e] @ (gelu(gate) * up)
            factor = (
                1.0 if self.without == "experts' scale" else self.w("ffn_down_exps.scale", i)[e]
            )
            out += p[e] / p[chosen].sum() * factor * y
        return out

    def altup_layer(self, x: list[Row], position: int, i: int, own: Row | None) -> list[Row]:
        def routed(z: Row) -> Row:
            return np.tanh(self.w("altup_router", i) @ rms(z, self.w("altup_router_norm", i)) / D)

        coefs = (self.w("altup_predict_coef", i) @ routed(x[0])).reshape(4, 4)
        if self.without == "prediction":
            coefs = 0 * coefs
        guess = [x[j] + sum(coefs[j, k] * x[k] for k in range(4)) for j in range(4)]
        y = self.layer(guess[0], position, i, laurel=self.without != "Laurel")
        change = self.w("altup_correct_coef", i) @ routed(y)
        if self.without == "correction":
            change = 0 * change
        new = [guess[j] + (1 + change[j]) * (y - guess[0]) for j in range(4)]
        if own is not None:
            scale = 1.0 if self.without == "correct_scale" else self.w("altup_correct_scale", i)
            new[1:] = [stream + self.added(scale * new[0], i, own) for stream in new[1:]]
        return new
