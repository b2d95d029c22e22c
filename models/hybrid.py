"""The hybrid model: gated delta nets in three layers of four, gated attention in the other, and a
head that guesses; architecture `qwen35` of GGUF, whose names the modules have.

The head is a layer behind the others (multi-token prediction, DeepSeek-V3, arXiv:2412.19437). From
the hidden state of a token and the embedding of the token after it, it predicts the one that
follows. In training its aim is what the model itself predicts there. Its outputs go into the same
layer once more, since it reads them when it guesses a second token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from network import Network, Norm, Shape, rope_frequencies
from torch import Tensor, nn

_CHUNK = 32
_HALF_LIVES = (8.0, 512.0)
"""The shortest and the longest half-life of the states, in tokens, before training."""


@dataclass(frozen=True)
class HybridShape(Shape):
    """`head_width` is also the width of the delta nets' heads.

    Attributes:
        state_heads: heads of a delta net.
        kernel: tokens that its convolution sees.
        interval: of each `interval` layers the last one attends.
    """

    width: int = 128
    layers: int = 8
    heads: int = 2
    kv_heads: int = 1
    hidden: int = 256
    state_heads: int = 2
    kernel: int = 4
    interval: int = 4


SHAPES = {"tales-hybrid": HybridShape()}


class ChannelNorm(nn.RMSNorm):
    """RMSNorm of a head's channels, in the type of its input."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__(shape.head_width, shape.norm_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Kernel(nn.Module):
    """A causal convolution of each channel; the weight has an axis that keeps it from Muon."""

    def __init__(self, channels: int, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, n) * 0.2)
        with torch.no_grad():
            self.weight[..., -1] += 1.0

    def forward(self, x: Tensor) -> Tensor:
        n, weight = self.weight.shape[-1], self.weight[:, 0].to(x.dtype)
        rows = F.pad(x, (0, 0, n - 1, 0))
        length = x.shape[1]
        return torch.stack([rows[:, j : j + length] * weight[:, j] for j in range(n)]).sum(0)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, fading: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule (arXiv:2412.06464) by chunks: [rows, tokens, heads, channels].

    Args:
        q, k, v: [rows, tokens, heads, channels].
        fading: logarithms of decays [rows, tokens, heads].
        beta: [rows, tokens, heads].
    """
    length = q.shape[1]
    missing = -length % _CHUNK

    def chunks(x: Tensor) -> Tensor:
        """[rows, heads, chunks, tokens of one, ...]."""
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
        return x.unflatten(1, (-1, _CHUNK)).movedim(3, 1)

    q, k, v, fading, beta = (chunks(x.float()) for x in (q, k, v, fading, beta))
    since = fading.cumsum(-1)
    between = (since[..., :, None] - since[..., None, :]).tril().exp().tril()
    power = -(beta[..., None] * (k @ k.mT) * between).tril(-1)
    solved = torch.eye(_CHUNK) + power
    for _ in range(int(math.log2(_CHUNK)) - 1):  # the inverse of 1 - power, whose powers end
        power = power @ power
        solved = solved + solved @ power
    new = solved @ (beta[..., None] * v)
    read = solved @ ((beta * since.exp())[..., None] * k)
    seen = (q @ k.mT * between).tril()
    asked, last = q * since.exp()[..., None], since[..., -1:]
    kept = (k * (last - since).exp()[..., None]).mT
    faded = last.exp()[..., None]
    state = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    out = []
    for i in range(q.shape[2]):
        values = new[:, :, i] - read[:, :, i] @ state
        out.append(asked[:, :, i] @ state + seen[:, :, i] @ values)
        state = state * faded[:, :, i] + kept[:, :, i] @ values
    return torch.stack(out, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)


class HybridBlock(nn.Module):
    """A mixer and a gated feed-forward part, each on the normalised residual stream."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        self.attn_norm = Norm(shape)
        self.post_attention_norm = Norm(shape)
        self.ffn_gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.ffn_up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.ffn_down = nn.Linear(shape.hidden, shape.width, bias=False)

    def mixed(self, h: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        x = x + self.mixed(self.attn_norm(x), cosines, sines)
        h = self.post_attention_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class DeltaBlock(HybridBlock):
    """A layer with a gated delta net."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__(shape)
        heads, width = shape.state_heads, shape.state_heads * shape.head_width
        self.attn_qkv = nn.Linear(shape.width, 3 * width, bias=False)
        self.attn_gate = nn.Linear(shape.width, width, bias=False)
        self.ssm_beta = nn.Linear(shape.width, heads, bias=False)
        self.ssm_alpha = nn.Linear(shape.width, heads, bias=False)
        self.ssm_conv1d = Kernel(3 * width, shape.kernel)
        first, last = _HALF_LIVES
        lives = first * (last / first) ** torch.linspace(0, 1, heads)
        self.log_rate = nn.Parameter(torch.zeros(heads))
        self.ssm_dt = nn.Parameter((math.log(2) / lives).expm1().log())
        self.ssm_norm = ChannelNorm(shape)
        self.ssm_out = nn.Linear(width, shape.width, bias=False)

    def mixed(self, h: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        size, eps = self.shape.head_width, self.shape.norm_epsilon
        parts = F.silu(self.ssm_conv1d(self.attn_qkv(h))).unflatten(-1, (3, -1, size))
        alpha, beta = self.ssm_alpha(h).float(), self.ssm_beta(h).float().sigmoid()
        with torch.autocast("cpu", enabled=False):
            q, k, v = parts.float().unbind(2)
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) for x in (q, k))
            fading = -self.log_rate.exp() * F.softplus(alpha + self.ssm_dt)
            out = gated_delta(q / math.sqrt(size), k, v, fading, beta)
            out = self.ssm_norm(out).flatten(2)
        return self.ssm_out(out.to(h.dtype) * F.silu(self.attn_gate(h)))


class AttentionBlock(HybridBlock):
    """A layer of attention with a gate; the halves of a head are RoPE's pairs."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__(shape)
        queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.attn_q = nn.Linear(shape.width, 2 * queries, bias=False)
        self.attn_k = nn.Linear(shape.width, keys, bias=False)
        self.attn_v = nn.Linear(shape.width, keys, bias=False)
        self.attn_q_norm = ChannelNorm(shape)
        self.attn_k_norm = ChannelNorm(shape)
        self.attn_output = nn.Linear(queries, shape.width, bias=False)

    def mixed(self, h: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        shape = self.shape
        q, gate = self.attn_q(h).unflatten(-1, (shape.heads, 2, -1)).unbind(3)
        k, v = (
            layer(h).unflatten(-1, (shape.kv_heads, -1)) for layer in (self.attn_k, self.attn_v)
        )
        q, k = self.attn_q_norm(q).transpose(1, 2), self.attn_k_norm(k).transpose(1, 2)
        q, k = _rotate_halves(q, cosines, sines), _rotate_halves(k, cosines, sines)
        group = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.transpose(1, 2).repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.attn_output((mixed * gate.sigmoid()).flatten(2))


def _rotate_halves(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosines - second * sines, first * sines + second * cosines), -1)


class HeadTensors(nn.Module):
    """What a head has beside its layer."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.eh_proj = nn.Linear(2 * shape.width, shape.width, bias=False)
        self.enorm, self.hnorm, self.shared_head_norm = (Norm(shape) for _ in range(3))


class Head(AttentionBlock):
    """The layer that guesses."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__(shape)
        self.nextn = HeadTensors(shape)

    def guess(self, hidden: Tensor, embedding: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """The normed output, which is the hidden state of the next guess, too."""
        own = self.nextn
        x = own.eh_proj(torch.cat((own.enorm(embedding), own.hnorm(hidden)), -1))
        return own.shared_head_norm(self.forward(x, cosines, sines))


class HybridNetwork(nn.Module):
    """Token ids in, logits out; the embedding is also the output matrix."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocabulary, shape.width)
        kinds = [
            AttentionBlock if (i + 1) % shape.interval == 0 else DeltaBlock
            for i in range(shape.layers)
        ]
        self.blk = nn.ModuleList([*(kind(shape) for kind in kinds), Head(shape)])
        self.output_norm = Norm(shape)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                adds = name.endswith(("attn_output", "ssm_out", "ffn_down"))
                nn.init.normal_(module.weight, 0, (not adds) * 0.7 / math.sqrt(module.in_features))
        nn.init.normal_(self.token_embd.weight, 0, 0.25)

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.hidden(ids))

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.token_embd.weight)

    def hidden(self, ids: Tensor) -> Tensor:
        """The normed hidden state of each token."""
        x, *angles = self._embedded(ids)
        for block in self.blk[:-1]:
            x = block(x, *angles)
        return self.output_norm(x)

    def guesses(self, hidden: Tensor, ids: Tensor, count: int) -> list[Tensor]:
        """The head's logits for the token after the next one, the one after that, and so on.

        Guess n is [rows, tokens - n, vocabulary].
        """
        embedded, cosines, sines = self._embedded(ids)
        found = []
        for n in range(1, count + 1):
            angles = cosines[:-n], sines[:-n]
            hidden = self.blk[-1].guess(hidden[:, : len(angles[0])], embedded[:, n:], *angles)
            found.append(self.logits(hidden))
        return found

    def _embedded(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings, cosines and sines."""
        positions = torch.arange(ids.shape[1], dtype=torch.float32)
        angles = torch.outer(positions, rope_frequencies(self.shape))
        x = self.token_embd(ids)
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        return x, angles.cos().to(x.dtype), angles.sin().to(x.dtype)


AnyNetwork = Network | HybridNetwork


def new_network(shape: Shape) -> AnyNetwork:
    """A network of random weights."""
    return HybridNetwork(shape) if isinstance(shape, HybridShape) else Network(shape)


def shape_of(numbers: dict[str, float]) -> Shape:
    """The shape whose `as_dict` gave these numbers."""
    return (HybridShape if "state_heads" in numbers else Shape)(**numbers)
