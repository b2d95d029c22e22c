"""Random calls of the CPU's kernels on guarded memory, compared with the reference.

Run as a program, so that a fault ends a process of its own: each argument is KIND:SEED:AMOUNT, how
many cases of a kind or, with an "s" behind it, how many seconds. Each case is told before it runs.
"""

from __future__ import annotations

import faulthandler
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from localkv.arch.ffn_spec import Activation, MlpSpec
from localkv.arch.mixer_spec import AttentionParams
from localkv.cache.batch import Batch, SegmentBatch
from localkv.cache.kv_cache import KVCache
from localkv.cache.layer_cache import LayerCache, Segment
from localkv.cache.layout import SegmentSpec
from localkv.formats import FORMATS, KV_FORMATS, WEIGHT_FORMATS
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.activation import activate
from localkv.kernels.attention import merge_segments
from localkv.kernels.cpu.attention_layer import add_sinks
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.linear.activation_job import RopeJob
from localkv.kernels.cpu.linear.blocks import LAYOUTS
from localkv.kernels.cpu.linear.panel_bytes import ROW_FORMAT_NAMES
from localkv.kernels.cpu.linear.products import CpuProducts, Product, add_products
from localkv.kernels.cpu.runtime import chain as chains
from localkv.kernels.cpu.runtime.chain import Chain, Scratch
from localkv.kernels.cpu.store.store_kv import add_store, has_encoders, stored_rows
from localkv.kernels.layer_weights import Linear
from localkv.kernels.reference.attention import attention_reference
from localkv.kernels.reference.hadamard import hadamard_transform
from localkv.kernels.reference.norm import norm
from localkv.kernels.reference.rope import apply_rope
from localkv.kernels.reference.store_kv import store_kv
from localkv.kernels.reference.torch_codec import decoded
from localkv.kernels.rope import RopeTable
from localkv.simd.cpu_features import HAS_BYTE_DOTS
from localkv.system.threads import use_threads
from support.attack.expert_cases import expert_case
from support.attack.recurrent_cases import recurrent_case
from support.attack.token_cases import latent_case, token_case
from support.cpu_ops import (
    TensorProducts,
    activate_cpu,
    apply_rope_cpu,
    cpu_attention,
    norm_cpu,
    rotate_cpu,
    store_kv_cpu,
)
from support.cpu_pages import pool_planes
from support.cpu_products import eight_bits, product_error
from support.guarded_memory import GuardedMemory, guarded
from support.layers import layer_norm, rms
from support.random_packed import random_packed
from support.torch_edge import numpy_of, torch_cache, torch_of

GROUPS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 11, 16, 17, 23, 31, 48, 95, 96, 97, 112, 128, 193, 291, 512)
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128, 160, 256)
WINDOWS = (0, 0, 0, 1, 2, 17, 63, 64, 65, 255, 256, 257, 700)
WRONG = ("read", "write", "scratch", "leave")
"""What kernels do that must be found."""
MOST_WORK = 4_000_000
"""Products of a case, so that none takes long."""


def Memory(x: Any, n_bytes: int) -> chains.Memory:  # noqa: N802
    """A job's memory in a tensor or a place."""
    return chains.Memory(numpy_of(x), n_bytes)


def one_of(rng: random.Random, *names: str) -> str:
    return rng.choice(names)


def threads(rng: random.Random) -> int:
    n = rng.choice((1, 1, 2, 3))
    use_threads(n)
    return n


def lengths_of(rng: random.Random, n_sequences: int) -> list[tuple[int, int]]:
    past = (0, 0, 1, 15, 16, 63, 64, 250, 255, 256, 257, 511, 700)
    new = (1, 1, 1, 2, 3, 5, 16, 17, 40, 97, 270)
    return [(rng.choice(past), rng.choice(new)) for _ in range(n_sequences)]


def guarded_segment(memory: GuardedMemory, segment: Segment) -> Segment:
    k, v = (
        tuple(memory.tensor(plane, f"a plane of {side}") for plane in planes)
        for side, planes in (("K", segment.k), ("V", segment.v))
    )
    return replace(segment, k=k, v=v)


