"""Products with packed matrices on the CPU.

`CpuProducts.prepare` lays a matrix out when it is loaded (`shared/cpu/panel_layout.py`), and
its products read that layout as it is. No weight is ever decoded into memory; many tokens meet
codes that are unpacked a few at a time, in a core's cache (`linear/tiles.py`). Where CPUs multiply
bytes Q8_0 stays in the file (`linear/panels.py`). F32, F16 and BF16 rows are read as in the file
(`linear/rows.py`). Whatever the format, a token's result does not depend on how many tokens come
with it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from localkv.kernels.bounds import BoundsError, check_array
from localkv.kernels.cpu.arrays import Floats
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.linear.arena import PanelArena
from localkv.kernels.cpu.linear.jobs import (
    ACTIVATION_BLOCK_BYTES,
    IN_PLACE_FORMATS,
    LAYOUTS,
    ROW_FORMAT_NAMES,
    TOKENS_AT_ONCE,
    ExpandJob,
    HeadJob,
    LowRankItem,
    LowRankOutput,
    MatrixJob,
    MultiplyJob,
    ShrinkJob,
)
from localkv.kernels.cpu.linear.late_panels import LatePanels, Panels
from localkv.kernels.cpu.linear.matrices import (
    InPlaceTensor,
    KernelTensor,
    PanelTensor,
    RowTensor,
    check_matrix,
    kind_of,
    late_item,
    panel_facts,
    product_kernel,
)
from localkv.kernels.cpu.runtime.chain import Chain, Item, Memory, Scratch, Where
from localkv.kernels.layer_weights import Linear
from localkv.kernels.low_rank import PANEL, Adapters
from localkv.kernels.primitives import round_activations
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.system.threads import n_threads

CHUNKS_PER_THREAD = 8
"""How finely work is divided where there is little, so that threads end together."""
LEAST_BYTES = 1 << 16
"""Bytes of weights for a thread, times the tokens. A helper costs whom it helps 1.5 us, in which
memory gives a core about half as much; where there is less for it, it is not asked."""


class Shares(NamedTuple):
    """How some items (panels or rows) are shared among threads.

    Attributes:
        threads: that work on them.
        chunk: items that one takes at a time.
    """

    threads: int
    chunk: int


def shares(n_items: int, n_bytes: int, n_tokens: int, most: int, n_threads: int) -> Shares:
    """Shares of items of `n_bytes` together, at most `most` at a time.

    Of the sizes that leave every thread enough chunks it is the one with which the last thread ends
    first, if chunks of one size take the same time.
    """
    threads = max(1, min(n_threads, n_items, n_bytes * n_tokens // LEAST_BYTES))
    threads = -(-n_items // -(-n_items // threads))  # more would not end sooner
    largest = max(1, min(most, n_items // (threads * CHUNKS_PER_THREAD)))

    def longest(chunk: int) -> int:
        n_whole, rest = divmod(n_items, chunk)
        return max(-(-n_whole // threads) * chunk, n_whole // threads * chunk + rest)

    sizes = range(largest, largest // 2, -1)
    return Shares(threads, min(sizes, key=longest))


PIECES_PER_THREAD = 4
"""A head's matrix has as many parts as this takes, so that threads end together."""


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


LONGER = 4
"""How many times as large chunks for one token are as for others: no cache has to keep them, and
where one begins nothing was asked of memory ahead. Workers have memory for the sums of several
tokens with chunks of `most_items`."""


@dataclass(frozen=True)
class Product:
    """One matrix of `add_products`.

    Attributes:
        weight: [n_out, n_in], for which there is a kernel.
        out: float32 [n_tokens, n_out].
        addend: what is added, float32 like `out`, or None.
        addend_stride: bytes from token to token in the addend; 0 for a bias.
        adapters: what adds to it afterwards, or None.
    """

    weight: PackedTensor
    out: Where
    addend: Where | None = None
    addend_stride: int = 0
    adapters: Adapters | None = None


