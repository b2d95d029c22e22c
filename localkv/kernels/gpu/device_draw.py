"""Drawing tokens where the logits are, so that they need not come to the host.

This is for chains of the samplers that only look at a token's own logits: top-k, top-p, min-p and
temperature. They keep the same tokens as `samplers` and draw from the same distribution. Their
random numbers are not `Sampler`'s: each is a hash of the seed and the number of the draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from localkv.cache.arrays import NO_TOKEN
from localkv.sampling.params import SamplingParams, active_samplers

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def uniform(random: Tensor) -> Tensor:
    """float64 [] in [0, 1) for a seed and a number, int64 [2]: SplitMix64 (Steele et al. 2014)."""
    z = random[0] + (random[1] + 1) * _GOLDEN
    for shift, factor in _MIX:
        z = (z ^ _shifted(z, shift)) * factor
    z = z ^ _shifted(z, 31)
    return _shifted(z, 11).to(torch.float64) * 2.0**-53


def _shifted(z: Tensor, n: int) -> Tensor:
    """Shift a number as if it were unsigned."""
    return (z >> n) & ((1 << (64 - n)) - 1)


@dataclass(frozen=True)
class DeviceDraw:
    """Draws by a chain. Equal ones draw alike, so that one recording serves both.

    Attributes:
        chain: names of the samplers, in order.
        temperature, top_k, top_p, min_p, min_keep: as in `SamplingParams`.
    """

    chain: tuple[str, ...]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    min_keep: int

    def __call__(self, logits: Tensor, random: Tensor) -> Tensor:
        """The next token.

        Args:
            logits: float32 [1, n_vocab].
            random: int64 [2], the seed and the number of the draw.

        Returns:
            int64 [1]: a token id, or NO_TOKEN.
        """
        if "temperature" in self.chain and self.temperature <= 0:
            largest, ids = logits.max(-1)
            return torch.where(largest.isfinite(), ids, NO_TOKEN)
        x, ids = self._sorted(logits[0])
        usable = x[0].isfinite()
        rank = torch.arange(len(x), device=x.device)
        for name in self.chain:
            x = ON_DEVICE[name](self, x, rank)
        held = x.softmax(0).cumsum(0)
        at = torch.searchsorted(held, uniform(random) * held[-1], right=True)
        last = x.isfinite().sum() - 1
        # an index that is a tensor without dimensions would be read by the host
        drawn = ids.gather(0, torch.minimum(at, last).clamp(min=0).view(1))
        return torch.where(usable, drawn, NO_TOKEN)

    def _sorted(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits that can matter, float64, and their tokens, the largest first."""
        if self.chain[:1] == ("top_k",) and self.top_k < len(logits):
            x, ids = logits.topk(self.top_k)
        else:
            x, ids = logits.sort(descending=True, stable=True)
        return x.double(), ids


def _top_k(draw: DeviceDraw, x: Tensor, rank: Tensor) -> Tensor:
    return _kept(x, rank < draw.top_k)


def _top_p(draw: DeviceDraw, x: Tensor, rank: Tensor) -> Tensor:
    held = x.softmax(0).cumsum(0)
    count = (held < draw.top_p).sum() + 1
    return _kept(x, rank < count.clamp(min=draw.min_keep))


def _min_p(draw: DeviceDraw, x: Tensor, rank: Tensor) -> Tensor:
    return _kept(x, (x >= x[0] + math.log(draw.min_p)) | (rank < draw.min_keep))


def _temperature(draw: DeviceDraw, x: Tensor, rank: Tensor) -> Tensor:
    return x / draw.temperature


def _kept(x: Tensor, keep: Tensor) -> Tensor:
    return x.masked_fill(~keep, -torch.inf)


ON_DEVICE: dict[str, Callable[[DeviceDraw, Tensor, Tensor], Tensor]] = {
    "top_k": _top_k,
    "top_p": _top_p,
    "min_p": _min_p,
    "temperature": _temperature,
}
"""Samplers that can run on the device: from float64 logits [n], the largest first, and their ranks
to such logits. A chain with another one is drawn on the host."""


def device_draw(params: SamplingParams) -> Callable[[Tensor, Tensor], Tensor] | None:
    """How to draw by these parameters on the device, or None if the host must."""
    chain = tuple(entry.name for entry in active_samplers(params))
    if not ON_DEVICE.keys() >= set(chain) or params.logit_bias or params.dynatemp_range > 0:
        return None
    p = params
    return DeviceDraw(chain, p.temperature, p.top_k, p.top_p, p.min_p, p.min_keep)