def guarded_rows(memory: GuardedMemory, rows: SegmentBatch) -> SegmentBatch:
    tensors = {f.name: getattr(rows, f.name) for f in fields(rows)}
    return replace(
        rows, **{n: memory.tensor(x, n) for n, x in tensors.items() if isinstance(x, Tensor)}
    )


def head_dim_of(rng: random.Random, *names: str) -> int:
    block = math.lcm(*(KV_FORMATS[name].block_size for name in names))
    return rng.choice([d for d in HEAD_DIMS if d % block == 0])


def shuffled_cache(
    rng: random.Random,
    specs: list[SegmentSpec],
    n_kv_heads: int,
    head_dim: int,
    lengths: list[tuple[int, int]],
) -> KVCache:
    """With room for sequences of (past, new) tokens, and its pages in no order."""
    cache = torch_cache(
        n_layers=1,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        segments=specs,
        n_ctx=max(past + new for past, new in lengths),
        n_sequences=len(lengths),
    )
    for pool in cache.pools:
        rng.shuffle(pool.free)
    return cache


def attention_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """Decode and prefill in one batch, on permuted pages that hold NaN where nothing was stored."""
    type_k, type_v = rng.choice(list(KV_FORMATS)), rng.choice(list(KV_FORMATS))
    head_dim, group = head_dim_of(rng, type_k, type_v), rng.choice(GROUPS)
    n_kv_heads, window = rng.choice((1, 1, 2, 3)), rng.choice(WINDOWS)
    softcap = rng.choice((0.0, 0.0, 0.0, 5.0))
    lengths = lengths_of(rng, rng.choice((1, 1, 2, 3, 5)))
    bounds = rng.choice(((0,), (0,), (0,), (0, 1), (0, 4, 260), (0, 256)))

    def work() -> int:
        rows = sum(new * (past + new) for past, new in lengths)
        return rows * n_kv_heads * group * head_dim // 64

    while work() > MOST_WORK and len(lengths) > 1:
        lengths.pop()
    while work() > MOST_WORK:
        lengths = [(lengths[0][0] // 2, max(1, lengths[0][1] // 2))]
    generated = [rng.random() < 0.5 for _ in lengths]
    say(
        f"{type_k}/{type_v} head_dim {head_dim} group {group} x {n_kv_heads} window {window} "
        f"softcap {softcap} lengths {lengths} segments {bounds} generated {generated} "
        f"threads {threads(rng)}"
    )
    specs = [SegmentSpec(type_k, type_v, first) for first in bounds]
    cache = shuffled_cache(rng, specs, n_kv_heads, head_dim, lengths)
    layer = cache.layers[0]
    for segment in layer.segments:
        for plane in (*segment.k, *segment.v):
            plane.fill_(0xFF)
    ours = LayerCache(tuple(guarded_segment(memory, segment) for segment in layer.segments))
    sequences = [cache.new_sequence() for _ in lengths]

    def store(parts: list[tuple[int, int]]) -> Batch:
        batch = cache.batch(
            [(sequences[i], [0] * n) for i, n in parts], generated=[generated[i] for i, _ in parts]
        )
        k, v = (torch.randn(batch.starts[-1], n_kv_heads, head_dim) for _ in range(2))
        for segment, rows in zip(layer.segments, batch.segments, strict=True):
            if len(rows.tokens):
                store_kv(k, v, LayerCache((segment,)), (rows,))
        segments = tuple(guarded_rows(memory, rows) for rows in batch.segments)
        batch = replace(
            batch, segments=segments, positions=memory.tensor(batch.positions, "positions")
        )
        ours_k, ours_v = (memory.tensor(x, "rows") for x in (k, v))
        store_kv_cpu(ours_k, ours_v, ours, batch.segments)
        for i, n in parts:
            sequences[i].length += n
        return batch

    pasts = [(i, past) for i, (past, _) in enumerate(lengths) if past]
    if pasts:
        store(pasts)
    batch = store([(i, new) for i, (_, new) in enumerate(lengths)])
    q = memory.tensor(torch.randn(batch.starts[-1], n_kv_heads * group, head_dim), "queries")
    params = AttentionParams(1 / math.sqrt(head_dim), window, softcap)
    run = cpu_attention()
    for segment, reference, rows in zip(ours.segments, layer.segments, batch.segments, strict=True):
        for _ in range(2):
            out, lse = run(q, segment, rows, batch, params)
        want, want_lse = attention_reference(q.double(), reference, rows, batch, params)
        assert not out.isnan().any(), "scratch memory that was not written was read"
        assert torch.equal(lse.isinf(), want_lse.isinf())
        seen = ~want_lse.isinf()
        size = float(want[seen].norm())
        assert float((out[seen] - want[seen]).norm()) <= 1e-4 * size, "outputs differ"
        assert not seen.any() or float((lse[seen] - want_lse[seen]).abs().max()) < 1e-3
        assert float(out[~seen].abs().sum()) == 0


def planes_as_reference(ours: LayerCache, reference: LayerCache) -> Iterator[tuple[Tensor, Tensor]]:
    """Each plane that has pages, in the reference's order, and the reference's."""
    for mine, theirs in zip(ours.segments, reference.segments, strict=True):
        for side, fmt in (("k", mine.format_k), ("v", mine.format_v)):
            got = getattr(mine, side)
            if len(got[0]):
                yield from zip(pool_planes(fmt, side, got), getattr(theirs, side), strict=True)


def store_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """Rows of a few tokens into pages full of random bytes."""
    type_k, type_v = rng.choice(list(KV_FORMATS)), rng.choice(list(KV_FORMATS))
    head_dim, n_kv_heads = head_dim_of(rng, type_k, type_v), rng.choice((1, 2, 3, 5))
    powers = [0] + [1 << i for i in range(1, 9) if head_dim % (1 << i) == 0]
    rotations = rng.choice(powers), rng.choice(powers)
    bounds = rng.choice(((0,), (0,), (0, 3), (0, 250, 300)))
    lengths = lengths_of(rng, rng.choice((1, 2, 3)))
    say(
        f"{type_k}/{type_v} head_dim {head_dim} x {n_kv_heads} rotated {rotations} "
        f"lengths {lengths} segments {bounds} threads {threads(rng)}"
    )
    specs = [SegmentSpec(type_k, type_v, first, *rotations) for first in bounds]
    cache = shuffled_cache(rng, specs, n_kv_heads, head_dim, lengths)
    layer = cache.layers[0]
    for segment in layer.segments:
        for plane in (*segment.k, *segment.v):
            plane.random_(0, 256)
    ours = LayerCache(tuple(guarded_segment(memory, segment) for segment in layer.segments))
    for got, want in planes_as_reference(ours, layer):
        want.copy_(got)
    sequences = [cache.new_sequence() for _ in lengths]
    for sequence, (past, _) in zip(sequences, lengths, strict=True):
        cache.reserve(sequence, past)
        sequence.length = past
    parts = [(sequence, [0] * new) for sequence, (_, new) in zip(sequences, lengths, strict=True)]
    batch = cache.batch(parts)
    n_tokens = batch.starts[-1]
    k, v = (torch.randn(n_tokens, n_kv_heads, head_dim) for _ in range(2))
    rows = tuple(guarded_rows(memory, rows) for rows in batch.segments)
    ours_k, ours_v = (memory.tensor(x, "rows") for x in (k, v))
    rotate = has_encoders(layer) and rng.random() < 0.7
    if rotate:
        chain = Chain(Scratch())
        add_store(chain, "k", "v", n_tokens, numpy_of(ours))
        stored = stored_rows(numpy_of(ours), numpy_of(rows), n_tokens)
        chain.run(k=numpy_of(ours_k), v=numpy_of(ours_v), **stored)
    else:
        store_kv_cpu(ours_k, ours_v, ours, rows)
    for segment, stored in zip(layer.segments, batch.segments, strict=True):
        if not len(stored.tokens):
            continue
        turned_k = hadamard_transform(k, rotations[0] if rotate else 0)
        turned_v = hadamard_transform(v, rotations[1] if rotate else 0)
        store_kv(turned_k, turned_v, LayerCache((segment,)), (stored,))
    # byte for byte: the rows that were stored, and all others as they were
    assert all(torch.equal(got, want) for got, want in planes_as_reference(ours, layer))


def guarded_matrix(memory: GuardedMemory, weight: PackedTensor) -> PackedTensor:
    return replace(weight, rows=memory.array(weight.rows, f"rows of {weight.format.name}"))


def product_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """One to three matrices of one width in one chain, with biases and with what is added."""
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
        weight = products.prepare(guarded_matrix(memory, packed))
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
        rounded = eight_bits(x) if HAS_BYTE_DOTS and name in LAYOUTS else x.double()
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
    rounded = eight_bits(x) if HAS_BYTE_DOTS and name in LAYOUTS else x.double()
    assert not got.isnan().any()
    error = product_error(got.double() - bias, rounded, decoded(packed, torch.float64))
    assert error < 1e-5 * (1 + float(bias.abs().max()) * 10)


def activation_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """Norms, gating, RoPE and the Hadamard transform, of any sizes."""
    kind = one_of(
        rng,
        "norm",
        "layer_norm",
        "swiglu",
        "geglu",
        "rope",
        "rotate",
        "sinks",
        "scaled",
        "residual",
        "split",
    )
    n_tokens = rng.choice((1, 2, 3, 7, 33))
    n = rng.choice((1, 2, 5, 15, 16, 17, 31, 48, 100, 257, 1023, 1024, 1025))
    workers = specialized(KernelSource("linear/activations"))
    chain = Chain(Scratch())
    eps = memory.tensor(torch.tensor([1e-5]), "eps")
    n_threads = threads(rng)
    if kind == "norm":
        say(f"norm {n_tokens} x {n}, threads {n_threads}")
        x, weight = memory.tensor(torch.randn(n_tokens, n), "x"), torch.randn(n)
        out = torch_of(memory.empty((n_tokens, n), "out"))
        job = [0, n_tokens, n, Memory(x, x.nbytes), Memory(memory.tensor(weight, "w"), 4 * n)]
        chain.add(workers["norm"], [*job, Memory(eps, 4), Memory(out, out.nbytes), 0], n_threads)
        chain.run()
        close(out, norm(x.double(), rms(weight.double())))
        assert torch.equal(norm_cpu(x, rms(weight)), out)
    elif kind == "layer_norm":
        biased = rng.random() < 0.5
        say(f"layer_norm {n_tokens} x {n}, bias {biased}, threads {n_threads}")
        x = memory.tensor(torch.randn(n_tokens, n) + 2, "x")
        weight = memory.tensor(torch.randn(n), "w")
        bias = memory.tensor(torch.randn(n), "b") if biased else None
        out = torch_of(memory.empty((n_tokens, n), "out"))
        job = [0, n_tokens, n, Memory(x, x.nbytes), Memory(weight, 4 * n), Memory(eps, 4)]
        job += [Memory(out, out.nbytes), 0 if bias is None else Memory(bias, 4 * n)]
        chain.add(workers["layer_norm"], job, n_threads)
        chain.run()
        exact = layer_norm(weight.double(), None if bias is None else bias.double())
        close(out, norm(x.double(), exact))
        assert torch.equal(norm_cpu(x, layer_norm(weight, bias)), out)
    elif kind in ("swiglu", "geglu"):
        say(f"{kind} {n_tokens} x {n}, threads {n_threads}")
        activation: Activation = "silu" if kind == "swiglu" else "gelu"
        gate, up = (memory.tensor(9 * torch.randn(n_tokens * n), "x") for _ in range(2))
        mlp = MlpSpec(n, activation)
        want = activate(gate.double(), up.double(), mlp)
        both = gate.view(n_tokens, n), up.view(n_tokens, n)
        close(activate_cpu(*both, mlp).flatten(), want)
        if n_tokens * n % 16 == 0:
            job = [0, n_tokens * n, Memory(gate, gate.nbytes), Memory(up, up.nbytes)]
            chain.add(workers[kind], job, n_threads)
            chain.run()
            close(gate, want)
    elif kind == "sinks":
        n_heads, size = rng.choice((1, 3, 8)), 16 * rng.choice((1, 4, 5))
        say(f"sinks {n_tokens} x {n_heads} x {size}, threads {n_threads}")
        x = memory.tensor(torch.randn(n_tokens, n_heads, size), "x")
        lse = memory.tensor(9 * torch.randn(n_tokens, n_heads), "log-sum-exp")
        sinks = memory.tensor(9 * torch.randn(n_heads), "sinks")
        want = merge_segments([(x.double(), lse.double())], sinks.double())
        add_sinks(chain, *(y.numpy() for y in (x, lse, sinks)), (n_tokens, n_heads, size))
        chain.run()
        close(x, want)
    elif kind == "residual":
        normed = rng.random() < 0.5
        say(f"residual {n_tokens} x {n}, norm {normed}, threads {n_threads}")
        x, before = (memory.tensor(torch.randn(n_tokens, n), "x") for _ in range(2))
        weight, scale = memory.tensor(torch.randn(n), "w"), memory.tensor(torch.randn(1), "scale")
        out = torch_of(memory.empty((n_tokens, n), "out"))
        added = norm(x.double(), rms(weight.double())) if normed else x.double()
        want = before + scale * added
        job = [0, n_tokens, n, Memory(x, x.nbytes), Memory(weight, 4 * n) if normed else 0]
        job += [Memory(eps, 4), Memory(scale, 4), Memory(before, out.nbytes)]
        job.append(Memory(out, out.nbytes))
        chain.add(specialized(KernelSource("linear/residuals"))["residual"], job, n_threads)
        chain.run()
        close(out, want)
    elif kind == "split":
        n_heads, size = rng.choice((1, 3, 8)), 16 * rng.choice((1, 4, 5))
        say(f"split {n_tokens} x {n_heads} x {size}, threads {n_threads}")
        both = memory.tensor(torch.randn(n_tokens, n_heads, 2, size), "both")
        q, gate = (torch_of(memory.empty((n_tokens, n_heads, size), "out")) for _ in range(2))
        job = [0, n_tokens, n_heads, size, Memory(both, both.nbytes)]
        job += [Memory(q, q.nbytes), Memory(gate, gate.nbytes)]
        residuals = specialized(KernelSource("linear/residuals"))
        chain.add(residuals["split"], job, n_threads)
        want = torch.sigmoid(both[:, :, 1].double()) * both[:, :, 0]
        job = [0, n_tokens, n_heads * size, Memory(gate, gate.nbytes), Memory(q, q.nbytes), 0]
        chain.add(residuals["sigmoid_gate"], job, n_threads)
        chain.run()
        assert torch.equal(q, both[:, :, 0])
        close(gate, want)
    elif kind == "scaled":
        say(f"scaled {n_tokens} x {n}, threads {n_threads}")
        x = memory.tensor(torch.randn(n_tokens, n), "x")
        want = x * eps
        job = [0, n_tokens, n, Memory(x, x.nbytes), 0, Memory(eps, 4)]
        chain.add(specialized(KernelSource("linear/row_steps"))["scaled"], job, n_threads)
        chain.run()
        assert torch.equal(x, want)
    elif kind == "rope":
        head_dim, n_heads = rng.choice((16, 48, 64, 80)), rng.choice((1, 3))
        pairs = rng.choice((1, 2, head_dim // 4, head_dim // 2))
        neighbours, normed = rng.random() < 0.5, rng.random() < 0.5
        say(f"rope {n_tokens} x {n_heads} x {head_dim}, {pairs} pairs, norm {normed}")
        x = memory.tensor(torch.randn(n_tokens, n_heads, head_dim), "x")
        cos, sin = (memory.tensor(torch.randn(n_tokens, pairs), "turns") for _ in range(2))
        weight = memory.tensor(torch.randn(head_dim), "a norm")
        want = x.double()
        if normed:
            want = norm(want, rms(weight.double()))
        want = apply_rope(want, RopeTable(cos.double(), sin.double(), neighbours))
        memories = [Memory(turn, turn.nbytes) for turn in (cos, sin)]
        job = [0, n_tokens, n_heads, head_dim, Memory(x, x.nbytes)]
        job += [Memory(weight, weight.nbytes) if normed else 0, Memory(eps, 4)]
        if not normed:
            close(apply_rope_cpu(x, RopeTable(cos, sin, neighbours)), want)
        chain.add(workers["rope"], RopeJob(*job, pairs, int(neighbours), *memories), n_threads)
        chain.run()
        close(x, want)
    else:
        block = 1 << rng.randrange(1, 9)
        shape = (n_tokens, rng.choice((1, 3)), block * rng.choice((1, 2, 5)))
        say(f"rotate {shape} by {block}")
        x = memory.tensor(torch.randn(shape), "x")
        assert torch.equal(rotate_cpu(x, block), hadamard_transform(x, block))


def close(got: Tensor, want: Tensor) -> None:
    assert not got.isnan().any()
    assert float((got - want).norm()) <= 1e-5 * float(want.norm()) + 1e-30


def wrong_case(
    kind: str, rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]
) -> None:
    """A norm that is told of more than there is, or of memory that nobody wrote."""
    n = rng.choice((16, 100, 1024))
    say(f"{n} values")
    more = {name: n + 16 * (name == kind) for name in ("read", "write", "scratch")}
    told = max(more.values())
    x = memory.tensor(torch.ones(n if kind == "read" else told), "x")
    weight = memory.tensor(torch.ones(told), "a norm")
    out = torch_of(memory.empty((n if kind == "write" else told,), "out"))
    chain = Chain(Scratch())
    part = chain.take(4 * n)
    goal = Memory(part if kind == "scratch" else out, 4 * n)
    if kind == "leave":
        x.fill_(math.nan)  # as what was not written
    eps = Memory(memory.tensor(torch.ones(1), "eps"), 4)
    job = [0, 1, told, Memory(x, 4 * n), Memory(weight, 4 * n), eps, goal, 0]
    chain.add(specialized(KernelSource("linear/activations"))["norm"], job, 1)
    chain.run()
    close(out[:n], torch.ones(n) / math.sqrt(2))


KINDS: dict[str, Callable[[random.Random, GuardedMemory, Callable[[str], None]], None]] = {
    "attention": attention_case,
    "store": store_case,
    "products": product_case,
    "linear": linear_case,
    "activations": activation_case,
    "recurrent": recurrent_case,
    "experts": expert_case,
    "token": token_case,
    "latent": latent_case,
    **{f"wrong {kind}": partial(wrong_case, kind) for kind in WRONG},
}


def run(kind: str, seed: int, amount: str) -> None:
    end = time.monotonic() + float(amount[:-1]) if amount.endswith("s") else math.inf
    most = sys.maxsize if amount.endswith("s") else int(amount)
    n_cases = n_blocks = 0
    for number in itertools.count(seed):
        if n_cases == most or time.monotonic() >= end:
            break
        name = f"{kind} {number}"
        rng = random.Random(name)
        torch.manual_seed(number)
        with guarded(rng) as memory:
            KINDS[kind](rng, memory, partial(print, name, flush=True))
        n_cases += 1
        n_blocks += memory.n_guarded
    print(f"done: {n_cases} cases of {kind}, {n_blocks} blocks", flush=True)


if __name__ == "__main__":
    faulthandler.enable()
    for argument in sys.argv[1:]:
        kind, seed, amount = argument.split(":")
        run(kind, int(seed), amount)
