"""Rotary position embedding (Su et al. 2021), with linear, YaRN and Llama-3 scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from localkv.arch.spec import RopeSpec, Temperature


@dataclass(frozen=True)
class RopeTable:
    """Rotations of a batch's tokens.

    Attributes:
        cos, sin: [tokens, n_dims / 2], already multiplied by `RopeSpec.magnitude`.
        interleaved: pairs are (2i, 2i+1), ggml's NORM; otherwise (i, i + n_dims/2), ggml's NEOX.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


def rope_frequencies(rope: RopeSpec, freq_factors: Tensor | None = None) -> Tensor:
    """Angle per position of each rotated pair, float64 [n_dims / 2].

    Args:
        rope: base, scaling and YaRN's constants.
        freq_factors: [n_dims / 2] divisors, the tensor `rope_freqs.weight`, or None. The result
            is on its device, or else on the CPU.

    YaRN as in ggml's `ggml_rope_yarn` (Peng et al. 2023): frequencies that turn often within the
    original context are kept, those that turn rarely are interpolated, with a ramp in between.
    """
    device = None if freq_factors is None else freq_factors.device
    half = torch.arange(rope.n_dims // 2, dtype=torch.float64, device=device)
    freqs = rope.theta ** (-2.0 * half / rope.n_dims)
    if freq_factors is not None:
        freqs = freqs / freq_factors.to(torch.float64)
    interpolated = freqs / rope.factor
    if rope.yarn_ext_factor == 0.0:
        return interpolated

    def correction_dim(n_rotations: float) -> float:
        turns = rope.original_context_length / (n_rotations * 2 * math.pi)
        return rope.n_dims * math.log(turns) / (2 * math.log(rope.theta))

    low = max(0.0, math.floor(correction_dim(rope.yarn_beta_fast)))
    high = min(rope.n_dims - 1.0, math.ceil(correction_dim(rope.yarn_beta_slow)))
    ramp = ((half - low) / max(0.001, high - low)).clamp(0.0, 1.0)
    keep = (1.0 - ramp) * rope.yarn_ext_factor
    return interpolated * (1.0 - keep) + freqs * keep


def rope_table(freqs: Tensor, positions: Tensor, rope: RopeSpec, dtype: torch.dtype) -> RopeTable:
    """Cosines and sines of `positions` (int64 [tokens]); angles are taken in float64."""
    angles = positions.to(torch.float64)[:, None] * freqs
    cos, sin = angles.cos() * rope.magnitude, angles.sin() * rope.magnitude
    return RopeTable(cos.to(dtype), sin.to(dtype), rope.interleaved)


def position_scale(positions: Tensor, temperature: Temperature, dtype: torch.dtype) -> Tensor:
    """Factors on q that grow with its position: [tokens]."""
    steps = positions // temperature.length
    return (torch.log(steps.double() + 1.0) * temperature.scale + 1.0).to(dtype)


def apply_rope(x: Tensor, table: RopeTable) -> Tensor:
    """Rotate the first n_dims channels of each head of x [tokens, heads, head_dim]."""
    n_dims = 2 * table.cos.shape[-1]
    rotated, rest = x[..., :n_dims], x[..., n_dims:]
    cos, sin = table.cos[:, None], table.sin[:, None]  # [tokens, 1, n_dims / 2]
    if table.interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((turned, rest), dim=-1)
