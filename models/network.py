"""The model: a plain Llama decoder in the interleaved RoPE layout of GGUF, so nothing is permuted.

`wire` presets the attention of the first two layers at initialisation. All weights stay trainable
and the file format knows nothing of it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_COPY_GAINS = (0.7, 0.5, 0.5, 0.5)  # how loud the copies of the last four tokens are
_RECENCY = (1.0, 0.8, 0.7, 0.6)  # how much each of the four counts when contexts are compared


@dataclass(frozen=True)
class Shape:
    """The hyperparameters that the GGUF file records."""

    vocabulary: int = 1024
    width: int = 256
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 64
    hidden: int = 768
    context: int = 2048
    rope_base: float = 1e6
    norm_epsilon: float = 1e-5

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


SHAPES = {
    "tales-4M": Shape(),
    "tales-draft": Shape(width=128, layers=2, heads=2, kv_heads=1, hidden=384),
}
"""By name: the model that ships, and a small one that drafts its tokens."""


def rope_frequencies(shape: Shape) -> Tensor:
    half = torch.arange(0, shape.head_width, 2, dtype=torch.float32)
    return shape.rope_base ** (-half / shape.head_width)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn every pair of neighbouring channels by its angle."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cosines - odd * sines, even * sines + odd * cosines), -1).flatten(-2)


class Norm(nn.RMSNorm):
    """RMSNorm that works in the type of its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.width, shape.norm_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Block(nn.Module):
    """Attention and a gated feed-forward part, each on the normalised residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.attn_norm = Norm(shape)
        self.attn_q = nn.Linear(shape.width, queries, bias=False)
        self.attn_k = nn.Linear(shape.width, keys, bias=False)
        self.attn_v = nn.Linear(shape.width, keys, bias=False)
        self.attn_output = nn.Linear(queries, shape.width, bias=False)
        self.ffn_norm = Norm(shape)
        self.ffn_gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.ffn_up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.ffn_down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.attn_norm(x)
        q, k, v = (
            layer(h).view(batch, length, -1, self.shape.head_width).transpose(1, 2)
            for layer in (self.attn_q, self.attn_k, self.attn_v)
        )
        q, k = rotate(q, cosines, sines), rotate(k, cosines, sines)
        group = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_output(mixed.transpose(1, 2).reshape(batch, length, -1))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class Network(nn.Module):
    """Token ids in, logits out; the embedding is also the output matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocabulary, shape.width)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output_norm = Norm(shape)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.7 / math.sqrt(module.in_features))
        for block in self.blk:
            nn.init.zeros_(block.attn_output.weight)
            nn.init.zeros_(block.ffn_down.weight)
        nn.init.normal_(self.token_embd.weight, 0, 0.25)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], dtype=torch.float32)
        angles = torch.outer(positions, rope_frequencies(self.shape))
        x = self.token_embd(ids)
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blk:
            x = block(x, cosines, sines)
        return F.linear(self.output_norm(x), self.token_embd.weight)


@torch.no_grad()
def wire(network: Network, seed: int) -> None:
    """Preset induction heads, which a model this small does not find by itself in short training.

    Layer 0: channel 0 of every embedding is the same constant. K is that constant on the fast RoPE
    pairs. Q is the same, rotated back by 1 to 4 positions. So head n attends to the token n + 1
    places back, and copies it into a random subspace of its own.

    Layer 1 uses the slow RoPE pairs. The first KV head finds the token after an earlier copy of the
    current token. The second one compares the last four tokens with the four before every token.
    Both copy what they find to the output.
    """
    shape = network.shape
    width, head = shape.width, shape.head_width
    group = shape.heads // shape.kv_heads
    frequencies = rope_frequencies(shape)
    generator = torch.Generator().manual_seed(seed)

    network.token_embd.weight[:, 0] = 2.0

    def directions() -> Tensor:
        """Orthonormal columns that leave the constant channel alone."""
        free = torch.linalg.qr(torch.randn(width - 1, width - 1, generator=generator))[0]
        return torch.cat((torch.zeros(1, width - 1), free))

    read = directions()[:, :head].T
    spaces = F.pad(directions(), (0, 1))
    copies: list[Tensor] = []
    fast = (frequencies > 0.05).float()
    first = network.blk[0]
    first.attn_q.weight.mul_(0.2)
    first.attn_k.weight.mul_(0.2)
    for index in range(shape.kv_heads):
        rows = slice(index * head, (index + 1) * head)
        first.attn_k.weight[rows, 0] = _interleave(fast, torch.zeros_like(fast)) * 2.2
        first.attn_v.weight[rows] = read * 0.6
    for index in range(shape.heads):
        rows = slice(index * head, (index + 1) * head)
        angles = -frequencies * (index + 1)
        first.attn_q.weight[rows, 0] = _interleave(fast * angles.cos(), fast * angles.sin()) * 2.2
        copy = spaces[:, rows]
        copies.append(copy)
        first.attn_output.weight[:, rows] = copy * _COPY_GAINS[index]

    slow = (frequencies < 0.0012).float()
    slow = _interleave(slow, slow)[:, None]
    second = network.blk[1]
    second.attn_k.weight[:head] = copies[0].T * slow * 4
    second.attn_q.weight[:head] = read * slow * 4
    if shape.kv_heads > 1:
        keys, queries = torch.zeros(head, width), torch.zeros(head, width)
        for index, copy in enumerate(copies):
            mix = torch.linalg.qr(torch.randn(head, head, generator=generator))[0]
            recency = _RECENCY[index]
            keys += mix @ copy.T * recency / _COPY_GAINS[index]
            earlier = read if index == 0 else copies[index - 1].T / _COPY_GAINS[index - 1]
            queries += mix @ earlier * recency
        second.attn_k.weight[head : 2 * head] = keys * slow * 4
        second.attn_q.weight[group * head : (group + 1) * head] = queries * slow * 4
    for index in range(shape.kv_heads):
        rows = slice(index * head, (index + 1) * head)
        carry = directions()[:, :head].T
        second.attn_v.weight[rows] = carry * 2
        head_rows = slice(index * group * head, (index * group + 1) * head)
        second.attn_output.weight[:, head_rows] = carry.T * 2


def _interleave(even: Tensor, odd: Tensor) -> Tensor:
    return torch.stack((even, odd), -1).flatten()
