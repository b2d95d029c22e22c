"""Weights in a GPU's layout and products with them, against plain decode and float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from localkv.arch.spec import MlpSpec, XieluParams
from localkv.cache.arrays import NO_TOKEN
from localkv.errors import ModelFileError
from localkv.kernels.activation import activate
from localkv.kernels.gpu.device import GpuInfo
from localkv.kernels.gpu.embedding import embed
from localkv.kernels.gpu.norm import added_norm, norm_packed
from localkv.kernels.gpu.norm import norm as gpu_norm
from localkv.kernels.gpu.products import products
from localkv.kernels.gpu.products.activations import pack_rows
from localkv.kernels.gpu.products.epilogues import GATED, PLAIN
from localkv.kernels.gpu.products.plane_tensor import PlaneTensor, prepare
from localkv.kernels.gpu.products.products import gate_up, hidden_rows, linear, linears, normed
from localkv.kernels.gpu.triton_backend import METHODS
from localkv.kernels.layer_weights import Linear, MlpWeights, Norm
from localkv.kernels.reference.backend import norm as plain_norm
from localkv.kernels.reference.torch_arrays import decoded
from localkv.quant_formats import FORMATS, WEIGHT_FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor
from support.gpu_products import CPU, EXACT, error, far, prepared, with_rows
from support.layers import layer_norm, rms
from support.quick import quick
from support.random_packed import random_packed

NAMES = [fmt.name for fmt in WEIGHT_FORMATS.values()]
FP16 = 1.2e-3
"""Both operands are rounded to 11 bits, and a scale, too."""


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_of_a_product_is_what_it_reads(name: str) -> None:
    weight = prepared(name, 16, 512)
    said = METHODS.product(weight)
    one, more = (products.activations(torch.randn(n, 512), [weight]).values for n in (1, 4))
    assert one.dtype == torch.float32
    assert ("more fp16" in said.words) == (more.dtype == torch.float16)


def product(x: Tensor, weight: PlaneTensor) -> Tensor:
    """float64, of what is in the file."""
    rows = PackedTensor(weight.format, weight.rows, weight.shape)
    return x.double() @ decoded(rows, torch.float64).T


def limit(name: str, n_tokens: int) -> float:
    return EXACT if n_tokens == 1 or name == "f32" else FP16


@pytest.mark.parametrize("name", NAMES)
def test_planes_hold_what_the_file_does(name: str) -> None:
    """Every row reads back as it decodes, in as many bytes, also where a tile is not full."""
    for n_in in (256, 1280):
        weight = random_packed(name, 7, n_in)
        planes = prepare(weight, CPU)
        assert planes.n_bytes == weight.n_bytes
        assert planes.rows.nbytes == 0, "what the file has is let go"
        ids = torch.tensor([6, 0, 3, 3, 1])
        torch.testing.assert_close(embed(ids, planes), decoded(weight)[ids], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["q5_0", "q5_1"])
def test_rows_are_padded_to_units(name: str) -> None:
    weight = random_packed(name, 5, 160)
    planes = prepare(weight, CPU)
    assert planes.n_bytes == weight.n_bytes * 256 // 160
    ids = torch.arange(5)
    torch.testing.assert_close(embed(ids, planes), decoded(weight), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["q4_K", "q5_1", "f16"])
def test_rows_beyond_31_bits(name: str) -> None:
    weight = prepared(name, 5, 256)
    there = far(weight)
    ids = torch.tensor([4, 0, 2])
    assert torch.equal(embed(ids + there.shape[0] - 5, there), embed(ids, weight))


def test_no_token_is_row_0() -> None:
    """A step that follows one in which no token could be drawn reads what there is."""
    weight = random_packed("q8_0", 3, 64)
    row = embed(torch.tensor([NO_TOKEN]), prepare(weight, CPU))
    torch.testing.assert_close(row, decoded(weight)[:1], rtol=1e-6, atol=1e-7)


def test_rows_that_no_kernel_reads() -> None:
    with pytest.raises(ModelFileError, match="12 columns"):
        prepare(random_packed("f16", 3, 12), CPU)


@pytest.mark.parametrize(
    ("n_tokens", "name"),
    quick(
        itertools.product((1, 3, 9, 17), NAMES),
        {(9, "f32"), *((9 if i % 2 else 1, name) for i, name in enumerate(NAMES))},
    ),
)
def test_products(name: str, n_tokens: int) -> None:
    """Odd n_out; n_in of which tiles are a divisor, and not."""
    block = FORMATS[name].block_size
    for n_in in (512, 3 * max(block, 32)):
        weight = prepared(name, 39, n_in)
        bias = torch.randn(39)
        x = torch.randn(n_tokens, n_in)
        got = linear(x, Linear(weight, bias))
        assert error(got, product(x, weight) + bias) < limit(name, n_tokens)


@pytest.mark.parametrize(
    ("n_tokens", "name"),
    quick(
        itertools.product((64, 130), ("q4_0", "q6_K", "q5_K", "f16")), [(64, "q6_K"), (130, "f16")]
    ),
)
def test_products_of_many_tokens(name: str, n_tokens: int) -> None:
    weight = prepared(name, 130, 256)
    x = torch.randn(n_tokens, 256)
    assert error(linear(x, Linear(weight)), product(x, weight)) < FP16


@pytest.mark.parametrize("n_tokens", quick([1, 5], [5]))
def test_rows_that_several_programs_share(n_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bias and residual are added once."""
    monkeypatch.setattr(products, "gpu_of", lambda device: GpuInfo(80, 64, ptx=False))
    n_in = 4096
    assert products.sizes_for(n_tokens, 40, [prepared("q8_0", 40, n_in)]).n_splits > 1
    gate, up = (Linear(prepared("q8_0", 40, n_in, seed=i), torch.randn(40)) for i in (1, 2))
    x, residual = torch.randn(n_tokens, n_in), torch.randn(n_tokens, 40)
    y_gate, y_up = (product(x, layer.weight) + layer.bias for layer in (gate, up))
    got = linears(x, (gate,), residual=residual)[0]
    assert error(got, y_gate + residual) < limit("q8_0", n_tokens)
    want = torch.nn.functional.silu(y_gate) * y_up
    assert error(gate_up(x, gate, up, MlpSpec(50)), want) < 3 * limit("q8_0", n_tokens)