def with_bias(layer: Linear, out: Where) -> Product:
    """A product, its bias and its adapters; whoever runs the chain keeps the layer."""
    return Product(layer.weight, out, layer.bias, adapters=layer.adapters)


def _add_group(chain: Chain, x: Where, n_tokens: int, products: Sequence[Product]) -> None:
    """Products with matrices of one format, in one step after the activations', if any."""
    first = products[0].weight
    n_in = first.shape[-1]
    weights, matrices = list[KernelTensor](), list[MatrixJob]()
    for product in products:
        weight, stride = product.weight, product.addend_stride
        assert isinstance(weight, KernelTensor)
        check_matrix(weight, first.format.name, n_in)
        n_out = weight.shape[0]
        out, addend = Memory(product.out, 4 * n_tokens * n_out), None
        if product.addend is not None:
            addend = Memory(product.addend, (n_tokens - 1) * stride + 4 * n_out)
        matrices.append(
            MatrixJob(*weight.items, n_out, out, addend or 0, stride, late_item(weight))
        )
        weights.append(weight)
    operands = weights[0].add_operands(chain, Memory(x, 4 * n_tokens * n_in), n_tokens)
    items = [weight.items for weight in weights]
    threads, chunk = shares(
        sum(each.n_items for each in items),
        sum(each.n_items * each.item_bytes for each in items),
        n_tokens,
        operands.most_items * (LONGER if n_tokens == 1 else 1),
        n_threads(),
    )
    job = MultiplyJob(
        next_chunk=0,
        n_tokens=n_tokens,
        n_in=n_in,
        n_records=operands.n_records,
        token_bytes=operands.token_bytes,
        activations=operands.activations,
        chunk=chunk,
        panel_bytes=operands.panel_bytes,
        group=operands.group,
        panels=operands.panels,
        n_matrices=len(matrices),
    )
    chain.add(operands.multiply, (*job, *itertools.chain(*matrices)), threads)


def add_products(chain: Chain, x: Where, n_tokens: int, products: Sequence[Product]) -> None:
    """Products of float32 x [n_tokens, n_in] with some matrices, in as few steps as they need."""
    groups = dict[tuple[str, bool], list[Product]]()
    for product in products:
        groups.setdefault(kind_of(product.weight), []).append(product)
    for group in groups.values():
        _add_group(chain, x, n_tokens, group)
    adapted = [product for product in products if product.adapters is not None]
    if adapted:
        _add_adapters(chain, x, n_tokens, adapted)


LOW_RANK = KernelSource("linear/low_rank_product")
FEW_TOKENS = 8
"""Up to this many tokens threads share the rows of a matrix A, and above it the tokens."""
PIECE_TOKENS = 32
"""Tokens that meet all rows of a matrix A at a time, while both are in a core's cache."""


