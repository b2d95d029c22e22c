"""A NaN in a model or in its cache shows: as an error where text was asked for, never as text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from localkv import LLM
from localkv.arch.spec import AttentionParams
from localkv.cache.layout import SegmentSpec
from localkv.kernels.attention import attention
from localkv.kernels.reference.backend import attention_reference, hadamard_transform, store_kv
from support.cpu_ops import cpu_attention, store_kv_cpu
from support.gguf_bytes import spoil
from support.random_model import RandomModel
from support.torch_edge import torch_cache

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@pytest.fixture(scope="module", params=[GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_0])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RandomModel(n_layers=1).write(tmp_path_factory.mktemp("nan") / "m.gguf", request.param)


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("tensor", MATRICES)
def test_a_nan_in_a_matrix_reaches_the_logits(
    model: Path, tensor: str, device: str, tmp_path: Path
) -> None:
    """One value, or one scale of a block, which makes one of many activations NaN."""
    path = spoil(model, f"blk.0.{tensor}.weight", tmp_path / "m.gguf", 0)
    for types in (("f16", "f16"), ("q4_0", "q8_0"), ("q5_1", "q4_1")):
        llm = LLM(path, device=device, cache_type_k=types[0], cache_type_v=types[1], n_ctx=64)
        for n_tokens in (1, 40):
            assert np.isnan(llm.logits(list(range(1, n_tokens + 1)))[-1]).all(), (types, n_tokens)
    assert np.isfinite(LLM(model, device=device, n_ctx=64).logits([1, 2])).all()


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_a_nan_is_an_error_not_text(
    program, tiny_model: Path, tmp_path: Path, device: str, temperature: str
) -> None:
    path = spoil(tiny_model, "blk.0.ffn_up.weight", tmp_path / "m.gguf", 34)
    run = ("complete", "-m", path, "-p", "The fox", "-n", "4", "--device", device)
    result = program(*run, "--temp", temperature, "-q")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: the model produced NaN or infinite logits\n")


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("type_k", ["f32", "f16", "fp8_e4m3_token", "q8_0", "q5_1", "iq4_nl"])
def test_attention_makes_nan_of_what_sees_one(type_k: str, softcap: float) -> None:
    """In q, K and V, in decode and prefill, by one segment and merged from two. What doesn't see it
    stays as it is, and rows that were never written are not seen."""
    generator = torch.Generator().manual_seed(0)
    past, lengths = 290, (1, 37)
    makes_nan = type_k in ("f32", "f16") and not softcap  # of infinity

    def run(kernel, store, where: str, bounds: tuple[int, ...]) -> torch.Tensor:
        generator.manual_seed(1)
        cache = torch_cache(
            n_layers=1,
            n_kv_heads=2,
            head_dim=64,
            segments=[SegmentSpec(type_k, "q8_0", first) for first in bounds],
            n_ctx=512,
            n_sequences=len(lengths),
        )
        layer = cache.layers[0]
        for segment in layer.segments:
            for plane in (*segment.k, *segment.v):
                plane.fill_(0xFF if kernel is not attention_reference else 0)
        sequences = [cache.new_sequence() for _ in lengths]
        params = AttentionParams(0.125, 0, softcap)
        for sizes in ([past] * 2, lengths):
            parts = [(s, [0] * n) for s, n in zip(sequences, sizes, strict=True)]
            batch = cache.batch(parts, generated=[n == 1 for n in sizes])
            q, k, v = (
                torch.randn(sum(sizes), heads, 64, generator=generator) for heads in (4, 2, 2)
            )
            if where == "k" and sizes[0] == past:
                k[100, 1, 7] = k[past + 280, 0, 9] = torch.nan
            if where == "v" and sizes[0] == past:
                v[100, 1, 7] = torch.nan
            if where == "q":
                q[0, 1, 3] = q[20, 2, 63] = torch.nan
            if where == "new k" and sizes is lengths:
                k[21, 1, 0] = torch.inf if makes_nan else torch.nan
            store(k, v, layer, batch.segments)
            for sequence, n in zip(sequences, sizes, strict=True):
                sequence.length += n
        return attention(kernel, q, layer, batch, params, rotate=hadamard_transform)

    for bounds in ((0,), (0, 256)):
        for where in ("q", "k", "v", "new k"):
            want = run(attention_reference, store_kv, where, bounds)
            got = run(cpu_attention(), store_kv_cpu, where, bounds)
            assert want.isnan().any()
            assert not want.isnan().all()
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, equal_nan=True)
