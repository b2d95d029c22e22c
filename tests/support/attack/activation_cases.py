"""Random activations, norms and turns on guarded memory; see `kernel_cases.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import torch

from localkv.arch.spec import Activation, MlpSpec, XieluParams
from localkv.kernels.activation import activate, softplus
from localkv.kernels.attention import merge_segments
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.layers.attention import add_sinks
from localkv.kernels.cpu.layers.chains import activate_source
from localkv.kernels.cpu.linear.jobs import ActivationJob, RopeJob
from localkv.kernels.cpu.runtime.chain import Chain, Scratch
from localkv.kernels.reference.backend import apply_rope, hadamard_transform, norm
from localkv.kernels.rope import RopeTable
from support.attack.random_calls import Memory, close, threads
from support.cpu_ops import activate_cpu, apply_rope_cpu, norm_cpu, rotate_cpu
from support.guarded_memory import GuardedMemory
from support.layers import layer_norm, rms
from support.torch_edge import torch_of

SIZES = (1, 2, 5, 15, 16, 17, 31, 48, 100, 257, 1023, 1024, 1025)


def norm_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """RMSNorm of rows."""
    n_tokens = rng.choice((1, 2, 3, 7, 33))
    n = rng.choice(SIZES)
    workers = specialized(KernelSource("linear/activations"))
    chain = Chain(Scratch())
    eps = memory.tensor(torch.tensor([1e-5]), "eps")
    n_threads = threads(rng)
    biased = rng.random() < 0.5
    say(f"norm {n_tokens} x {n}, bias {biased}, threads {n_threads}")
    x, weight = memory.tensor(torch.randn(n_tokens, n), "x"), torch.randn(n)
    bias = memory.tensor(torch.randn(n), "bias") if biased else None
    out = torch_of(memory.empty((n_tokens, n), "out"))
    job = [0, n_tokens, n, Memory(x, x.nbytes), Memory(memory.tensor(weight, "w"), 4 * n)]
    job += [Memory(eps, 4), Memory(out, out.nbytes), Memory(bias, 4 * n) if biased else 0]
    chain.add(workers["norm"], job, n_threads)
    chain.run()
    by = replace(rms(weight), bias=bias)
    double = replace(by, weight=weight.double(), bias=None if bias is None else bias.double())
    close(out, norm(x.double(), double))
    assert torch.equal(norm_cpu(x, by), out)


def layer_norm_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """LayerNorm of rows, with a bias or without."""
    n_tokens = rng.choice((1, 2, 3, 7, 33))
    n = rng.choice(SIZES)
    workers = specialized(KernelSource("linear/activations"))
    chain = Chain(Scratch())
    eps = memory.tensor(torch.tensor([1e-5]), "eps")
    n_threads = threads(rng)
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


def gate_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """SwiGLU or GeGLU."""
    n_tokens = rng.choice((1, 2, 3, 7, 33))
    n = rng.choice(SIZES)
    workers = specialized(KernelSource("linear/activations"))
    chain = Chain(Scratch())
    n_threads = threads(rng)
    kind = rng.choice(("swiglu", "geglu"))
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


def sinks_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """What attention summed, shared with heads' sinks."""
    n_tokens = rng.choice((1, 2, 3, 7, 33))
    chain = Chain(Scratch())
    n_threads = threads(rng)
    n_heads, size = rng.choice((1, 3, 8)), 16 * rng.choice((1, 4, 5))
    say(f"sinks {n_tokens} x {n_heads} x {size}, threads {n_threads}")
    x = memory.tensor(torch.randn(n_tokens, n_heads, size), "x")
    lse = memory.tensor(9 * torch.randn(n_tokens, n_heads), "log-sum-exp")
    sinks = memory.tensor(9 * torch.randn(n_heads), "sinks")
    want = merge_segments([(x.double(), lse.double())], sinks.double())
    add_sinks(chain, *(y.numpy() for y in (x, lse, sinks)), (n_tokens, n_heads, size))
    chain.run()
    close(x, want)


def residual_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """What a block adds, normed or not."""
    n_tokens = rng.choice((1, 2, 3, 7, 33))
    n = rng.choice(SIZES)
    chain = Chain(Scratch())
    eps = memory.tensor(torch.tensor([1e-5]), "eps")
    n_threads = threads(rng)
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


def split_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """Queries and their gates, and the gate."""
    n_tokens = rng.choice((1, 2, 3, 7, 33))
    chain = Chain(Scratch())
    n_threads = threads(rng)
    n_heads, size = rng.choice((1, 3, 8)), 16 * rng.choice((1, 4, 5))
    say(f"split {n_tokens} x {n_heads} x {size}, threads {n_threads}")
    both = memory.tensor(torch.randn(n_tokens, n_heads, 2, size), "both")
    q, gate = (torch_of(memory.empty((n_tokens, n_heads, size), "out")) for _ in range(2))
    job = [0, n_tokens, n_heads, size, Memory(both, both.nbytes)]
    job += [Memory(q, q.nbytes), Memory(gate, gate.nbytes)]
    residuals = specialized(KernelSource("linear/residuals"))
    chain.add(residuals["split"], job, n_threads)
    chain.run()
    assert torch.equal(q, both[:, :, 0])
    assert torch.equal(gate, both[:, :, 1])


