"""The CPU's products with packed weights, against decode and a float64 product."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from localkv.arch.spec import MoeSpec
from localkv.kernels.cpu.linear.jobs import IN_PLACE_FORMATS, LAYOUTS
from localkv.kernels.cpu.linear.matrices import PanelTensor
from localkv.kernels.layer_weights import Linear, MlpWeights, MoeWeights
from localkv.kernels.reference.torch_arrays import decoded
from localkv.quant_formats import FORMATS, WEIGHT_FORMATS
from localkv.simd.cpu_features import HAS_BYTE_DOTS
from localkv.system.threads import n_threads, use_threads
from support.cpu_ops import TensorProducts, moe_mlp, moe_mlp_cpu
from support.cpu_products import EXACT, check, eight_bits, error, plain_panels, product_error
from support.other_cpus import ALDERLAKE, HASWELL, NEHALEM, SKYLAKE, runs_here
from support.quick import LIKE_OTHERS, quick, quick_types
from support.random_packed import random_packed

WEIGHT_NAMES = [fmt.name for fmt in WEIGHT_FORMATS.values()]
N_TOKENS = (1, 2, 3, 4, 7, 16, 33)
LAID_OUT = [name for name in LAYOUTS if name not in IN_PLACE_FORMATS]


@pytest.mark.parametrize("n_tokens", [1, 3, 40])
def test_activations_that_are_halved(n_tokens: int) -> None:
    weight = replace(random_packed("f16", 39, 512), halves_activations=True)
    check(TensorProducts(), torch.randn(n_tokens, 512), weight)


@pytest.mark.parametrize(
    ("n_out", "name"),
    quick(
        product((1, 16, 39), WEIGHT_NAMES),
        {
            *product((39,), set(WEIGHT_NAMES) - LIKE_OTHERS),
            (1, "q4_0"),
            (1, "q6_K"),
            (16, "q4_0"),
            (16, "f16"),
        },
    ),
)
def test_products(name: str, n_out: int) -> None:
    """Every count of tokens is right, and gives the same as each token does alone."""
    block = FORMATS[name].block_size
    for n_in in sorted({max(block, 32), max(block, 32) * 3, 512}):
        weight = random_packed(name, n_out, n_in, seed=n_in)
        products = TensorProducts()
        x = torch.randn(max(N_TOKENS), n_in)
        once = check(products, x, weight)
        for n_tokens in N_TOKENS:
            got = check(products, x[:n_tokens], weight)
            assert torch.equal(got, once[:n_tokens])


@pytest.mark.parametrize("name", ["f16", "bf16", "q8_0"])
def test_tall_matrices(name: str) -> None:
    """There are more rows than threads have memory for sums, so they take some at a time."""
    products, weight = TensorProducts(), random_packed(name, 8192, 64)
    x = torch.randn(8, 64)
    once = check(products, x, weight)
    for n_tokens in (1, 2, 4):
        assert torch.equal(check(products, x[:n_tokens], weight), once[:n_tokens])


@pytest.mark.parametrize("name", ["f16", "bf16", "f32"])
def test_rows_that_are_no_whole_vectors(name: str) -> None:
    for n_in in (1, 15, 17, 504):
        products, weight = TensorProducts(), random_packed(name, 39, n_in)
        x = torch.randn(9, n_in)
        once = check(products, x, weight)
        for n_tokens in (1, 4):
            assert torch.equal(check(products, x[:n_tokens], weight), once[:n_tokens])


@pytest.mark.parametrize("name", quick_types(WEIGHT_NAMES))
def test_long_rows(name: str) -> None:
    n_in = 11008
    weight = random_packed(name, 33, n_in)
    check(TensorProducts(), torch.randn(5, n_in), weight)
    check(TensorProducts(), torch.randn(1, n_in), weight)


@pytest.mark.parametrize("name", quick_types(name for name in LAYOUTS if name.startswith("iq")))
def test_every_point_of_a_grid(name: str) -> None:
    """Products with ones among zeros, which are the values themselves."""
    weight = random_packed(name, 1024, 256)  # 32 places or more a row, and 2048 points at most
    products = TensorProducts()
    got = products.matmul(torch.eye(256), products.prepare(weight)).T
    want = decoded(weight, torch.float32)
    assert ((got - want).abs() <= want.abs() * 1e-6).all()


@pytest.mark.parametrize("name", ["q4_0", "q6_K", "q2_K", "q3_K", "iq3_s", "bf16", "f16"])
def test_many_tokens(name: str) -> None:
    """Two panels at a time and one that is left, groups of tokens and some that are left."""
    products, weight = TensorProducts(), random_packed(name, 200, 768)
    x = torch.randn(333, 768)
    got = check(products, x, weight)
    for token in (0, 127, 128, 255, 331, 332):
        assert torch.equal(check(products, x[token : token + 1], weight)[0], got[token])


@pytest.mark.skipif(not HAS_BYTE_DOTS, reason="activations stay float32")
@pytest.mark.parametrize("name", ["q2_K", "q3_K"])
def test_scales_that_are_whole_numbers(name: str) -> None:
    """A record's own sums are rounded once a block, less than sums of all halves would be."""
    weight, products = random_packed(name, 64, 1024), TensorProducts()
    x = torch.randn(200, 1024)
    got = products.matmul(x, products.prepare(weight))
    assert product_error(got, eight_bits(x), decoded(weight, torch.float64)) < 1.25e-7


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_K", "f32"])
def test_strange_activations(name: str) -> None:
    products, weight = TensorProducts(), random_packed(name, 32, 256)
    prepared = products.prepare(weight)
    assert torch.equal(products.matmul(torch.zeros(2, 256), prepared), torch.zeros(2, 32))
    check(products, torch.randn(3, 256) * 1e-30, weight)
    check(products, torch.randn(256, 3).T, weight)  # not contiguous
    x = torch.randn(3, 256)
    x[1, 7] = torch.inf
    got = products.matmul(x, prepared)
    assert not got[1].isfinite().any()
    assert got[[0, 2]].isfinite().all()
    assert products.matmul(x[:0], prepared).shape == (0, 32)