def _add_adapters(chain: Chain, x: Where, n_tokens: int, products: Sequence[Product]) -> None:
    """What adapters add to some products of x [n_tokens, n_in]: a step for their matrices A, and
    one for their matrices B."""
    n_in, column = products[0].weight.shape[-1], 0
    pairs, outputs = list[LowRankItem](), list[LowRankOutput]()
    a_bytes = b_bytes = n_panels = 0
    for product in products:
        assert product.adapters is not None
        n_out, parts = product.weight.shape[0], product.adapters.parts
        out = Memory(product.out, 4 * n_tokens * n_out)
        outputs.append(LowRankOutput(out, n_out, -(-n_out // PANEL), len(pairs), len(parts)))
        n_panels += outputs[-1].n_panels  # type: ignore[operator]
        for part in parts:
            if part.a.shape[1] != n_in or len(part.b) != -(-n_out // PANEL):
                raise BoundsError(f"an adapter {part.a.shape}, {part.b.shape} of {n_out}, {n_in}")
            data = [Memory(one, one.nbytes) for one in (part.a, part.b, part.factor)]
            rank = part.rank
            pairs.append(LowRankItem(data[0], data[1], rank, part.adapter, column, data[2]))
            column += rank
            a_bytes += part.a.nbytes
            b_bytes += part.b.nbytes
    assert products[0].adapters is not None
    scales = products[0].adapters.scales.rows
    if n_tokens > len(scales):
        raise BoundsError(f"{n_tokens} tokens, and scales of {len(scales)}")
    n_bytes = 4 * n_tokens * column
    low = Memory(chain.take(n_bytes), n_bytes)
    given = low, 4 * column, Memory(scales, n_tokens * scales.strides[0]), scales.strides[0]
    is_few = n_tokens <= FEW_TOKENS
    rows, tokens = (1, n_tokens) if is_few else (column, min(n_tokens, PIECE_TOKENS))
    workers, items = specialized(LOW_RANK), tuple(itertools.chain(*pairs))
    shrink = ShrinkJob(
        0, n_tokens, n_in, Memory(x, 4 * n_tokens * n_in), *given, rows, tokens, len(pairs)
    )
    most = n_threads()
    threads = max(1, min(most, a_bytes * n_tokens // LEAST_BYTES))
    chain.add(workers["shrink"], (*shrink, *items), threads)
    threads, chunk = shares(n_panels, b_bytes, n_tokens, n_panels, most)
    expand = ExpandJob(0, n_tokens, *given, chunk, len(outputs))
    chain.add(workers["expand"], (*expand, *itertools.chain(*outputs), *items), threads)


class CpuProducts:
    """Products of one backend: memory for panels, and scratch, which one thread uses at a time."""

    def __init__(self, scratch: Scratch | None = None) -> None:
        self._arena = PanelArena()
        self._scratch = scratch or Scratch()
        self.late = LatePanels(self._arena)

    def prepare(
        self, weight: PackedTensor, release: Callable[[], None] | None = None
    ) -> PackedTensor:
        """A matrix [n_out, n_in] or a stack [n_experts, n_out, n_in], as `matmul` wants it.

        Args:
            release: panels may be made late; called when the rows are not read any more.
        """
        name = weight.format.name
        *stack, n_out, n_in = weight.shape
        rows = np.ascontiguousarray(weight.rows)
        row_bytes = weight.format.row_bytes(n_in)
        check_array(f"rows of {name}", rows, "uint8", *stack, n_out, row_bytes)
        if name in ROW_FORMAT_NAMES:
            return RowTensor(
                weight.format,
                rows,
                weight.shape,
                weight.halves_activations,
                kernel=product_kernel(name),
            )
        layout = LAYOUTS[name]
        facts = panel_facts(layout, n_out, n_in)
        if name in IN_PLACE_FORMATS:
            return InPlaceTensor(weight.format, rows, weight.shape, facts=facts)
        if release is not None:
            return self.late.prepare(weight, rows, facts, release)
        panels = Panels(name, rows, facts, self._arena)
        panels.lay(panels.n_missing)
        return PanelTensor(
            weight.format, weight.rows, weight.shape, panels=panels.panels, facts=facts
        )

    def matmul(self, x: Floats, weight: PackedTensor) -> Floats:
        """x float32 [tokens, n_in] @ weight [n_out, n_in].T -> float32 [tokens, n_out]."""
        return self.linear(x, Linear(weight))

    def linear(self, x: Floats, layer: Linear) -> Floats:
        """x [tokens, n_in] -> [tokens, n_out]."""
        weight = layer.weight
        x = np.ascontiguousarray(round_activations(x, weight))
        out = np.empty((x.shape[0], weight.shape[0]), np.float32)
        chain = Chain(self._scratch)
        add_products(chain, x, x.shape[0], [with_bias(layer, out)])
        chain.run()
        return out

    def head_products(self, x: Floats, stack: PackedTensor) -> Floats:
        """See `primitives.head_products`; all heads at once."""
        return head_products(self._scratch, round_activations(x, stack), stack)