def attention_gate_case(
    rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]
) -> None:
    """Attention's output times the activation of a gate of each channel or head."""
    n_tokens = rng.choice((1, 2, 3, 7, 33))
    chain = Chain(Scratch())
    n_threads, is_by_head, is_softplus = threads(rng), rng.random() < 0.5, rng.random() < 0.5
    n_heads, size = rng.choice((1, 3, 8)), 16 * rng.choice((1, 4, 5))
    n_gates = 1 if is_by_head else size
    say(f"gates {n_tokens} x {n_heads} x {size}, {n_gates} a head, threads {n_threads}")
    x = memory.tensor(torch.randn(n_tokens, n_heads, size), "x")
    gate = memory.tensor(30 * torch.randn(n_tokens, n_heads, n_gates), "gate")
    activation = torch.nn.functional.softplus if is_softplus else torch.sigmoid
    want = x * activation(gate.double())
    job = [0, n_tokens, n_heads, size, Memory(x, x.nbytes), Memory(gate, gate.nbytes)]
    job += [int(is_by_head), int(is_softplus)]
    chain.add(specialized(KernelSource("linear/residuals"))["gates"], job, n_threads)
    chain.run()
    close(x, want)


def clamp_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """Values between a bound's negative and the bound; NaN stays."""
    chain, n_threads = Chain(Scratch()), threads(rng)
    n = rng.choice(SIZES)
    say(f"clamp {n}, threads {n_threads}")
    values = torch.randn(n)
    values[rng.randrange(n)] = torch.nan
    x, limit = memory.tensor(values, "x"), memory.tensor(torch.tensor([0.7]), "limit")
    job = [0, n, Memory(x, 4 * n), Memory(limit, 4)]
    chain.add(specialized(KernelSource("linear/residuals"))["clamp"], job, n_threads)
    chain.run()
    torch.testing.assert_close(x, values.clamp(-0.7, 0.7), rtol=0, atol=0, equal_nan=True)


def scaled_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """Rows times a number."""
    n_tokens = rng.choice((1, 2, 3, 7, 33))
    n = rng.choice(SIZES)
    chain = Chain(Scratch())
    eps = memory.tensor(torch.tensor([1e-5]), "eps")
    n_threads = threads(rng)
    say(f"scaled {n_tokens} x {n}, threads {n_threads}")
    x = memory.tensor(torch.randn(n_tokens, n), "x")
    want = x * eps
    job = [0, n_tokens, n, Memory(x, x.nbytes), 0, Memory(eps, 4)]
    chain.add(specialized(KernelSource("linear/row_steps"))["scaled"], job, n_threads)
    chain.run()
    assert torch.equal(x, want)


def rope_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """Channels of heads that are turned, normed or not."""
    n_tokens = rng.choice((1, 2, 3, 7, 33))
    workers = specialized(KernelSource("linear/activations"))
    chain = Chain(Scratch())
    eps = memory.tensor(torch.tensor([1e-5]), "eps")
    n_threads = threads(rng)
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


def rotate_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """The Hadamard transform."""
    n_tokens = rng.choice((1, 2, 3, 7, 33))
    block = 1 << rng.randrange(1, 9)
    shape = (n_tokens, rng.choice((1, 3)), block * rng.choice((1, 2, 5)))
    say(f"rotate {shape} by {block}")
    x = memory.tensor(torch.randn(shape), "x")
    assert torch.equal(rotate_cpu(x, block), hadamard_transform(x, block))


def activate_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """An activation that is compiled by itself: each, with a gate or without, and sparse ones."""
    activation: Activation = rng.choice(("silu", "gelu", "relu", "relu2", "swiglu_oai", "xielu"))
    gated = activation == "swiglu_oai" or (activation != "xielu" and rng.random() < 0.5)
    sparsity = 1.5 if activation == "gelu" and gated and rng.random() < 0.7 else 0.0
    n_tokens, n = rng.choice((1, 2, 3, 7, 33)), 16 * rng.choice((1, 2, 3, 17, 64))
    n_threads = threads(rng)
    say(f"{activation} {n_tokens} x {n}, gated {gated}, {sparsity}, threads {n_threads}")
    xielu = XieluParams(0.8, 0.7, 0.5, -1e-6) if activation == "xielu" else None
    mlp = MlpSpec(n, activation, gated=gated, sparsity=sparsity, xielu=xielu)
    x = memory.tensor(3 * torch.randn(n_tokens, n), "x")
    up = memory.tensor(3 * torch.randn(n_tokens, n), "up") if gated else None
    want = activate(x.double(), None if up is None else up.double(), mlp)
    numbers = [sparsity]
    if xielu is not None:
        alphas = softplus(xielu.alpha_p), xielu.beta + softplus(xielu.alpha_n)
        numbers = [*alphas, xielu.beta, xielu.eps]
    parameters = memory.tensor(torch.tensor(numbers), "parameters")
    job = ActivationJob(0, n_tokens, n, Memory(x, x.nbytes))
    job = job._replace(up=0 if up is None else Memory(up, up.nbytes))
    job = job._replace(parameters=Memory(parameters, parameters.nbytes))
    chain = Chain(Scratch())
    chain.add(specialized(activate_source(mlp))["activate"], job, n_threads)
    chain.run()
    close(x, want)


CASES = (
    norm_case,
    layer_norm_case,
    gate_case,
    activate_case,
    rope_case,
    rotate_case,
    sinks_case,
    scaled_case,
    residual_case,
    split_case,
    clamp_case,
    attention_gate_case,
)


def activation_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """One of them, of any sizes."""
    rng.choice(CASES)(rng, memory, say)
