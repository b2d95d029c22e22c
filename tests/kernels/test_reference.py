"""Products, routing and embedding on packed tensors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from localkv.arch.spec import MoeSpec
from localkv.kernels.layer_weights import Linear, MoeWeights
from localkv.kernels.moe import route
from localkv.kernels.reference.backend import linear, matmul
from localkv.kernels.reference.torch_arrays import decoded
from localkv.quant_formats import FORMATS, packed_tensor
from localkv.quant_formats.base import Codec, QuantFormat, split_blocks
from support.cpu_ops import moe_mlp
from support.packed_rows import join_planes
from support.random_packed import random_packed

NAMES = [
    name
    for name, fmt in FORMATS.items()
    if not fmt.row_planes and fmt.group_tokens == 1 and not fmt.n_centroids
]
"""Formats that a matrix can have, and the cache's that are like them."""


@pytest.mark.parametrize("name", NAMES)
def test_planes_split_and_join_without_loss(name: str) -> None:
    fmt = FORMATS[name]
    blocks = np.random.default_rng(0).integers(0, 256, (3, 5 * fmt.block_bytes), np.uint8)
    assert np.array_equal(join_planes(split_blocks(fmt, blocks)), blocks)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_tokens", [1, 3])
def test_product_equals_the_decoded_matrix(
    name: str, n_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_tensor, "TILE_VALUES", 512 * 3)
    weight = random_packed(name, 7, 512)
    x = torch.randn(n_tokens, 512, dtype=torch.float64)
    want = x @ decoded(weight, torch.float64).T
    assert torch.allclose(matmul(x, weight), want)
    narrow = matmul(x.half().float(), weight)
    assert torch.allclose(narrow.double(), x.half().double() @ decoded(weight, torch.float64).T,
                          rtol=1e-4, atol=1e-4)  # fmt: skip
    bias = torch.randn(7, dtype=torch.float64)
    assert torch.allclose(linear(x, Linear(weight, bias)), want + bias)


@pytest.mark.parametrize("name", NAMES)
def test_no_more_than_a_tile_is_decoded_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product never holds more of the decoded matrix than `TILE_VALUES` values."""
    monkeypatch.setattr(packed_tensor, "TILE_VALUES", 2048)
    weight = random_packed(name, 37, 512)
    decoded: list[int] = []

    class Counting:
        def __init__(self, codec: Codec) -> None:
            self.codec = codec

        def decode(self, planes: tuple[np.ndarray, ...]) -> np.ndarray:
            out = self.codec.decode(planes)
            decoded.append(out.size)
            return out

    codec = weight.format.codec
    monkeypatch.setattr(QuantFormat, "codec", property(lambda self: Counting(codec)))
    matmul(torch.randn(2, 512), weight)
    assert sum(decoded) == 37 * 512
    assert max(decoded) <= 2048


def test_activations_beyond_f16_do_not_become_infinite() -> None:
    weight = replace(random_packed("f16", 4, 64), halves_activations=True)
    x = torch.full((1, 64), 1e6)
    assert matmul(x, weight).isfinite().all()
    near = torch.full((1, 64), 1.0 + 2.0**-12)
    assert torch.equal(matmul(near, weight), matmul(torch.ones(1, 64), weight))
    assert np.array_equal(weight[:2].decode(), weight.decode()[:2])
    assert weight[:2].halves_activations


@pytest.mark.parametrize("name", NAMES)
def test_embedding_rows(name: str) -> None:
    table = random_packed(name, 11, 256)
    ids = torch.tensor([3, 3, 10, 0])
    assert torch.equal(decoded(table[ids.numpy()]), decoded(table)[ids])


def test_routing() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    experts, weights = route(logits, MoeSpec(4, 2, n_ff=8))
    assert experts.tolist() == [[1, 3]]
    probabilities = logits.softmax(-1)[0]
    assert torch.allclose(weights[0], probabilities[[1, 3]] / probabilities[[1, 3]].sum())
    _, plain = route(logits, MoeSpec(4, 2, n_ff=8, renormalise=False))
    assert torch.allclose(plain[0], probabilities[[1, 3]])


@pytest.mark.parametrize("name", ["f32", "q4_0", "q6_K"])
def test_experts_on_packed_tensors(name: str) -> None:
    """Tokens of several experts, an expert without tokens, more tokens than experts."""
    moe = MoeSpec(5, 2, n_ff=256)
    router = random_packed("f32", 5, 256, seed=1)
    router.decode()[4] = -100.0  # nobody wants the last expert
    stacks = [random_packed(name, 5, 256, 256, seed=seed) for seed in (2, 3, 4)]
    layer = MoeWeights(Linear(router), *stacks)
    x = torch.rand(9, 256, dtype=torch.float64)
    gate, up, down = (decoded(stack, torch.float64) for stack in stacks)
    want = []
    for row in x:
        scores = np.exp((decoded(router, torch.float64) @ row).numpy())
        chosen = np.argsort(-scores)[:2]
        total = torch.zeros(256, dtype=torch.float64)
        for e in chosen:
            hidden = torch.nn.functional.silu(gate[e] @ row) * (up[e] @ row)
            total += scores[e] / scores[chosen].sum() * (down[e] @ hidden)
        want.append(total)
    assert torch.allclose(moe_mlp(x, layer, moe), torch.stack(want))
