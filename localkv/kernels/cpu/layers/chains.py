"""Chains of workers that are kept for a layer's operations, and the steps that they share.

Decoding runs the same chains again and again, so one is kept for each layer and operation. Each
small number of tokens has chains of its own, too: drafts come and go between single tokens.

Where no chain holds them, norms, activations and RoPE are operations of their own. Each row's
result is the same alone as in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from localkv.arch.spec import Activation, LayerSpec, MlpSpec
from localkv.kernels.activation import activate, softplus
from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.arrays import Floats, whole_vectors
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.linear.jobs import ActivationJob, GateJob, NormJob, ResidualJob, RopeJob
from localkv.kernels.cpu.linear.matrices import has_kernel
from localkv.kernels.cpu.linear.products import Product, add_products, with_bias
from localkv.kernels.cpu.runtime.chain import Chain, Item, Memory, Place, Scratch, Where
from localkv.kernels.layer_weights import Linear, Norm
from localkv.kernels.rope import RopeTable
from localkv.system.threads import n_threads

ACTIVATIONS = KernelSource("linear/activations")
MANY_VALUES = 1 << 14
"""From this number on, a second thread is worth its start."""


def activation_worker(name: str) -> int:
    """The address of a worker of `activations`."""
    return specialized(ACTIVATIONS)[name]


def _run(name: str, n_values: int, job: Sequence[Item]) -> None:
    chain = Chain(Scratch())
    chain.add(activation_worker(name), job, n_threads() if n_values >= MANY_VALUES else 1)
    chain.run()


def _memory(x: Floats) -> Memory:
    return Memory(x, x.nbytes)


def norm_step(norm: Norm, x: Where, eps: Where, out: Where, n_rows: int) -> tuple[str, NormJob]:
    """The worker for a norm of rows, and its job.

    Args:
        x, out: float32 [n_rows, n].
        eps: one float32.
    """
    n = norm.weight.shape[0]
    rows = 4 * n_rows * n
    bias: Item = 0 if norm.bias is None else Memory(norm.bias, 4 * n)
    job = NormJob(
        next_row=0,
        n_rows=n_rows,
        n=n,
        x=Memory(x, rows),
        weight=Memory(norm.weight, 4 * n),
        eps=Memory(eps, 4),
        out=Memory(out, rows),
        bias=bias,
    )
    return {"rms": "norm", "layer": "layer_norm"}[norm.spec.kind], job


def norm_cpu(x: Floats, norm: Norm) -> Floats:
    """See `norm`; for float32."""
    x, n = np.ascontiguousarray(x), x.shape[-1]
    out, eps = np.empty_like(x), np.array([norm.spec.eps], np.float32)
    worker, job = norm_step(norm, x, eps, out, x.size // n)
    _run(worker, x.size, job)
    return out


GATED: dict[Activation, str] = {"silu": "swiglu", "gelu": "geglu"}
"""The worker for each activation that has one."""


def activate_cpu(hidden: Floats, up: Floats | None, mlp: MlpSpec) -> Floats:
    """See `activate`; for float32 of any width."""
    if up is None or mlp.sparsity or mlp.activation not in GATED:
        y: Floats = activate(hidden, up, mlp)
        return y
    n = hidden.shape[-1]
    out, up = whole_vectors(hidden).copy(), np.ascontiguousarray(whole_vectors(up))
    job = GateJob(0, out.size, _memory(out), Memory(up, out.nbytes))
    _run(GATED[mlp.activation], out.size, job)
    return out[..., :n]


def apply_rope_cpu(x: Floats, table: RopeTable) -> Floats:
    """See `apply_rope`; for float32 x [tokens, heads, head_dim]."""
    out = x.copy()
    n_tokens, n_heads, head_dim = x.shape
    pairs = table.cos.shape[-1]
    if 2 * pairs > head_dim:
        raise BoundsError(f"RoPE turns {pairs} pairs of {head_dim} channels")
    cos, sin = (
        Memory(np.ascontiguousarray(turn), 4 * n_tokens * pairs) for turn in (table.cos, table.sin)
    )
    job = RopeJob(0, n_tokens, n_heads, head_dim, _memory(out))
    turned = job._replace(n_pairs=pairs, neighbours=int(table.interleaved), cos=cos, sin=sin)
    _run("rope", x.size, turned)
    return out


MANY_CHAINS = 4096
"""The most that are remembered."""
FEW_TOKENS = 16
"""Each number of tokens up to this one has chains of its own; larger numbers share one."""
RESIDUALS = KernelSource("linear/residuals")
ROW_STEPS = KernelSource("linear/row_steps")


def runs(*layers: Linear | None) -> bool:
    """Whether there are kernels for these matrices that a chain can run."""
    return all(
        layer is not None and has_kernel(layer.weight) and not layer.weight.halves_activations
        for layer in layers
    )


def activate_source(mlp: MlpSpec) -> KernelSource:
    """The kernel of a block's activation, where it has one of its own."""
    parameters = {
        "ACTIVATION": mlp.activation,
        "GATED": mlp.gated,
        "SPARSE": mlp.sparsity != 0,
        "LIMITED": mlp.limit != 0,
        "LIMITS_GATE": mlp.limit != 0 and mlp.limits_gate,
    }
    return KernelSource("linear/activate", parameters)


