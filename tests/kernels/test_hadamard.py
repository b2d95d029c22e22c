"""The Hadamard transform against the matrix, and what rotation is for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localkv.kernels.reference.backend import hadamard_transform
from localkv.kernels.reference.torch_arrays import decode, encode
from localkv.quant_formats import TOKEN_FORMATS

BLOCKS = (1, 2, 16, 32, 64, 128, 256)


def sylvester(n: int) -> Tensor:
    """The normalised Hadamard matrix of size n, float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < n:
        matrix = torch.cat(
            [torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)]
        )
    return matrix / n**0.5


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("block", BLOCKS)
def test_equals_the_matrix(block: int) -> None:
    x = random(3, 5, 256)
    want = (x.view(3, 5, -1, block) @ sylvester(block)).view(x.shape)
    assert torch.allclose(hadamard_transform(x, block), want, atol=1e-14)
    narrow = hadamard_transform(x.float(), block)
    assert narrow.dtype == torch.float32
    assert torch.allclose(narrow.double(), want, atol=2e-6)


@pytest.mark.parametrize("block", BLOCKS)
def test_twice_is_nothing_and_products_stay(block: int) -> None:
    x, y = random(2, 7, 256).unbind(0)
    rotated = hadamard_transform(x, block)
    assert torch.allclose(hadamard_transform(rotated, block), x, atol=1e-14)
    products = rotated @ hadamard_transform(y, block).T
    assert torch.allclose(products, x @ y.T, atol=1e-12)


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Bit for bit, else a prompt in chunks could be rounded to other codes than token by token."""
    x = random(300, 4, 64, dtype=torch.float32)
    whole = hadamard_transform(x, 64)
    for view, want in (
        (x[17], whole[17]),
        (x[:, 1], whole[:, 1]),
        (x[::3], whole[::3]),
        (x.transpose(0, 1), whole.transpose(0, 1)),
        (x.movedim(-1, 0).contiguous().movedim(0, -1), whole),
        (x[:0], whole[:0]),
    ):
        assert torch.equal(hadamard_transform(view, 64), want)


def test_a_block_of_none_and_blocks_that_do_not_fit() -> None:
    x = random(2, 96)
    assert hadamard_transform(x, 0) is x
    for block in (3, 48, 64, 128):
        with pytest.raises(ValueError, match=f"transform of {block} does not fit 96 channels"):
            hadamard_transform(x, block)


def test_rotation_spreads_outliers() -> None:
    """With a channel ten times as large as the others, 4-bit rows get far more exact."""
    x = random(512, 64, dtype=torch.float32)
    x[:, 5] = 10 + x[:, 5]
    others = torch.arange(64) != 5

    def error(name: str, block: int) -> float:
        fmt = TOKEN_FORMATS[name]
        stored = decode(fmt, encode(fmt, hadamard_transform(x, block)))
        return float((hadamard_transform(stored, block) - x)[:, others].norm())

    assert error("q4_0", 64) < 0.6 * error("q4_0", 0)
    assert error("q8_0", 64) < 0.6 * error("q8_0", 0)
    for name in ("f16", "fp8_e4m3", "fp8_e4m3_token", "fp8_e5m2_token"):  # which `auto` leaves
        assert error(name, 64) > 0.9 * error(name, 0)
