"""The CPU's work between products as operations of their own, where no chain holds them.

Each row's result is the same alone as in any batch, which torch does not promise of all it has: its
`silu` has one approximation for whole vectors and another for what is left over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from localkv.arch.spec import Activation
from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.attention.kernels import n_threads
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.linear.activation_job import GateJob, NormJob, RopeJob
from localkv.kernels.cpu.runtime.chain import Chain, Item, Memory, Scratch, Where
from localkv.kernels.layer_weights import Norm
from localkv.kernels.rope import RopeTable
from localkv.simd.lanes import LANES

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


def _memory(x: Tensor) -> Memory:
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


def norm_cpu(x: Tensor, norm: Norm) -> Tensor:
    """As `norm`, for float32."""
    x, n = x.contiguous(), x.shape[-1]
    out, eps = torch.empty_like(x), torch.tensor([norm.spec.eps], dtype=torch.float32)
    worker, job = norm_step(norm, x, eps, out, x.numel() // n)
    _run(worker, x.numel(), job)
    return out


GATED: dict[Activation, str] = {"silu": "swiglu", "gelu": "geglu"}
"""The worker for each activation."""


def gated_cpu(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """As `gated`, for float32 of any width."""
    n = gate.shape[-1]
    missing = -n % LANES
    gate, up = (F.pad(x, (0, missing)).contiguous() for x in (gate, up))
    gate = gate if missing else gate.clone()
    job = GateJob(0, gate.numel(), _memory(gate), Memory(up, gate.nbytes))
    _run(GATED[activation], gate.numel(), job)
    return gate[..., :n]


def apply_rope_cpu(x: Tensor, table: RopeTable) -> Tensor:
    """As `apply_rope`, for float32 x [tokens, heads, head_dim]."""
    out = x.contiguous().clone()
    n_tokens, n_heads, head_dim = x.shape
    pairs = table.cos.shape[-1]
    if 2 * pairs > head_dim:
        raise BoundsError(f"RoPE turns {pairs} pairs of {head_dim} channels")
    cos, sin = (Memory(turn.contiguous(), 4 * n_tokens * pairs) for turn in (table.cos, table.sin))
    job = RopeJob(0, n_tokens, n_heads, head_dim, _memory(out))
    turned = job._replace(n_pairs=pairs, neighbours=int(table.interleaved), cos=cos, sin=sin)
    _run("rope", x.numel(), turned)
    return out