def has_common_kernel(mlp: MlpSpec) -> bool:
    """Whether the block's activation is among those that are compiled together."""
    return mlp.gated and not mlp.sparsity and not mlp.limit and mlp.activation in GATED


@dataclass(frozen=True)
class _Kept:
    """A chain, and the objects it was made for, which it keeps alive."""

    made_for: tuple[object, ...]
    facts: tuple[int, ...]
    chain: Chain


class LayerChains:
    """The chains of a backend.

    Args:
        scratch: shared with the products; one thread uses it at a time.
    """

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch
        self.kept = dict[tuple[str, int, int], _Kept]()
        self.numbers = dict[tuple[float, ...], Floats]()

    def forget(self) -> None:
        """Drop all chains, so that they are made again."""
        self.kept.clear()

    def floats(self, *values: float) -> Memory:
        """Some numbers as float32, kept."""
        if values not in self.numbers:
            self.numbers[values] = np.array(values, np.float32)
        return Memory(self.numbers[values], 4 * len(values))

    def get(
        self,
        name: str,
        made_for: tuple[object, ...],
        n_tokens: int,
        make: Callable[[Chain], None],
        *facts: int,
    ) -> Chain:
        """The chain of an operation on some weights, made again if anything else has changed."""
        key = name, id(made_for[0]), n_tokens if n_tokens <= FEW_TOKENS else 0
        facts = (n_tokens, n_threads(), *facts)
        kept = self.kept.get(key)
        if (
            kept is None
            or kept.facts != facts
            or any(a is not b for a, b in zip(kept.made_for, made_for, strict=True))
        ):
            if len(self.kept) >= MANY_CHAINS:
                self.kept.clear()
            kept = _Kept(made_for, facts, Chain(self.scratch))
            make(kept.chain)
            self.kept[key] = kept
        return kept.chain

    def add_norm(
        self, chain: Chain, n_rows: int, norm: Norm | None, x: Where = "x", out: Where | None = None
    ) -> Where:
        """A norm of rows; without one the rows themselves. Returns where the result is."""
        if norm is None:
            return x
        if out is None:
            out = chain.take(4 * n_rows * norm.weight.shape[0])
        worker, job = norm_step(norm, x, self.floats(norm.spec.eps).where, out, n_rows)
        chain.add(activation_worker(worker), job, min(n_threads(), n_rows))
        return out

    def add_residual(
        self,
        chain: Chain,
        x: Where,
        n_tokens: int,
        last: Linear,
        post_norm: Norm | None,
        spec: LayerSpec,
    ) -> None:
        """out = residual + scale * norm(last(x)), by these names of the chain.

        Without a norm and a scale the product adds as it goes; its bias is the caller's matter.
        """
        n = last.weight.shape[0]
        if adds_at_once(post_norm, spec):
            product = Product(last.weight, "out", "residual", 4 * n, last.adapters)
            add_products(chain, x, n_tokens, [product])
            return
        y = chain.take(4 * n_tokens * n)
        add_products(chain, x, n_tokens, [with_bias(last, y)])
        scale = spec.residual_scale
        self.add_normed(chain, y, n_tokens, n, post_norm, "residual", "out", scale=scale)

    def add_normed(
        self,
        chain: Chain,
        y: Where,
        n_tokens: int,
        n: int,
        post_norm: Norm | None,
        before: Where,
        out: Where,
        *,
        scale: float = 1.0,
    ) -> None:
        """out = before + scale * norm(y), all [n_tokens, n]; `y` is overwritten."""
        if post_norm is not None and (post_norm.spec.kind != "rms" or post_norm.bias is not None):
            y, post_norm = self.add_norm(chain, n_tokens, post_norm, y), None
        rows = 4 * n_tokens * n
        job = ResidualJob(
            next_row=0,
            n_rows=n_tokens,
            n=n,
            x=Memory(y, rows),
            weight=0 if post_norm is None else Memory(post_norm.weight, 4 * n),
            eps=0 if post_norm is None else self.floats(post_norm.spec.eps),
            scale=self.floats(scale),
            residual=Memory(before, rows),
            out=Memory(out, rows),
        )
        chain.add(specialized(RESIDUALS)["residual"], job, min(n_threads(), n_tokens))

    def add_embedded_gate(self, chain: Chain, n_tokens: int, gate: Linear) -> Place:
        """gelu(gate(residual)) * row, by these names of the chain; returns where it is."""
        width = gate.weight.shape[0]
        n_bytes = 4 * n_tokens * width
        hidden = chain.take(n_bytes)
        add_products(chain, "residual", n_tokens, [with_bias(gate, hidden)])
        job = GateJob(0, n_tokens * width, Memory(hidden, n_bytes), Memory("row", n_bytes))
        chain.add(activation_worker("geglu"), job, min(n_threads(), n_tokens))
        return hidden

    def add_mlp(
        self, chain: Chain, h: Where, n_tokens: int, mlp: MlpSpec, gate: Linear | None, up: Linear
    ) -> Place:
        """activation(gate(h)) * up(h), or activation(up(h)); returns where it is."""
        n_bytes = 4 * n_tokens * mlp.n_ff
        hidden = chain.take(n_bytes)
        other = None
        products = [with_bias(up, hidden)]
        if gate is not None:
            other = chain.take(n_bytes)
            products = [with_bias(gate, hidden), with_bias(up, other)]
        add_products(chain, h, n_tokens, products)
        self.add_activation(chain, mlp, n_tokens, hidden, other)
        return hidden

    def add_activation(
        self, chain: Chain, mlp: MlpSpec, n_rows: int, hidden: Place, up: Place | None
    ) -> None:
        """hidden = activation(hidden), times `up` in a block with a gate: [n_rows, n_ff]."""
        n_bytes = 4 * n_rows * mlp.n_ff
        both = Memory(hidden, n_bytes), 0 if up is None else Memory(up, n_bytes)
        if has_common_kernel(mlp):
            worker = activation_worker(GATED[mlp.activation])
            chain.add(worker, GateJob(0, n_rows * mlp.n_ff, *both), n_threads())
            return
        job = ActivationJob(0, n_rows, mlp.n_ff, *both)
        if mlp.xielu is not None:
            p = mlp.xielu
            alphas = softplus(p.alpha_p), p.beta + softplus(p.alpha_n)
            job = job._replace(parameters=self.floats(*alphas, p.beta, p.eps))
        elif mlp.sparsity:
            job = job._replace(parameters=self.floats(mlp.sparsity))
        elif mlp.limit:
            job = job._replace(parameters=self.floats(mlp.limit))
        worker = specialized(activate_source(mlp))["activate"]
        chain.add(worker, job, min(n_threads(), n_rows))


def adds_at_once(post_norm: Norm | None, spec: LayerSpec) -> bool:
    """Whether a block's last product can add to x as it goes."""
    return post_norm is None and spec.residual_scale == 1.0
