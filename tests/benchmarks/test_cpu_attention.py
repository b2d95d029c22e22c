"""`benchmarks/cpu_attention.py`: caches of all kinds of types, with their tails and sinks."""

from __future__ import annotations

import sys
from argparse import Namespace

import pytest
import torch

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from cpu_attention import filled, packed_call

from localkv.kernels.cpu.attention.packed_attention import PackedAttention
from localkv.kernels.reference.backend import attention_reference


@pytest.mark.parametrize(
    "pair",
    [("kv2_1c", "q4_1"), *(pytest.param((t, t), marks=pytest.mark.slow) for t in ("f16", "nuq3"))],
)
def test_what_is_timed_is_attention(pair: tuple[str, str]) -> None:
    """Ours gives what the reference gives, of the same rows."""
    args = Namespace(layers=2, kv_heads=2, head_dim=64)
    q, outs = torch.randn(1, 4, 64), []
    for run, plain in ((PackedAttention(), False), (attention_reference, True)):
        torch.manual_seed(0)
        call = packed_call(run, *filled(args, pair, 130, 1, plain), q if plain else q.numpy())
        outs.append(torch.as_tensor(call(1)))
    assert torch.isfinite(outs[0]).all()
    torch.testing.assert_close(*outs, atol=0.02, rtol=0)
