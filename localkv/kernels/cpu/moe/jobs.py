"""What the workers of routed experts get: arrays of int64, read as named tuples.

A *pair* is a token and one of its experts, counted through all tokens: pair p is of token
p // n_used. Products see pairs in another order, as *rows*, in which an expert's follow one
another; they are its *group*. Which group is where is known only when a chain runs, so that workers
write it to tables, int64 all of them, and the jobs of products, too.

Where a chain makes a job, an item may also name memory; workers find its address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from localkv.kernels.cpu.linear.jobs import MATRIX_ITEMS, MULTIPLY_ITEMS, PACK_ITEMS

if TYPE_CHECKING:
    from localkv.kernels.cpu.runtime.chain import Item


class RouteJob(NamedTuple):
    """Experts to be chosen.

    Attributes:
        next_token: the token to take next.
        n_tokens, n_experts, n_used: sizes.
        n_groups, n_groups_used: groups of experts (`MoeSpec`), 1 for none.
        renormalise: weights are divided by their sum.
        ranks_logits: experts are chosen by their logits and not by their shares.
        scale: one float32, a factor on the weights.
        logits: float32 [n_tokens, n_experts].
        bias: float32 [n_experts], added for the choice, or 0.
        scratch, thread_bytes: memory for each thread (`route_bytes`).
        experts, weights: by pair, and float32 for the latter; a token's by expert.
    """

    next_token: Item
    n_tokens: Item
    n_experts: Item
    n_used: Item
    n_groups: Item
    n_groups_used: Item
    renormalise: Item
    ranks_logits: Item
    scale: Item
    logits: Item
    bias: Item
    scratch: Item
    thread_bytes: Item
    experts: Item
    weights: Item


class Group(NamedTuple):
    """A group of rows of one expert, as the table of groups has it: the rows' first, how many."""

    expert: int
    first: int
    n_rows: int


class GroupJob(NamedTuple):
    """Pairs to be put in the order of their experts.

    Attributes:
        next: not used; one thread does it.
        n_pairs, n_experts: sizes.
        experts: by pair.
        next_rows: memory for [n_experts].
        rows: of each pair its row.
        pairs: of each row its pair.
        groups: how many there are, and then `GROUP_ITEMS` of each: the expert, the first row, how
            many rows.
        group_of: of each row its group.
    """

    next: Item
    n_pairs: Item
    n_experts: Item
    experts: Item
    next_rows: Item
    rows: Item
    pairs: Item
    groups: Item
    group_of: Item


class PlanJob(NamedTuple):
    """Jobs of products to be made, for each group a `PackJob` and a `MultiplyJob` with matrices.

    There follow the jobs of a first expert with one row, and `n_matrices` of `StackStep`.

    Attributes:
        next: not used; one thread does it.
        groups, pairs, n_used: see `GroupJob`.
        jobs, job_bytes: where the jobs go, and bytes of one.
        row_bytes: of a row's activations.
        singles: activations by token, which are read where a group is a single row, or 0.
        x_bytes: of a row that is packed.
    """

    next: Item
    groups: Item
    pairs: Item
    n_used: Item
    jobs: Item
    job_bytes: Item
    row_bytes: Item
    singles: Item
    x_bytes: Item


class StackStep(NamedTuple):
    """From one expert to the next.

    Attributes:
        matrix_bytes, addend_bytes: of a stack's matrix, and of its bias.
    """

    matrix_bytes: Item
    addend_bytes: Item


class EachJob(NamedTuple):
    """A worker that runs the job of each group; threads meet in all of them.

    Attributes:
        next: not used.
        groups: see `GroupJob`.
        worker: its address.
        jobs, job_bytes: the first group's job, and bytes from there to the next.
    """

    next: Item
    groups: Item
    worker: Item
    jobs: Item
    job_bytes: Item


