"""The CPU's work between products as operations of their own, where no chain holds them.

Each row's result is the same alone as in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.arch.spec import Activation, MlpSpec
from localkv.kernels.activation import activate
from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.addresses import Floats, whole_vectors
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.linear.activation_job import GateJob, NormJob, RopeJob
from localkv.kernels.cpu.runtime.chain import Chain, Item, Memory, Scratch, Where
from localkv.kernels.layer_weights import Norm
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
    """As `norm`, for float32."""
    x, n = np.ascontiguousarray(x), x.shape[-1]
    out, eps = np.empty_like(x), np.array([norm.spec.eps], np.float32)
    worker, job = norm_step(norm, x, eps, out, x.size // n)
    _run(worker, x.size, job)
    return out


GATED: dict[Activation, str] = {"silu": "swiglu", "gelu": "geglu"}
"""The worker for each activation that has one."""


def activate_cpu(hidden: Floats, up: Floats | None, mlp: MlpSpec) -> Floats:
    """As `activate`, for float32 of any width."""
    if up is None or mlp.sparsity or mlp.activation not in GATED:
        y: Floats = activate(hidden, up, mlp)
        return y
    n = hidden.shape[-1]
    out, up = whole_vectors(hidden).copy(), np.ascontiguousarray(whole_vectors(up))
    job = GateJob(0, out.size, _memory(out), Memory(up, out.nbytes))
    _run(GATED[mlp.activation], out.size, job)
    return out[..., :n]


def apply_rope_cpu(x: Floats, table: RopeTable) -> Floats:
    """As `apply_rope`, for float32 x [tokens, heads, head_dim]."""
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