@pytest.mark.parametrize("n_tokens", [1, 5])
@pytest.mark.parametrize("names", [("q4_K", "q4_K", "q6_K"), ("q8_0", "q8_0", "q8_0"),
                                   ("f16", "f32", "bf16")])  # fmt: skip
def test_three_matrices_in_one_launch(names: tuple[str, ...], n_tokens: int) -> None:
    """The matrices have any types and heights, with a bias or without."""
    layers = [
        Linear(prepared(name, n_out, 256, seed=n_out), torch.randn(n_out) if i else None)
        for i, (name, n_out) in enumerate(zip(names, (70, 17, 33), strict=True))
    ]
    x = torch.randn(n_tokens, 256)
    for got, layer in zip(linears(x, layers), layers, strict=True):
        want = product(x, layer.weight)
        want = want if layer.bias is None else want + layer.bias
        assert error(got, want) < FP16
    pair = linears(x, layers[:2])
    assert [len(part.T) for part in pair] == [70, 17]
    assert error(pair[1], product(x, layers[1].weight) + layers[1].bias) < FP16


@pytest.mark.parametrize("names", [("q4_0", "q4_0"), ("q4_K", "q5_0"), ("f32", "f32")])
@pytest.mark.parametrize("n_tokens", [1, 4])
def test_gate_and_up(names: tuple[str, str], n_tokens: int) -> None:
    gate, up = (Linear(prepared(name, 50, 256, seed=i)) for i, name in enumerate(names))
    x = torch.randn(n_tokens, 256)
    want = torch.nn.functional.silu(product(x, gate.weight)) * product(x, up.weight)
    assert error(gate_up(x, gate, up, MlpSpec(50)), want) < 3 * limit(names[0], n_tokens)


XIELU = XieluParams(alpha_p=0.8, alpha_n=-0.3, beta=0.5, eps=-1e-6)
BLOCKS = [MlpSpec(50, name) for name in GATED] + [
    MlpSpec(50, name, gated=False, xielu=XIELU if name == "xielu" else None) for name in PLAIN
]
BLOCKS += [MlpSpec(50, limit=0.7), MlpSpec(50, limit=0.9, limits_gate=True)]


