"""Recurrent layers on the GPU's backend, against the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from localkv.cache.arrays import StateRows
from localkv.kernels.bounds import BoundsError
from localkv.kernels.gpu.scan import scan
from localkv.kernels.gpu.triton_backend import triton_backend
from localkv.kernels.recurrent import scan_by_token
from localkv.kernels.reference.backend import reference_backend
from support.f32_copy import f32_copy
from support.forward import logits, nmse
from support.hybrid_models import KEYS, LAYERS, hybrid

pytestmark = pytest.mark.usefixtures("large_tiles")


class SomeBatch:
    """Two sequences, in slots 2 and 0."""

    starts = (0, 3, 4)
    start_table = torch.tensor(starts, dtype=torch.int32)
    slots = torch.tensor([2, 0])


def states(heads: int, rows: int, columns: int) -> StateRows:
    data = torch.randn(3, 64 + heads * rows * columns)
    memory = data[:, 64:].reshape(3, heads, rows, columns)
    return StateRows(data[:, :64], memory, data, 0, 64, 3)


@pytest.mark.parametrize("rows", [24, 64])
@pytest.mark.parametrize("predicts", [True, False])
@pytest.mark.parametrize("by_row", [False, True])
def test_scan(by_row: bool, predicts: bool, rows: int) -> None:
    torch.manual_seed(0)
    heads, columns = 3, 40
    q, k = torch.randn(4, heads, rows), torch.randn(4, heads, rows) / rows**0.5
    v, decay = torch.randn(4, heads, columns), torch.rand(4, heads, rows)
    decay = decay if by_row else decay[..., 0]
    beta = torch.rand(4, heads) if predicts else None
    state = states(heads, rows, columns)
    other = state.data.clone()
    twin = StateRows(other[:, :64], other[:, 64:].reshape(state.memory.shape), other, 0, 64, 3)
    got = scan(q, k, v, decay, beta, state, SomeBatch())  # type: ignore[arg-type]
    want = scan_by_token(q, k, v, decay, beta, twin, SomeBatch())  # type: ignore[arg-type]
    assert nmse(got, want) < 1e-12
    assert nmse(state.data, other) < 1e-12
    np.testing.assert_array_equal(state.data[1], other[1])
    with pytest.raises(BoundsError):
        scan(q, k, v[:, :, 1:], decay, beta, state, SomeBatch())  # type: ignore[arg-type]
    with pytest.raises(BoundsError):
        scan(q, k, v, decay[:, 1:], beta, state, SomeBatch())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("lfm2", "kimi-linear") else pytest.mark.slow)
        for name in KEYS
    ],
)
def test_models(name: str, tmp_path: Path) -> None:
    """A prompt, and tokens one at a time."""
    path, ids = hybrid(name).write(tmp_path / "model.gguf"), [5, 90, 3, 17, 60, 2]
    if {"experts", "kimi"} & set(LAYERS[name]):  # F16 matrices beside experts round activations
        path = f32_copy(path, tmp_path / "f32.gguf")
    want = logits(path, reference_backend(torch.float64), ids, "f32")
    assert nmse(logits(path, triton_backend("cpu"), ids, "f32", chunk=4), want) < 1e-5
    assert nmse(logits(path, triton_backend("cpu"), ids[:3], "f32", chunk=1), want[:3]) < 1e-9