class PackTokensJob(NamedTuple):
    """Tokens to be packed, each as if it were alone.

    Attributes:
        next_token: the token to take next.
        n_tokens, x_bytes, token_bytes: tokens, bytes of one, and of one that is packed.
        worker: the one that packs.
        jobs: memory for a `PackJob` of each thread, `PACK_BYTES` apart.
        x, packed: float32 [n_tokens, n_in]; packed.
        n_in, n_blocks, n_parts: see `PackJob`.
    """

    next_token: Item
    n_tokens: Item
    x_bytes: Item
    token_bytes: Item
    worker: Item
    jobs: Item
    x: Item
    packed: Item
    n_in: Item
    n_blocks: Item
    n_parts: Item


class GatherJob(NamedTuple):
    """Packed tokens to be put together, as a tile of their expert's rows wants it.

    Attributes:
        next_row: the row to take next; one that is alone in its group stays where it is.
        n_rows: all of them.
        groups, group_of, pairs, n_used: see `GroupJob`.
        token_bytes, n_blocks: of a packed token.
        in_planes: a token alone is packed into planes (`linear/panels.py`).
        side_by_side: or tokens lie one after the other.
        singles, grouped: packed, by token and by row.
    """

    next_row: Item
    n_rows: Item
    groups: Item
    group_of: Item
    pairs: Item
    n_used: Item
    token_bytes: Item
    n_blocks: Item
    in_planes: Item
    side_by_side: Item
    singles: Item
    grouped: Item


class CopyJob(NamedTuple):
    """Rows of float32 to be put in the order of experts.

    Attributes:
        next_row: the row to take next.
        n_rows, n: rows, and values of one, a multiple of 16.
        pairs, n_used: see `GroupJob`.
        x, out: by token; by row.
        weights: by pair, factors, or 0.
    """

    next_row: Item
    n_rows: Item
    n: Item
    pairs: Item
    n_used: Item
    x: Item
    out: Item
    weights: Item


class HalveJob(NamedTuple):
    """Float32 to be rounded to halves: `n` values, a multiple of 16; `out` may be `x`."""

    next_part: Item
    n: Item
    x: Item
    out: Item


class CombineJob(NamedTuple):
    """What a token's experts give, added up: float32 throughout.

    Attributes:
        next_part: the part of a token to take next.
        n_tokens, n, n_used: tokens, values of one, a multiple of 16, experts of one.
        rows, experts: see `GroupJob`.
        y: by row, [n].
        weights: by pair, or 0.
        down_scale, down_bias: [n_experts], [n_experts, n], or 0.
        shared: what the shared expert gives, [n_tokens, n], or 0.
        shared_scale: one number.
        shared_gate, h: [n], and [n_tokens, n] that it is multiplied with; or 0.
        residual: [n_tokens, n] to which all is added, or 0.
        out: [n_tokens, n].
    """

    next_part: Item
    n_tokens: Item
    n: Item
    n_used: Item
    rows: Item
    experts: Item
    y: Item
    weights: Item
    down_scale: Item
    down_bias: Item
    shared: Item
    shared_scale: Item
    shared_gate: Item
    h: Item
    residual: Item
    out: Item


PLAN_ITEMS, STEP_ITEMS = len(PlanJob._fields), len(StackStep._fields)
GROUP_ITEMS = len(Group._fields)

PACK_BYTES = 64
"""Bytes of a thread's `PackJob`: a line of the cache."""

COMBINED = 1024
"""Values of a token that are added up as one piece of work, and of those that are rounded."""

LINE = 64


def whole_lines(n_bytes: int) -> int:
    return -(-n_bytes // LINE) * LINE


def job_bytes(n_matrices: int) -> int:
    """Bytes of a group's jobs."""
    return whole_lines(8 * (PACK_ITEMS + MULTIPLY_ITEMS + n_matrices * MATRIX_ITEMS))


def route_bytes(n_experts: int, n_groups: int) -> int:
    """Bytes of a thread's scratch memory: shares, ranks and the best ranks of experts or groups,
    float32 in whole vectors, and the best groups, int64."""
    return 3 * whole_lines(4 * n_experts) + whole_lines(8 * n_groups)
