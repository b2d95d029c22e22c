"""Random products on guarded memory; see `kernel_cases.py`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from localkv.kernels.cpu.linear.jobs import LAYOUTS, ROW_FORMAT_NAMES
from localkv.kernels.cpu.linear.late_panels import LateTensor
from localkv.kernels.cpu.linear.products import CpuProducts, Product, add_products
from localkv.kernels.cpu.runtime.chain import Chain, Scratch
from localkv.kernels.layer_weights import Linear
from localkv.kernels.low_rank import Adapters, LowRank, TokenScales
from localkv.kernels.reference.torch_arrays import decoded
from localkv.quant_formats import FORMATS, WEIGHT_FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor
from support.attack.random_calls import threads
from support.cpu_ops import TensorProducts
from support.cpu_products import as_read, product_error
from support.guarded_memory import GuardedMemory
from support.random_packed import random_packed
from support.torch_edge import numpy_of, torch_of


def guarded_matrix(memory: GuardedMemory, weight: PackedTensor) -> PackedTensor:
    return replace(weight, rows=memory.array(weight.rows, f"rows of {weight.format.name}"))


def product_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """One to three matrices of one width in one chain, with biases and with what is added; panels
    are all there, or some.
    """
    names = [rng.choice((*LAYOUTS, *ROW_FORMAT_NAMES)) for _ in range(rng.choice((1, 1, 2, 3)))]
    if rng.random() < 0.5:
        names = [names[0]] * len(names)
    block = math.lcm(*(max(16, FORMATS[name].block_size) for name in names))
    n_in = block * rng.choice((1, 2, 3, 5, 7))
    n_tokens = rng.choice((1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31))
    outs = [rng.choice((1, 2, 3, 15, 16, 17, 31, 33, 64, 70, 130)) for _ in names]
    addends = [rng.choice(("", "", "bias", "residual")) for _ in names]
    n_stack = rng.choice((0, 0, 1, 3))
    say(
        f"{names} {outs} x {n_in}, stacks of {n_stack}, {n_tokens} tokens, {addends}, "
        f"threads {threads(rng)}"
    )
    products = CpuProducts()
    x = memory.tensor(torch.randn(n_tokens, n_in), "activations")
    chain, parts, wants = Chain(Scratch()), list[Product](), list[tuple[Tensor, Tensor, Tensor]]()
    for name, n_out, added in zip(names, outs, addends, strict=True):
        shape = (n_stack, n_out, n_in) if n_stack else (n_out, n_in)
        packed = random_packed(name, *shape, seed=rng.randrange(1 << 30))
        release = rng.choice((None, lambda: None))
        weight = products.prepare(guarded_matrix(memory, packed), release)
        if isinstance(weight, LateTensor):  # some of its panels are missing
            weight.made.lay(rng.randrange(weight.made.n_missing))
        if n_stack:
            expert = rng.randrange(n_stack)
            packed, weight = packed[expert], weight[expert]
        out = memory.empty((n_tokens, n_out), "a product")
        plus = torch.zeros(n_tokens, n_out)
        if added == "bias":
            plus = torch.randn(n_out)
            parts.append(Product(weight, out, numpy_of(memory.tensor(plus, "a bias"))))
        elif added:
            plus = torch.randn(n_tokens, n_out)
            parts.append(
                Product(weight, out, numpy_of(memory.tensor(plus, "a residual")), 4 * n_out)
            )
        else:
            parts.append(Product(weight, out))
        rounded = as_read(x, name)
        wants.append((rounded, decoded(packed, torch.float64), plus))
    add_products(chain, numpy_of(x), n_tokens, parts)
    for _ in range(2):
        chain.run()
        for part, (rounded, matrix, plus) in zip(parts, wants, strict=True):
            out = torch_of(part.out)
            assert not out.isnan().any(), "an output was not written, or scratch was read"
            limit = 1e-5 * (1 + float(plus.abs().max()))
            assert product_error(out.double() - plus, rounded, matrix) < limit
            out.fill_(math.nan)


def linear_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """A product as an operation of its own, of every format that a weight can have."""
    name = rng.choice(list(WEIGHT_FORMATS.values())).name
    n_in = FORMATS[name].block_size * rng.choice((1, 2, 3, 33))
    n_out, n_tokens = rng.choice((1, 2, 17, 40)), rng.choice((1, 2, 5, 40))
    say(f"{name} {n_out} x {n_in}, {n_tokens} tokens, threads {threads(rng)}")
    products = TensorProducts()
    packed = guarded_matrix(memory, random_packed(name, n_out, n_in, seed=rng.randrange(1 << 30)))
    x, bias = (memory.tensor(torch.randn(*shape), "x") for shape in ((n_tokens, n_in), (n_out,)))
    got = products.linear(x, Linear(products.prepare(packed), bias))
    rounded = as_read(x, name)
    assert not got.isnan().any()
    error = product_error(got.double() - bias, rounded, decoded(packed, torch.float64))
    assert error < 1e-5 * (1 + float(bias.abs().max()) * 10)


def adapter_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """What adapters add to a product: any ranks, rows that are no whole vectors, some without."""
    n_in, n_out = rng.choice((1, 16, 33, 640)), rng.choice((1, 16, 37, 100))
    n_tokens, ranks = rng.choice((1, 2, 7, 9, 70)), [rng.choice((1, 3, 16)) for _ in range(2)]
    say(f"{n_out} x {n_in}, {n_tokens} tokens, ranks {ranks}, threads {threads(rng)}")
    scales = TokenScales(2)
    drawn = [rng.choice((0.0, 1.0, -0.5)) for _ in range(2 * n_tokens)]
    scales.rows = memory.array(np.array(drawn, np.float32).reshape(n_tokens, 2), "scales")
    parts, products = [], TensorProducts()
    for i, rank in enumerate(ranks):
        made = LowRank.of(i, torch.randn(rank, n_in).numpy(), torch.randn(n_out, rank).numpy(), 1.0)
        guarded = {name: memory.array(getattr(made, name), name) for name in ("a", "b", "factor")}
        parts.append(LowRank(i, **guarded))
    packed = guarded_matrix(memory, random_packed("f32", n_out, n_in, seed=rng.randrange(1 << 30)))
    x, adapters = memory.tensor(torch.randn(n_tokens, n_in), "x"), Adapters(tuple(parts), scales)
    plain = products.linear(x, Linear(products.prepare(packed)))
    got = products.linear(x, Linear(products.prepare(packed), adapters=adapters))
    want = torch.from_numpy(adapters.add(x.numpy(), plain.numpy()))
    assert not got.isnan().any()
    assert float((got - want).abs().max()) < 1e-5 * (10 + float(want.abs().max()))
