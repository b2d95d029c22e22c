"""Weights, importance matrices and headers that llama-quantize and localkv are given alike.

`data/make_llama_cpp_quantize.py` stores what llama.cpp makes of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

N_ROWS, N_IN = 24, 1024


def _random(n: int, seed: int) -> np.ndarray:
    """uint64 [n] of splitmix64."""
    i = (np.arange(n) + n * seed + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    i = (i ^ (i >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return (i ^ (i >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)


def weights_for(type_name: str) -> np.ndarray:
    """The rows of `weights` of which llama.cpp makes something sensible: float32 [n, N_IN].

    Where 32 values of IQ3_S are zeros, it puts the codes after them in the wrong place.
    """
    return np.delete(weights(), [3, 4] if type_name == "iq3_s" else [], 0)


def weights() -> np.ndarray:
    """float32 [N_ROWS, N_IN]: nearly Gaussian rows, some of them odd."""
    bits = _random(N_ROWS * N_IN, 1).view(np.uint16).reshape(N_ROWS, N_IN, 4)
    x = (bits.astype(np.int32).sum(-1) - 131070).astype(np.float32) * np.float32(2.0**-20)
    x[1::3] *= 1 + np.arange(N_IN, dtype=np.float32) % 7
    x[2, ::32] *= 16  # outliers
    x[3] = 0
    x[4, :300] = 0
    x[5] = np.abs(x[5])
    x[6] = -np.abs(x[6])
    x[7] *= np.float32(2.0**-40)
    x[8] *= np.float32(2.0**-66)
    x[9] = np.round(x[9] * 64) / 64  # ties
    x[10] = 1
    x[11] *= 4096
    x[12, 256:512] *= np.float32(2.0**-20)
    x[13, 1::2] = 0
    return x


def importance(n_in: int, seed: int = 2) -> np.ndarray:
    """float32 [n_in], some of it 0."""
    x = (_random(n_in, seed) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    x = x * x * x * 4
    x[5::97] = 0
    return x


def write_importance(path: Path, columns: Mapping[str, int]) -> None:
    """An importance matrix in llama.cpp's former format, of tensors with that many columns."""
    with path.open("wb") as file:
        file.write(struct.pack("<i", len(columns)))
        for seed, (name, n_in) in enumerate(columns.items()):
            data = name.encode()
            file.write(struct.pack("<i", len(data)) + data + struct.pack("<ii", 4, n_in))
            file.write((4 * importance(n_in, seed)).tobytes())
        file.write(struct.pack("<ii", 4, 9) + b"words.txt")


@dataclass(frozen=True)
class Shape:
    """A model of which only names and shapes matter."""

    architecture: str
    n_layers: int
    n_head: int
    n_head_kv: int
    n_embd: int = 256
    n_experts: int = 0
    is_tied: bool = False
    has_qkv: bool = False

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and row-major shapes."""
        n, n_ff, n_kv = self.n_embd, 2 * self.n_embd, self.n_embd * self.n_head_kv // self.n_head
        yield "token_embd.weight", (512, n)
        if not self.is_tied:
            yield "output.weight", (512, n)
        yield "output_norm.weight", (n,)
        for layer in range(self.n_layers):
            blk = f"blk.{layer}."
            yield blk + "attn_norm.weight", (n,)
            if self.has_qkv:
                yield blk + "attn_qkv.weight", (n + 2 * n_kv, n)
            else:
                yield blk + "attn_q.weight", (n, n)
                yield blk + "attn_k.weight", (n_kv, n)
                yield blk + "attn_v.weight", (n_kv, n)
            yield blk + "attn_output.weight", (n, n)
            for part, shape in (("gate", (n_ff, n)), ("up", (n_ff, n)), ("down", (n, n_ff))):
                if self.n_experts:
                    yield f"{blk}ffn_{part}_exps.weight", (self.n_experts, *shape)
                elif part != "gate" or not self.has_qkv:
                    yield f"{blk}ffn_{part}.weight", shape
            if self.n_experts:
                yield blk + "ffn_gate_inp.weight", (self.n_experts, n)


SHAPES = {
    "llama": Shape("llama", 32, 32, 8),
    "tied": Shape("llama", 26, 8, 8, is_tied=True),
    "large": Shape("llama", 80, 64, 8),
    "mixtral": Shape("llama", 16, 32, 8, n_experts=8),
    "narrow": Shape("llama", 30, 9, 3, n_embd=576, is_tied=True),
    "experts": Shape("qwen2moe", 12, 16, 16, n_experts=60),
    "falcon": Shape("falcon", 32, 16, 1, has_qkv=True),
}
