"""Products of each expert's matrix with the rows of tokens that see it, as steps of a chain.

A stack is read expert by expert, and only those that a token sees. Threads share the panels of each
expert's matrices. What a row's product is does not depend on the other rows of its group.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.addresses import Floats
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.linear.job import (
    PACK_ITEMS,
    PART_BLOCKS,
    MatrixJob,
    MultiplyJob,
    PackJob,
)
from localkv.kernels.cpu.linear.matrices import (
    InPlaceTensor,
    Items,
    KernelTensor,
    Packing,
    RowTensor,
    check_matrix,
    kind_of,
    late_item,
)
from localkv.kernels.cpu.linear.shares import shares
from localkv.kernels.cpu.moe.job import (
    PACK_BYTES,
    CopyJob,
    EachJob,
    GatherJob,
    PackTokensJob,
    PlanJob,
    StackStep,
    job_bytes,
)
from localkv.kernels.cpu.moe.routing import GROUPING, ROWS, Routing, taken
from localkv.kernels.cpu.runtime.chain import Chain, Item, Memory, Place, Where
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.quant_formats.shared.cpu.panel_layout import LANES
from localkv.system.threads import n_threads


@dataclass(frozen=True)
class StackProduct:
    """Rows `first` to `first + n_out` of each expert's matrix.

    Attributes:
        stack: [n_experts, ..., n_in], for which there is a kernel.
        out: float32 [n_pairs, n_out], by row.
        bias: float32 [n_experts, ...] of the whole matrices, or None.
    """

    stack: PackedTensor
    out: Where
    n_out: int
    bias: Floats | None = None
    first: int = 0


@dataclass(frozen=True)
class Rows:
    """What is multiplied: float32, by token or by row.

    Attributes:
        x: [n_tokens, n_in] or [n_pairs, n_in].
        by_token: it is the former.
    """

    x: Where
    n_in: int
    by_token: bool


@dataclass(frozen=True)
class _Packed:
    """Activations as products read them.

    Attributes:
        grouped: by row.
        singles: by token, for groups of one row, or 0.
        row_bytes: of one.
        pack: what makes `grouped` of each group's rows; its worker is 0 where nothing has to.
    """

    grouped: Memory | int
    singles: Memory | int
    row_bytes: int
    x_bytes: int
    pack: PackJob
    worker: int


def matrix_of(stack: PackedTensor) -> KernelTensor:
    """The first of a stack's matrices."""
    first = stack[0]
    assert isinstance(first, KernelTensor)
    return first


def add_stack_products(
    chain: Chain, routing: Routing, rows: Rows, products: Sequence[StackProduct]
) -> None:
    """Products of rows with the matrices of their experts, in as few steps as they need."""
    groups = dict[tuple[str, bool], list[StackProduct]]()
    for product in products:
        groups.setdefault(kind_of(product.stack), []).append(product)
    for group in groups.values():
        first = matrix_of(group[0].stack)
        _add_products(chain, routing, first, _packed(chain, routing, rows, first), group)


def add_copies(
    chain: Chain, routing: Routing, x: Where, n: int, weights: Memory | None = None
) -> Memory:
    """Each token's row for each of its experts, by row, times weights by pair."""
    out = taken(chain, 4 * routing.n_pairs * n)
    job = CopyJob(
        next_row=0,
        n_rows=routing.n_pairs,
        n=n,
        pairs=routing.pairs,
        n_used=routing.n_used,
        x=Memory(x, 4 * routing.n_tokens * n),
        out=out,
        weights=weights or 0,
    )
    chain.add(specialized(ROWS)["copy"], job, min(n_threads(), routing.n_pairs))
    return out


