"""Products of each head's matrix with that head's row, in one chain for all heads."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.cpu.arrays import Floats
from localkv.kernels.cpu.runtime.chain import Chain, Scratch

MANY_STACKS = 1024
"""The most whose chains are remembered."""

AddProduct = Callable[[Chain, Floats, int, PackedTensor, Floats], None]
"""(chain, x [tokens, n_in], tokens, matrix, out [tokens, n_out]): a step of the chain."""


@dataclass(frozen=True)
class HeadChain:
    """The products of a stack with the rows of some tokens, which lie head by head.

    Attributes:
        stack: for which this is; it may go before we do.
        rows, out: float32 [heads, tokens, n_in] and [heads, tokens, n_out].
    """

    stack: weakref.ref[PackedTensor]
    chain: Chain
    rows: Floats
    out: Floats


class HeadProducts:
    """Chains are kept for one token, whose products take no longer than making a chain."""

    def __init__(self, scratch: Scratch, add: AddProduct) -> None:
        self._scratch, self._add = scratch, add
        self._chains = dict[int, HeadChain]()

    def forget(self) -> None:
        """Drop all that is kept from call to call."""
        self._chains.clear()

    def __call__(self, x: Floats, stack: PackedTensor) -> Floats:
        """x float32 [tokens, heads, n_in], a stack with a kernel -> [tokens, heads, n_out]."""
        if len(x) != 1:
            made = self._made(stack, len(x))
        else:
            kept = self._chains.get(id(stack))
            if kept is None or kept.stack() is not stack:
                if len(self._chains) >= MANY_STACKS:
                    self._chains.clear()
                kept = self._chains[id(stack)] = self._made(stack, 1)
            made = kept
        made.rows[:] = x.transpose(1, 0, 2)
        made.chain.run()
        out = made.out.transpose(1, 0, 2)
        return out.copy() if len(x) == 1 else out

    def _made(self, stack: PackedTensor, n_tokens: int) -> HeadChain:
        n_heads, n_out, n_in = stack.shape
        rows = np.empty((n_heads, n_tokens, n_in), np.float32)
        out = np.empty((n_heads, n_tokens, n_out), np.float32)
        chain = Chain(self._scratch)
        for head in range(n_heads):
            self._add(chain, rows[head], n_tokens, stack[head], out[head])
        return HeadChain(weakref.ref(stack), chain, rows, out)
