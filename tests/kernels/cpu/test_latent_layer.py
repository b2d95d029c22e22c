"""Latent attention as chains, against the same put together from primitives, bit for bit."""

from __future__ import annotations

import pytest

from localkv.cache.layout import SegmentSpec, Tail
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.cpu.layers.latents import is_fused
from support.latent_layers import LatentModel, Options, check_latents
from support.tail_checks import segments as tail_rows

ROTATED = SegmentSpec("q8_0", "q4_0", 0, 32, 32)
OPTIONS = {
    "low rank": Options(),
    "q at once": Options("q8_0", low_rank=False, rope=False),
    "scaled": Options("f32", scaled=True, segments=(ROTATED,)),
    "biases": Options("bf16", biased=True, rope=None),
    "scales of rows": Options(segments=(SegmentSpec("fp8_e4m3_token", "f16"),)),
    "tail": Options(segments=tail_rows(Tail(2, 4), "q4_0", "q8_0", 32)),
    "groups": Options("q8_0", segments=tail_rows(Tail(3, 5, 32), "q4_1c", "f16", 0)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_chains_give_the_bits_of_what_is_composed(name: str) -> None:
    backend = cpu_backend()
    check_latents(OPTIONS[name], backend)
    assert is_fused(LatentModel(OPTIONS[name], backend).weights)
