"""Products with many tokens, whose matrices are decoded first, against the packed products."""

from __future__ import annotations

import pytest
import torch

from localkv.arch.spec import MlpSpec
from localkv.kernels.gpu.products import products
from localkv.kernels.layer_weights import Linear
from support.gpu_products import prepared

ROWS, COLUMNS, TOKENS = 272, 512, 20


TYPES = ["f16", "bf16", "q4_0", "q8_0", "q5_1", "q4_K", "q6_K", "iq2_xxs"]


@pytest.mark.parametrize(
    ("name", "rows_at_a_time"),
    [*((name, ROWS) for name in TYPES), ("f16", 100), ("q4_0", 100), ("q4_K", 100)],
)
def test_the_packed_products(
    name: str, rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices of any number of tokens are decoded, whole or some rows at a time."""
    monkeypatch.setattr(products, "DECODED_BYTES", 2 * COLUMNS * rows_at_a_time)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, COLUMNS, generator=generator)
    residual = torch.randn(TOKENS, ROWS, generator=generator)
    bias = torch.randn(ROWS, generator=generator)
    one = Linear(prepared(name, ROWS, COLUMNS), bias)
    other = Linear(prepared(name, ROWS, COLUMNS, seed=3))
    block = MlpSpec(ROWS, "gelu", gated=False)

    def made(many_tokens: int) -> list[torch.Tensor]:
        monkeypatch.setattr(products, "MANY_TOKENS", many_tokens)
        return [
            *products.linears(x, (one,), residual),
            *products.linears(x, (one,), block=block),
            *products.linears(x, (one, other)),
            products.gate_up(x, one, other, MlpSpec(one.weight.shape[0])),
        ]

    for got, want in zip(made(TOKENS), made(TOKENS + 1), strict=True):
        assert float((got - want).norm() / want.norm()) < 1e-6


def test_float32_is_never_rounded() -> None:
    weight = prepared("f32", 16, 64)
    assert not products.decodes(products.MANY_TOKENS, [weight])
    assert products.decodes(products.MANY_TOKENS, [prepared("q4_0", 16, 64)])
