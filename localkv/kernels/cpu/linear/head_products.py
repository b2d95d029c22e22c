"""Products of each head's matrix with that head's rows, as one step of a chain."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.addresses import Floats
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.linear.blocks import LAYOUTS
from localkv.kernels.cpu.linear.head_job import TOKENS_AT_ONCE, HeadJob
from localkv.kernels.cpu.linear.job import ACTIVATION_BLOCK_BYTES
from localkv.kernels.cpu.linear.matrices import (
    InPlaceTensor,
    KernelTensor,
    PanelTensor,
    RowTensor,
)
from localkv.kernels.cpu.runtime.chain import Chain, Item, Memory, Scratch, Where
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.system.threads import n_threads

PIECES_PER_THREAD = 4
"""Of a head's matrix there are as many parts as this takes, so that threads end together."""


def head_source(name: str) -> KernelSource:
    """The kernel for matrices of a format."""
    template = "linear/head_product" if name in LAYOUTS else "linear/row_head_product"
    return KernelSource(template, {"FORMAT": name})


@functools.cache
def _worker(name: str) -> int:
    return specialized(head_source(name))["multiply_heads"]


@dataclass(frozen=True)
class HeadRows:
    """Rows of heads: float32, where each head has `n` values of each token.

    Attributes:
        where: they are.
        head, token: values from head to head, and from token to token.
    """

    where: Where
    head: int
    token: int

    def memory(self, n_heads: int, n_tokens: int, n: int) -> Memory:
        """All of them, and what lies between."""
        return Memory(self.where, 4 * ((n_heads - 1) * self.head + (n_tokens - 1) * self.token + n))


def add_head_products(
    chain: Chain, x: HeadRows, n_tokens: int, stack: PackedTensor, out: HeadRows
) -> None:
    """Products of a stack [heads, n_out, n_in], for which there is a kernel, with x."""
    n_heads, n_out, n_in = stack.shape
    first = stack[0]
    assert isinstance(stack, KernelTensor)
    assert isinstance(first, KernelTensor)
    first.check_items()
    data = stack.panels if isinstance(stack, PanelTensor) else stack.rows
    if len(data) != n_heads or not data.flags.c_contiguous:
        raise BoundsError(f"{len(data)} matrices of {n_heads} heads")
    threads, items = n_threads(), first.items
    more = dict[str, Item]()
    if isinstance(stack, (PanelTensor, InPlaceTensor)):
        facts = stack.facts
        made = facts.panel_bytes if isinstance(stack, InPlaceTensor) else 0
        packed = min(n_tokens, TOKENS_AT_ONCE) * facts.n_blocks * ACTIVATION_BLOCK_BYTES
        each = -(-(made + packed) // 64) * 64
        more = {
            "n_records": facts.n_records,
            "n_blocks": facts.n_blocks,
            "panel_bytes": made,
            "scratch": Memory(chain.take(threads * each), threads * each),
            "scratch_bytes": each,
        }
    else:
        assert isinstance(stack, RowTensor)
    pieces = max(1, -(-threads * PIECES_PER_THREAD // n_heads)) if threads > 1 else 1
    job = HeadJob(
        next_piece=0,
        n_parts=min(pieces, items.n_items),
        n_heads=n_heads,
        n_tokens=n_tokens,
        n_in=n_in,
        n_out=n_out,
        x=x.memory(n_heads, n_tokens, n_in),
        x_head=4 * x.head,
        x_token=4 * x.token,
        out=out.memory(n_heads, n_tokens, n_out),
        out_head=4 * out.head,
        out_token=4 * out.token,
        data=Memory(data, data.nbytes),
        matrix_bytes=data.nbytes // n_heads,
        item_bytes=items.item_bytes,
        n_items=items.n_items,
        **more,
    )
    chain.add(_worker(stack.format.name), job, threads)


def head_products(scratch: Scratch, x: Floats, stack: PackedTensor) -> Floats:
    """x float32 [tokens, heads, n_in], a stack with a kernel -> [tokens, heads, n_out]."""
    n_heads, n_out, n_in = stack.shape
    if x.shape[1:] != (n_heads, n_in):
        raise BoundsError(f"rows {list(x.shape)} for matrices {list(stack.shape)}")
    x = np.ascontiguousarray(x, np.float32)
    out = np.empty((len(x), n_heads, n_out), np.float32)
    chain = Chain(scratch)
    places = HeadRows(x, n_in, n_heads * n_in), HeadRows(out, n_out, n_heads * n_out)
    add_head_products(chain, places[0], len(x), stack, places[1])
    chain.run()
    return out