@pytest.mark.parametrize(
    "split", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "split"]
)
@pytest.mark.parametrize(
    "block",
    BLOCKS,
    ids=lambda b: (
        b.activation + " alone" * (not b.gated) + " limited" * bool(b.limit) * (1 + b.limits_gate)
    ),
)
def test_activations(block: MlpSpec, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the product, or of rows that several programs share; values near 0 and far from it."""
    if split:
        monkeypatch.setattr(products, "gpu_of", lambda device: GpuInfo(80, 64, ptx=False))
    n_in = 2048 if split else 256
    gate, up = (Linear(prepared("f32", 50, n_in, seed=i), torch.randn(50)) for i in (1, 2))
    x = torch.randn(3, n_in) * torch.tensor([[0.001], [0.05], [0.3]])
    y_gate, y_up = (product(x, layer.weight) + layer.bias for layer in (gate, up))
    weights = MlpWeights(gate if block.gated else None, up, up)
    got = hidden_rows(x, None, weights, block)
    want = activate(y_gate, y_up, block) if block.gated else activate(y_up, None, block)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_few_of_the_gates_values_are_kept() -> None:
    gate, up = (Linear(prepared("f32", 50, 256, seed=i)) for i in (1, 2))
    x, block = torch.randn(3, 256), MlpSpec(50, "gelu", sparsity=0.5)
    got = hidden_rows(x, None, MlpWeights(gate, up, up), block)
    want = activate(product(x, gate.weight), product(x, up.weight), block)
    assert float((want == 0).float().mean()) > 0.5
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n_tokens", [1, 5])
def test_narrow_matrices_get_zeros(n_tokens: int) -> None:
    weight = random_packed("f32", 16, 4)
    x = torch.randn(n_tokens, 4)
    assert error(linear(x, Linear(prepare(weight, CPU))), x @ decoded(weight).T) < 1e-6


@pytest.mark.parametrize("by", [rms(torch.rand(96)), layer_norm(torch.rand(96), torch.rand(96))])
def test_a_norm_is_added_in_one_launch(by: Norm) -> None:
    x, y = torch.randn(2, 5, 96).unbind(0)
    got = added_norm(x, y, by, factor=0.25)
    torch.testing.assert_close(got, x + 0.25 * plain_norm(y, by), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize("name", ["q4_K", "bf16", "q8_0"])
def test_sizes_beyond_those_of_fp16(size: float, name: str) -> None:
    """Huge activations don't overflow, tiny ones aren't lost, each token for itself."""
    weight = prepared(name, 20, 256)
    x = torch.randn(6, 256) * size
    x[2] *= 1e6
    x[3] = 0
    got, want = linear(x, Linear(weight)), product(x, weight)
    for row in (0, 2, 5):
        assert error(got[row], want[row]) < 2 * FP16
    assert not got[3].any()


def test_weights_that_are_tiny() -> None:
    """Scales that would be subnormal in fp16."""
    weight = random_packed("bf16", 20, 256)
    tiny = replace(weight, rows=(decoded(weight) * 1e-6).bfloat16().view(torch.uint8))
    planes = with_rows(tiny)
    x = torch.randn(6, 256)
    assert error(linear(x, Linear(planes)), product(x, planes)) < FP16
    zeros = prepare(replace(weight, rows=np.zeros_like(weight.rows)), CPU)
    assert not linear(x, Linear(zeros)).any()


@pytest.mark.parametrize("n_tokens", [1, 6])
def test_activations_that_are_halved(n_tokens: int) -> None:
    """ggml rounds them so: clamped, and without a scale."""
    weight = with_rows(replace(random_packed("f16", 20, 256), halves_activations=True))
    x = torch.randn(n_tokens, 256)
    x[:, 7] = 1e6
    want = product(x.clamp(-65504, 65504).half(), weight)
    assert error(linear(x, Linear(weight)), want) < EXACT
    by = rms(torch.rand(256))
    h = plain_norm(x, by)
    got = linears(normed(x, by, (Linear(weight),)), (Linear(weight),))[0]
    assert error(got, product(h.half(), weight)) < 1e-4


@pytest.mark.parametrize("shape", [(1, 64), (5, 576), (3, 7, 80), (2, 3000)])
@pytest.mark.parametrize("kind", [rms, layer_norm])
@pytest.mark.parametrize("biased", [False, True])
def test_norms(shape: tuple[int, ...], kind: Callable[..., Norm], biased: bool) -> None:
    x, weight = torch.randn(shape) * 3 + 1, torch.rand(shape[-1])
    by, exact = kind(weight), kind(weight.double())
    if biased:
        bias = torch.randn(shape[-1])
        by, exact = replace(by, bias=bias), replace(exact, bias=bias.double())
    want = plain_norm(x.double(), exact)
    assert error(gpu_norm(x, by), want) < EXACT
    packed = norm_packed(x.flatten(0, -2), by)
    restored = packed.values.float() * packed.restore[:, None]
    assert error(restored, want.flatten(0, -2)) < 5e-4


def test_packed_rows() -> None:
    """The factor is a power of two, and the largest value is between 2 ** 14 and 2 ** 15."""
    x = torch.randn(9, 100) * torch.logspace(-12, 12, 9)[:, None]
    packed = pack_rows(x)
    assert packed.values.dtype == torch.float16
    top = packed.values.float().abs().amax(-1)
    assert ((top >= 2**14) & (top <= 2**15)).all()
    assert not torch.frexp(packed.restore).mantissa.sub(0.5).any()
    assert error(packed.values.float() * packed.restore[:, None], x.double()) < 5e-4