def _packed(chain: Chain, routing: Routing, rows: Rows, first: KernelTensor) -> _Packed:
    """Activations for matrices like `first`, and the steps that make them."""
    facts, n_in = first.packing, rows.n_in
    x_bytes = 4 * n_in
    none = PackJob(0, 0, 0, 0, 0, 0, 0)
    n_tokens, n_pairs = routing.n_tokens, routing.n_pairs
    if facts is None and rows.by_token:
        grouped = 0 if n_tokens == 1 else add_copies(chain, routing, rows.x, n_in)
        singles = Memory(rows.x, x_bytes * n_tokens)
        return _Packed(grouped, singles, x_bytes, 0, none, 0)
    if facts is None:
        return _Packed(Memory(rows.x, x_bytes * n_pairs), 0, x_bytes, 0, none, 0)
    token_bytes, n_parts = facts.token_bytes, -(-facts.n_blocks // PART_BLOCKS)
    if rows.by_token:
        singles = _add_packed_tokens(chain, routing, rows, facts, n_parts)
        in_planes = isinstance(first, InPlaceTensor)
        grouped = 0 if n_tokens == 1 else _add_gathered(chain, routing, facts, singles, in_planes)
        return _Packed(grouped, singles, token_bytes, 0, none, 0)
    grouped = taken(chain, token_bytes * n_pairs)
    x = Memory(rows.x, x_bytes * n_pairs)
    pack = PackJob(0, 0, n_in, facts.n_blocks, n_parts, x, grouped)
    return _Packed(grouped, 0, token_bytes, x_bytes, pack, facts.kernel.pack)


def _add_packed_tokens(
    chain: Chain, routing: Routing, rows: Rows, facts: Packing, n_parts: int
) -> Memory:
    """Each token packed as if it were alone."""
    n_tokens, threads = routing.n_tokens, min(n_threads(), routing.n_tokens)
    if n_tokens == 1:
        return facts.add_packing(chain, Memory(rows.x, 4 * rows.n_in), 1, rows.n_in)
    packed = taken(chain, n_tokens * facts.token_bytes)
    job = PackTokensJob(
        next_token=0,
        n_tokens=n_tokens,
        x_bytes=4 * rows.n_in,
        token_bytes=facts.token_bytes,
        worker=facts.kernel.pack,
        jobs=taken(chain, threads * PACK_BYTES),
        x=Memory(rows.x, 4 * n_tokens * rows.n_in),
        packed=packed,
        n_in=rows.n_in,
        n_blocks=facts.n_blocks,
        n_parts=n_parts,
    )
    chain.add(specialized(ROWS)["pack_tokens"], job, threads)
    return packed


def _add_gathered(
    chain: Chain, routing: Routing, facts: Packing, singles: Memory, in_planes: bool
) -> Memory:
    """Packed tokens in the tiles of their experts' rows, or side by side."""
    grouped = taken(chain, routing.n_pairs * facts.token_bytes)
    job = GatherJob(
        next_row=0,
        n_rows=routing.n_pairs,
        groups=routing.groups,
        group_of=routing.group_of,
        pairs=routing.pairs,
        n_used=routing.n_used,
        token_bytes=facts.token_bytes,
        n_blocks=facts.n_blocks,
        in_planes=int(in_planes),
        side_by_side=int(facts.side_by_side),
        singles=singles,
        grouped=grouped,
    )
    chain.add(specialized(ROWS)["gather"], job, min(n_threads(), routing.n_pairs))
    return grouped


def _matrix_job(
    product: StackProduct, name: str, n_in: int, routing: Routing
) -> tuple[MatrixJob, StackStep, Items]:
    """The part of the first expert's matrix, and what leads to the next expert's."""
    stack, first, n_out = product.stack, matrix_of(product.stack), product.n_out
    check_matrix(first, name, n_in)
    (data,) = stack.operands
    n_experts, n_all = stack.shape[:2]
    unit = 1 if isinstance(first, RowTensor) else LANES
    if n_experts != routing.n_experts or product.first % unit or product.first + n_out > n_all:
        raise BoundsError(f"rows {product.first} to +{n_out} of {list(stack.shape)}")
    if not data.flags.c_contiguous:
        raise BoundsError("a stack is not contiguous")
    matrix_bytes, item_bytes = data.nbytes // n_experts, first.items.item_bytes
    items = Items(0, item_bytes, -(-n_out // unit))
    start = product.first // unit * item_bytes
    end = (n_experts - 1) * matrix_bytes + start
    # the last of a matrix' rows may be fewer than those of an item
    end += min(items.n_items * item_bytes, matrix_bytes - start)
    flat = data.reshape(-1).view(np.uint8)
    addend, addend_bytes = None, 0
    if product.bias is not None:
        part = product.bias.reshape(-1)[product.first :]
        addend_bytes = 4 * product.bias.shape[1]
        addend = Memory(part, (n_experts - 1) * addend_bytes + 4 * n_out)
    job = MatrixJob(
        data=Memory(flat[start:], end - start),
        item_bytes=item_bytes,
        n_items=items.n_items,
        n_out=n_out,
        out=Memory(product.out, 4 * routing.n_pairs * n_out),
        addend=addend or 0,
        addend_stride=0,
        late=late_item(first),
    )
    return job, StackStep(matrix_bytes, addend_bytes), items


def _add_products(
    chain: Chain,
    routing: Routing,
    first: KernelTensor,
    packed: _Packed,
    products: Sequence[StackProduct],
) -> None:
    """Products with stacks of one format: a plan, and each group's jobs."""
    n_in = first.shape[-1]
    operands = first.operands_with(chain, packed.grouped, routing.n_tokens)
    parts = [_matrix_job(product, first.format.name, n_in, routing) for product in products]
    # of the experts of one token; others make more work
    threads, chunk = shares(
        routing.n_used * sum(items.n_items for _, _, items in parts),
        routing.n_used * sum(items.n_items * items.item_bytes for _, _, items in parts),
        routing.n_tokens,
        operands.most_items,
        n_threads(),
    )
    multiply = MultiplyJob(
        next_chunk=0,
        n_tokens=1,
        n_in=n_in,
        n_records=operands.n_records,
        token_bytes=operands.token_bytes,
        activations=operands.activations,
        chunk=chunk,
        panel_bytes=operands.panel_bytes,
        group=operands.group,
        panels=operands.panels,
        n_matrices=len(parts),
    )
    size = job_bytes(len(parts))
    jobs = taken(chain, routing.most_groups * size)
    job = PlanJob(
        next=0,
        groups=routing.groups,
        pairs=routing.pairs,
        n_used=routing.n_used,
        jobs=jobs,
        job_bytes=size,
        row_bytes=packed.row_bytes,
        singles=packed.singles,
        x_bytes=packed.x_bytes,
    )
    matrices = itertools.chain(*(matrix for matrix, _, _ in parts))
    steps = itertools.chain(*(step for _, step, _ in parts))
    workers = specialized(GROUPING)
    chain.add(workers["plan"], (*job, *packed.pack, *multiply, *matrices, *steps), 1)
    if packed.worker:
        run = EachJob(0, routing.groups, packed.worker, jobs, size)
        chain.add(workers["each"], run, threads)
    run = EachJob(0, routing.groups, operands.multiply, _behind(jobs, PACK_ITEMS), size)
    chain.add(workers["each"], run, threads)


def _behind(jobs: Memory, n_items: int) -> Item:
    """Memory from an item on."""
    place = jobs.where
    assert isinstance(place, Place)
    left = place.n_bytes - 8 * n_items
    return Memory(Place(place.offset + 8 * n_items, left), left)