def test_bias() -> None:
    products, weight = TensorProducts(), random_packed("q8_0", 16, 64)
    x, bias = torch.randn(2, 64), torch.randn(16)
    prepared = products.prepare(weight)
    plain = products.linear(x, Linear(prepared))
    assert torch.allclose(products.linear(x, Linear(prepared, bias)), plain + bias)


@pytest.mark.parametrize("name", ["q4_K", "q8_0"])
@pytest.mark.parametrize("n_tokens", [1, 40])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_matter(threads: int, n_tokens: int, name: str) -> None:
    products = TensorProducts()
    prepared = products.prepare(random_packed(name, 300, 512))
    x = torch.randn(n_tokens, 512)
    want = products.matmul(x, prepared)
    before = n_threads()
    use_threads(threads)
    try:
        assert torch.equal(products.matmul(x, prepared), want)
    finally:
        use_threads(before)


@pytest.mark.parametrize("n_out", [5, 16, 37])
@pytest.mark.parametrize("n_blocks", [1, 2, 5])
@pytest.mark.parametrize("name", quick_types(LAID_OUT))
def test_panels_have_the_bytes_of_the_file(name: str, n_out: int, n_blocks: int) -> None:
    layout = LAYOUTS[name]
    weight = random_packed(name, n_out, n_blocks * layout.format.block_size)
    prepared = TensorProducts().prepare(weight)
    assert isinstance(prepared, PanelTensor)
    want = plain_panels(weight, layout)
    assert np.array_equal(prepared.panels.reshape(want.shape), want)


@pytest.mark.parametrize("name", quick_types(LAID_OUT))
def test_panels_take_the_bytes_of_the_file(name: str) -> None:
    weight = random_packed(name, 64, 512)
    prepared = TensorProducts().prepare(weight)
    assert isinstance(prepared, PanelTensor)
    assert prepared.panels.nbytes == weight.n_bytes
    assert prepared.rows is weight.rows


def test_a_tied_matrix_is_still_an_embedding() -> None:
    weight = random_packed("q4_0", 40, 64)
    prepared = TensorProducts().prepare(weight)
    ids = np.array([3, 39, 3])
    assert np.array_equal(prepared[ids].decode(), weight[ids].decode())
    assert not isinstance(prepared[ids], PanelTensor)


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q6_K", "bf16"])
@pytest.mark.parametrize("n_ff", [256, 288])
def test_experts(name: str, n_ff: int) -> None:
    """A stack of matrices, whose rows may not fill the panels, on the tokens routed to each."""
    if n_ff % FORMATS[name].block_size:
        pytest.skip("not a whole number of blocks")
    moe = MoeSpec(5, 2, n_ff=n_ff)
    products = TensorProducts()
    router = Linear(products.prepare(random_packed("f32", 5, 256, seed=1)))
    stacks = [
        random_packed(name, 5, *shape, seed=seed)
        for seed, shape in enumerate([(n_ff, 256), (n_ff, 256), (256, n_ff)])
    ]
    shared = [
        Linear(random_packed(name, *shape, seed=seed))
        for seed, shape in enumerate([(n_ff, 256), (n_ff, 256), (256, n_ff)])
    ]
    x = torch.rand(9, 256)
    want = moe_mlp(x.double(), MoeWeights(router, *stacks, MlpWeights(*shared)), moe)
    layer = MoeWeights(
        router,
        *(products.prepare(stack) for stack in stacks),
        MlpWeights(*(Linear(products.prepare(part.weight)) for part in shared)),
    )
    got = moe_mlp_cpu(x, layer, moe, products)
    assert error(got, want) < 3e-2


def test_stack_with_incomplete_panels() -> None:
    products = TensorProducts()
    stack = random_packed("q5_1", 3, 21, 96)
    prepared = products.prepare(stack)
    x = torch.randn(4, 96)
    for expert in range(3):
        rounded = eight_bits(x) if HAS_BYTE_DOTS else x.double()
        got = products.matmul(x, prepared[expert])
        assert product_error(got, rounded, decoded(stack[expert], torch.float64)) < EXACT


CPUS = {"128 bits": NEHALEM, "AVX2": HASWELL, "AVX-VNNI": ALDERLAKE, "AVX-512": SKYLAKE}
CPU_RUNS = [*product(CPUS, ["some"]), ("AVX2", "all")]


@pytest.mark.parametrize(("kind", "types"), quick(CPU_RUNS, (), CPU_RUNS[:-1]))
@pytest.mark.long
def test_other_cpus(kind: str, types: str) -> None:
    """In a process that believes to be on one: float32, and each way to multiply bytes."""
    cpu = CPUS[kind]
    if not runs_here(cpu):
        pytest.skip("the CPU lacks some instructions")
    tests = "53 or test_long_rows and (q5_1 or q8_0 or q6_K)"
    tests += (
        " or 39- and not (iq1_s or iq2_xxs or iq2_s) or every_point and (iq1_m or iq2_xs or iq3_s)"
        if types == "all"
        else " or 39-q4_0 or 39-iq4_nl or 39-q2_K or 39-f16 or every_point and iq2_xs"
    )
    files = [__file__, str(Path(__file__).with_name("test_in_place.py"))]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", tests, *files],
        env={**os.environ, **cpu},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    assert "passed" in result.stdout
