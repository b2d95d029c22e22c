"""Numbers on which rounding to 8-bit floats can go wrong."""

from __future__ import annotations

import torch


def fp8_inputs() -> torch.Tensor:
    """Every float16, every bfloat16, and random bits of float32."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    generator = torch.Generator().manual_seed(6)
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), dtype=torch.int64, generator=generator)
    return torch.cat(
        [
            halves.view(torch.float16).float(),
            halves.view(torch.bfloat16).float(),
            bits.to(torch.int32).view(torch.float32),
            torch.randn(1 << 18, generator=generator) * 200,
        ]
    )
