"""The steps of routed experts in a chain, from what they read to the sum of what they give.

A stack is read expert by expert, and only those that a token sees. Threads share the panels of each
expert's matrices. What a row's product is does not depend on the other rows of its group.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from localkv.arch.spec import MlpSpec, MoeSpec
from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.arrays import Floats
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.layers.chains import LayerChains, activate_source, has_common_kernel
from localkv.kernels.cpu.linear.jobs import (
    PACK_ITEMS,
    PART_BLOCKS,
    ExpertAdapterJob,
    ExpertItem,
    LowRankOutput,
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
    has_kernel,
    kind_of,
    late_item,
)
from localkv.kernels.cpu.linear.products import LOW_RANK, Product, add_products, shares, with_bias
from localkv.kernels.cpu.moe.jobs import (
    COMBINED,
    GROUP_ITEMS,
    PACK_BYTES,
    CombineJob,
    CopyJob,
    EachJob,
    GatherJob,
    GroupJob,
    HalveJob,
    PackTokensJob,
    PlanJob,
    RouteJob,
    StackStep,
    job_bytes,
    route_bytes,
)
from localkv.kernels.cpu.runtime.chain import Chain, Item, Memory, Place, Where
from localkv.kernels.layer_weights import Linear, MlpWeights, MoeWeights, Norm
from localkv.kernels.low_rank import PANEL, Adapters
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.simd import LANES
from localkv.system.threads import n_threads

ROWS = KernelSource("moe/rows")
FEW_TOKENS = 4
"""Up to this many are routed sooner by one thread than others start."""


def route_source(moe: MoeSpec) -> KernelSource:
    """The kernel that chooses experts."""
    return KernelSource("moe/route", {"GATING": moe.gating})


@dataclass(frozen=True)
class Routing:
    """Tables in scratch memory; see `GroupJob`.

    Attributes:
        n_tokens, n_experts, n_used: sizes.
        weights: float32 by pair.
    """

    n_tokens: int
    n_experts: int
    n_used: int
    experts: Memory
    weights: Memory
    rows: Memory
    pairs: Memory
    groups: Memory
    group_of: Memory

    @property
    def n_pairs(self) -> int:
        return self.n_tokens * self.n_used

    @property
    def most_groups(self) -> int:
        return min(self.n_experts, self.n_pairs)


def taken(chain: Chain, n_bytes: int) -> Memory:
    """All of a new part of the scratch memory."""
    return Memory(chain.take(n_bytes), n_bytes)


def add_routing(
    chain: Chain, logits: Where, n_tokens: int, moe: MoeSpec, bias: Floats | None, scale: Memory
) -> Routing:
    """The steps from the router's logits, float32 [n_tokens, n_experts], to the tables.

    Args:
        bias: [n_experts], added for the choice.
        scale: one float32, `MoeSpec.weights_scale`.
    """
    n_experts, n_pairs = moe.n_experts, n_tokens * moe.n_experts_used
    by_pair = 8 * n_pairs
    routing = Routing(
        n_tokens,
        n_experts,
        moe.n_experts_used,
        experts=taken(chain, by_pair),
        weights=taken(chain, 4 * n_pairs),
        rows=taken(chain, by_pair),
        pairs=taken(chain, by_pair),
        groups=taken(chain, 8 * (1 + GROUP_ITEMS * min(n_experts, n_pairs))),
        group_of=taken(chain, by_pair),
    )
    threads = n_threads() if n_tokens > FEW_TOKENS else 1
    thread_bytes = route_bytes(n_experts, moe.n_groups)
    job = RouteJob(
        next_token=0,
        n_tokens=n_tokens,
        n_experts=n_experts,
        n_used=moe.n_experts_used,
        n_groups=moe.n_groups,
        n_groups_used=moe.n_groups_used,
        renormalise=int(moe.renormalise),
        ranks_logits=int(moe.gating == "sigmoid" and bias is None and moe.n_groups == 1),
        scale=scale,
        logits=Memory(logits, 4 * n_tokens * n_experts),
        bias=0 if bias is None else Memory(bias, 4 * n_experts),
        scratch=taken(chain, threads * thread_bytes),
        thread_bytes=thread_bytes,
        experts=routing.experts,
        weights=routing.weights,
    )
    chain.add(specialized(route_source(moe))["route"], job, threads)
    tables = GroupJob(
        next=0,
        n_pairs=n_pairs,
        n_experts=n_experts,
        experts=routing.experts,
        next_rows=taken(chain, 8 * n_experts),
        rows=routing.rows,
        pairs=routing.pairs,
        groups=routing.groups,
        group_of=routing.group_of,
    )
    chain.add(specialized(ROWS)["group"], tables, 1)
    return routing


@dataclass(frozen=True)
class StackProduct:
    """Rows `first` to `first + n_out` of each expert's matrix.

    Attributes:
        stack: [n_experts, ..., n_in], for which there is a kernel.
        out: float32 [n_pairs, n_out], by row.
        bias: float32 [n_experts, ...] of the whole matrices, or None.
        adapters: of the whole matrices, or None.
    """

    stack: PackedTensor
    out: Where
    n_out: int
    bias: Floats | None = None
    first: int = 0
    adapters: Adapters | None = None


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
    adapted = [product for product in products if product.adapters is not None]
    if adapted:
        _add_adapters(chain, routing, rows, adapted)


def _add_adapters(
    chain: Chain, routing: Routing, rows: Rows, products: Sequence[StackProduct]
) -> None:
    """What adapters add to products of experts: one step."""
    items, outputs, column = list[ExpertItem](), list[LowRankOutput](), 0
    for product in products:
        n_out, adapters = product.n_out, product.adapters
        assert adapters is not None
        out, n_panels = Memory(product.out, 4 * routing.n_pairs * n_out), -(-n_out // PANEL)
        outputs.append(LowRankOutput(out, n_out, n_panels, len(items), len(adapters.parts)))
        for part in adapters.parts:
            n_experts, n_all = part.b.shape[:2]
            ends = product.first // PANEL + n_panels
            if part.a.shape[::2] != (routing.n_experts, rows.n_in) or product.first % PANEL:
                raise BoundsError(f"an adapter {part.a.shape} of {routing.n_experts} experts")
            if n_experts != routing.n_experts or n_all < ends:
                raise BoundsError(f"an adapter {part.b.shape} of rows to {ends * PANEL}")
            a, b, factor = (Memory(one, one.nbytes) for one in (part.a, part.b, part.factor))
            steps = part.a.nbytes // n_experts, part.b.nbytes // n_experts
            item = ExpertItem(
                a, b, part.rank, part.adapter, column, factor, *steps, first=product.first
            )
            items.append(item)
            column += part.rank
    assert products[0].adapters is not None
    scales, n_bytes = products[0].adapters.scales.rows, 4 * routing.n_pairs * column
    if routing.n_tokens > len(scales):
        raise BoundsError(f"{routing.n_tokens} tokens, and scales of {len(scales)}")
    n_rows = routing.n_tokens if rows.by_token else routing.n_pairs
    job = ExpertAdapterJob(
        next_row=0,
        n_rows=routing.n_pairs,
        n_used=routing.n_used,
        x=Memory(rows.x, 4 * n_rows * rows.n_in),
        n_in=rows.n_in,
        by_token=int(rows.by_token),
        pairs=routing.pairs,
        experts=routing.experts,
        low=taken(chain, n_bytes),
        low_bytes=4 * column,
        scales=Memory(scales, routing.n_tokens * scales.strides[0]),
        scale_bytes=scales.strides[0],
        n_matrices=len(outputs),
    )
    flat = (*itertools.chain(*outputs), *itertools.chain(*items))
    worker = specialized(LOW_RANK)["expert_rows"]
    chain.add(worker, (*job, *flat), min(n_threads(), routing.n_pairs))


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
    # a matrix' last rows may be fewer than an item has
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
    workers = specialized(ROWS)
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


FEW_VALUES = 1 << 13
"""Up to this many are rounded sooner by one thread than others start."""


def _alike(*weights: PackedTensor | Linear | None) -> bool:
    """Whether there are kernels for all that there is, which read the same activations."""
    found = [w.weight if isinstance(w, Linear) else w for w in weights if w is not None]
    return all(map(has_kernel, found)) and len({w.halves_activations for w in found}) <= 1


def mlp_runs(mlp: MlpWeights) -> bool:
    """Whether a dense block can be steps of a chain."""
    return (
        _alike(mlp.ffn_gate, mlp.ffn_up)
        and _alike(mlp.ffn_down)
        and mlp.ffn_down.weight.shape[-1] % LANES == 0
    )


def experts_run(moe: MoeWeights) -> bool:
    """Whether routed experts can be steps of a chain."""
    down = moe.ffn_down_exps
    return (
        _alike(moe.ffn_gate_inp)
        and _alike(moe.ffn_gate_exps, moe.ffn_up_exps, moe.ffn_gate_up_exps)
        and _alike(down)
        and down.shape[-1] % LANES == 0
        and down.shape[-2] % LANES == 0
        and (moe.shared is None or mlp_runs(moe.shared))
        and (moe.ffn_latent_down is None or _alike(moe.ffn_latent_down))
        and (moe.ffn_latent_up is None or _alike(moe.ffn_latent_up))
    )


def expert_sources(moe: MoeSpec) -> list[KernelSource]:
    """The kernels that routed experts need, products aside."""
    blocks = (moe.expert, moe.shared) if moe.n_ff_shared else (moe.expert,)
    activations = [activate_source(block) for block in blocks if not has_common_kernel(block)]
    return [route_source(moe), ROWS, *activations]


@dataclass
class ExpertSteps:
    """Adds steps to a chain for some tokens.

    Attributes:
        n_embd: values of a token.
    """

    chains: LayerChains
    chain: Chain
    n_tokens: int
    n_embd: int

    def rounded(self, x: Where, n_values: int, weight: PackedTensor) -> Where:
        """`x` as the product with a weight takes it."""
        if not weight.halves_activations:
            return x
        out = taken(self.chain, 4 * n_values)
        self._add_rounding(x, out.where, n_values)
        return out.where

    def _add_rounding(self, x: Where, out: Where, n: int) -> None:
        job = HalveJob(0, n, Memory(x, 4 * n), Memory(out, 4 * n))
        self.chain.add(specialized(ROWS)["halve"], job, n_threads() if n > FEW_VALUES else 1)

    def add_mlp(self, h: Where, spec: MlpSpec, mlp: MlpWeights) -> Where:
        """What a dense block makes of `h`: float32 [n_tokens, n_embd]."""
        n = self.n_tokens
        x = self.rounded(h, n * self.n_embd, mlp.ffn_up.weight)
        hidden: Where = self.chains.add_mlp(self.chain, x, n, spec, mlp.ffn_gate, mlp.ffn_up)
        hidden = self.rounded(hidden, n * spec.n_ff, mlp.ffn_down.weight)
        out = taken(self.chain, 4 * n * self.n_embd)
        add_products(self.chain, hidden, n, [with_bias(mlp.ffn_down, out.where)])
        return out.where

    def add_normed(
        self, y: Where, norm: Norm | None, before: Where, out: Where, scale: float = 1.0
    ) -> None:
        """out = before + scale * norm(y); `y` is overwritten."""
        n, n_embd = self.n_tokens, self.n_embd
        self.chains.add_normed(self.chain, y, n, n_embd, norm, before, out, scale=scale)

    def add_routing(self, routed: Where, moe: MoeSpec, weights: MoeWeights) -> Routing:
        """Router and choice, for the rows that the router reads."""
        router, n = weights.ffn_gate_inp, self.n_tokens
        logits = taken(self.chain, 4 * n * moe.n_experts)
        x = self.rounded(routed, n * self.n_embd, router.weight)
        add_products(self.chain, x, n, [with_bias(router, logits.where)])
        scale = self.chains.floats(moe.weights_scale)
        return add_routing(self.chain, logits.where, n, moe, weights.exp_probs_b, scale)

    def _add_hidden(self, rows: Rows, routing: Routing, moe: MoeSpec, weights: MoeWeights) -> Where:
        """The hidden rows of all experts' blocks: float32 [n_pairs, n_ff]."""
        both, n_ff = weights.ffn_gate_up_exps, moe.n_ff
        n_bytes = 4 * routing.n_pairs * n_ff
        hidden, up = self.chain.take(n_bytes), None
        if both is not None:
            up = self.chain.take(n_bytes)
            bias, adapters = weights.gate_up_bias, weights.gate_up_adapters
            products = [
                StackProduct(both, hidden, n_ff, bias, adapters=adapters),
                StackProduct(both, up, n_ff, bias, n_ff, adapters),
            ]
        else:
            assert weights.ffn_up_exps is not None
            if weights.ffn_gate_exps is None:
                alone = StackProduct(weights.ffn_up_exps, hidden, n_ff, weights.up_bias)
                products = [replace(alone, adapters=weights.up_adapters)]
            else:
                up = self.chain.take(n_bytes)
                gate = StackProduct(weights.ffn_gate_exps, hidden, n_ff, weights.gate_bias)
                other = StackProduct(weights.ffn_up_exps, up, n_ff, weights.up_bias)
                products = [
                    replace(gate, adapters=weights.gate_adapters),
                    replace(other, adapters=weights.up_adapters),
                ]
        add_stack_products(self.chain, routing, rows, products)
        self.chains.add_activation(self.chain, moe.expert, routing.n_pairs, hidden, up)
        if weights.ffn_down_exps.halves_activations:
            self._add_rounding(hidden, hidden, routing.n_pairs * n_ff)
        return hidden

    def add_experts(
        self,
        h: Where,
        routed: Where,
        moe: MoeSpec,
        weights: MoeWeights,
        out: Where,
        residual: Where | None = None,
    ) -> None:
        """out = residual + what the experts give, or without it; all float32 [n_tokens, n_embd].

        Args:
            h: what experts read.
            routed: what the router reads.
        """
        routing = self.add_routing(routed, moe, weights)
        shared: Where | None = None
        if weights.ffn_latent_down is None or weights.ffn_latent_up is None:
            y = self._add_blocks(h, routing, moe, weights)
            if weights.shared is not None:
                shared = self.add_mlp(h, moe.shared, weights.shared)
            self._add_sum(h, y, shared, routing, moe, weights, out, residual)
            return
        n, down, up = self.n_tokens, weights.ffn_latent_down, weights.ffn_latent_up
        x = self.rounded(h, n * self.n_embd, down.weight)
        latent, total = (taken(self.chain, 4 * n * moe.latent_dim).where for _ in range(2))
        add_products(self.chain, x, n, [with_bias(down, latent)])
        narrow = replace(self, n_embd=moe.latent_dim)
        y = narrow._add_blocks(latent, routing, moe, weights)
        narrow._add_sum(latent, y, None, routing, moe, weights, total, None)
        total = narrow.rounded(total, n * moe.latent_dim, up.weight)
        if weights.shared is not None:
            shared = self.add_mlp(h, moe.shared, weights.shared)
        sums = out if residual is None else taken(self.chain, 4 * n * self.n_embd).where
        stride = 0 if shared is None else 4 * self.n_embd
        product = Product(up.weight, sums, shared, stride, up.adapters)
        add_products(self.chain, total, n, [product])
        if residual is not None:
            self.add_normed(sums, None, residual, out)

    def _add_blocks(self, h: Where, routing: Routing, moe: MoeSpec, weights: MoeWeights) -> Memory:
        """What each expert gives of its rows: float32 [n_pairs, n_embd]."""
        both, n_embd = weights.ffn_gate_up_exps, self.n_embd
        first = weights.ffn_up_exps if both is None else both
        assert first is not None
        x, n_rows = h, self.n_tokens
        if moe.weighs_input:
            x = add_copies(self.chain, routing, h, n_embd, routing.weights).where
            n_rows = routing.n_pairs
        x = self.rounded(x, n_rows * n_embd, first)
        rows = Rows(x, n_embd, by_token=not moe.weighs_input)
        hidden = Rows(self._add_hidden(rows, routing, moe, weights), moe.n_ff, by_token=False)
        y = taken(self.chain, 4 * routing.n_pairs * n_embd)
        adapters = weights.down_adapters
        down = StackProduct(weights.ffn_down_exps, y.where, n_embd, adapters=adapters)
        add_stack_products(self.chain, routing, hidden, [down])
        return y

    def _add_sum(
        self,
        h: Where,
        y: Memory,
        shared: Where | None,
        routing: Routing,
        moe: MoeSpec,
        weights: MoeWeights,
        out: Where,
        residual: Where | None,
    ) -> None:
        """The last step."""
        n, n_embd, gate = self.n_tokens, self.n_embd, weights.ffn_gate_inp_shexp
        n_bytes = 4 * n * n_embd
        scale, bias = weights.down_scale, weights.down_bias
        job = CombineJob(
            next_part=0,
            n_tokens=n,
            n=n_embd,
            n_used=routing.n_used,
            rows=routing.rows,
            experts=routing.experts,
            y=y,
            weights=0 if moe.weighs_input else routing.weights,
            down_scale=0 if scale is None else Memory(scale, 4 * moe.n_experts),
            down_bias=0 if bias is None else Memory(bias, 4 * moe.n_experts * n_embd),
            shared=0 if shared is None else Memory(shared, n_bytes),
            shared_scale=self.chains.floats(moe.shared_scale),
            shared_gate=0 if gate is None else Memory(gate, 4 * n_embd),
            h=0 if gate is None else Memory(h, n_bytes),
            residual=0 if residual is None else Memory(residual, n_bytes),
            out=Memory(out, n_bytes),
        )
        n_parts = -(-n_embd // COMBINED)
        self.chain.add(specialized(ROWS)["combine"], job, min(n_threads(), n * n_parts))
