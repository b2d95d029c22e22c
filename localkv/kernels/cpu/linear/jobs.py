"""The jobs of the workers of the CPU's products, and of those between them: arrays of int64.

Workers read them as named tuples. Where a chain makes a job (`linear/products.py`), an item may
also name memory, or a number that the chain is given when it runs; workers find an address, or the
number. Rows are float32.

Beside them stands which weights the CPU multiplies how, and how panels lie in memory. Nothing here
imports Numba.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from localkv.quant_formats import FORMATS, WEIGHT_FORMATS, QuantFormat
from localkv.quant_formats.shared.cpu.panel_layout import BLOCK, LANES, PanelLayout, record_values
from localkv.simd.cpu_features import HAS_AVX512, HAS_BFLOAT_DOTS, HAS_BYTE_DOTS

if TYPE_CHECKING:
    from localkv.kernels.cpu.runtime.chain import Item


_WITH_KERNEL = [fmt for fmt in WEIGHT_FORMATS.values() if fmt.has_part("cpu")]

PANEL_FORMAT_NAMES = tuple(fmt.name for fmt in _WITH_KERNEL if fmt.block_size > 1)
"""The formats that are multiplied in panels."""

ROW_FORMAT_NAMES = tuple(fmt.name for fmt in _WITH_KERNEL if fmt.block_size == 1)
"""The formats whose rows are multiplied as they are in the file."""

ROUNDED_ROW_NAMES = ("bf16",)
"""The ones among them whose activations are rounded to the format where the CPU multiplies it."""

IN_PLACE_FORMAT_NAMES = tuple(fmt.name for fmt in _WITH_KERNEL if fmt.stays_in_file)
"""The formats that stay in the file where CPUs multiply bytes: panels are made to be multiplied."""

MADE_BYTES = 1 << 18
"""Bytes of panels that a thread makes for many tokens: part of a core's cache."""

PART_BYTES = 256
"""Room for the job of a part of a step (`linear/jobs.py`), which each thread makes."""


def panels_bytes(fmt: QuantFormat, shape: Sequence[int]) -> int:
    """Bytes of a matrix [n_out, n_in], or a stack of them, in panels."""
    *stack, n_out, n_in = shape
    n_rows = -(-n_out // LANES) * LANES
    n_values = -(-n_in // record_values(fmt)) * record_values(fmt)
    return math.prod(stack) * n_rows * fmt.row_bytes(n_values)


class _Layouts(Mapping[str, PanelLayout]):
    """All formats' layouts; the files of a format are imported for who asks for it."""

    def __init__(self) -> None:
        self._known = dict[str, PanelLayout]()

    def __getitem__(self, name: str) -> PanelLayout:
        if name not in self._known:
            if name not in self:
                raise KeyError(name)
            self._known[name] = FORMATS[name].cpu_layout.LAYOUT
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in PANEL_FORMAT_NAMES

    def __iter__(self) -> Iterator[str]:
        return iter(PANEL_FORMAT_NAMES)

    def __len__(self) -> int:
        return len(PANEL_FORMAT_NAMES)


LAYOUTS: Mapping[str, PanelLayout] = _Layouts()


MAX_TILE = 8 if HAS_AVX512 else 4
"""Tokens of the largest tile of panels: as many as there are registers for."""

TILE_ROWS, MAX_TILE_TOKENS = (4, 6) if HAS_AVX512 else (2, 2)
"""Rows as in the file, and tokens, that meet in the largest tile: as many sums as registers."""

CHUNK_ROWS, CHUNK_BYTES = 64, 1 << 18
"""The most rows as in the file that a thread takes at a time for many tokens, and about the most
bytes: its cache keeps them for all of these."""

ACTIVATION_BLOCK_BYTES = BLOCK + 12 if HAS_BYTE_DOTS else 4 * (BLOCK + 2)
"""Bytes of a token's packed activations for `BLOCK` columns."""

IN_PLACE_FORMATS = IN_PLACE_FORMAT_NAMES if HAS_BYTE_DOTS else ()
"""The formats whose matrices stay in the file on this CPU."""

BFLOAT_PAIRS = "bf16 pairs"
"""Rows of BF16 that meet activations in BF16."""

BFLOAT_BLOCK_BYTES = 2 * BLOCK
"""Bytes of a token's activations in BF16, for `BLOCK` columns: a cache line."""


def bfloat_blocks(n_in: int) -> int:
    """Blocks of a token's activations in BF16, with up to 7 of zeros after `n_in` columns.

    They are 3 more than a multiple of 8. So the same columns of a tile's tokens lie in different
    sets of the nearest cache, while tokens 4 KiB apart would share a set.
    """
    n_blocks = -(-n_in // BLOCK)
    return n_blocks + (3 - n_blocks) % 8


ROUNDED_ROWS = dict.fromkeys(ROUNDED_ROW_NAMES, BFLOAT_PAIRS) if HAS_BFLOAT_DOTS else {}
"""The formats of rows as in the file for which activations are rounded on this CPU, and how such
rows are called."""

PART_BLOCKS = 64
"""Blocks of a token that are packed as one piece of work."""


class PackJob(NamedTuple):
    """Activations to be packed.

    Attributes:
        next_piece: the piece of work to take next, `n_parts` for each token.
        n_tokens, n_in: the shape of `x`.
        n_blocks: blocks of a token's packed activations.
        n_parts: pieces of a token, of PART_BLOCKS but for the last.
        x: float32 [n_tokens, n_in].
        packed: of all tokens (see `linear/panels.py`).
    """

    next_piece: Item
    n_tokens: Item
    n_in: Item
    n_blocks: Item
    n_parts: Item
    x: Item
    packed: Item


class MultiplyJob(NamedTuple):
    """Products with matrices of one format and width; `n_matrices` of `MatrixJob` follow.

    Attributes:
        next_chunk: the chunk of panels or rows to take next, counted through all matrices.
        n_tokens, n_in: the shape of the activations.
        n_records: of a panel; 0 for rows.
        token_bytes: of packed activations; 0 for rows that meet float32.
        activations: packed, or float32 [n_tokens, n_in].
        chunk: panels or rows of a chunk.
        panel_bytes: bytes of a panel.
        group, panels: panels that a thread makes on the way at a time, and memory for all
            threads'; 0 where none are made.
    """

    next_chunk: Item
    n_tokens: Item
    n_in: Item
    n_records: Item
    token_bytes: Item
    activations: Item
    chunk: Item
    panel_bytes: Item
    group: Item
    panels: Item
    n_matrices: Item


class MatrixJob(NamedTuple):
    """One matrix.

    Attributes:
        data, item_bytes, n_items: its panels or rows, bytes of one, how many.
        n_out: rows.
        out: float32 [n_tokens, n_out].
        addend: float32 that is added to `out`, or 0.
        addend_stride: bytes from token to token in the addend; 0 for a bias.
        late: address of its `LateJob` where its panels may not be made yet.
    """

    data: Item
    item_bytes: Item
    n_items: Item
    n_out: Item
    out: Item
    addend: Item
    addend_stride: Item
    late: Item = 0


class ShrinkJob(NamedTuple):
    """A x of low rank for some pairs of a matrix and an adapter, in the pieces that threads take:
    some rows of A and some tokens. After it the pairs' `LowRankItem`s stand.

    Attributes:
        next_piece: the piece to take next.
        n_tokens, n_in: the shape of the activations.
        x: float32 [n_tokens, n_in].
        low, low_bytes: float32 [n_tokens, ranks of all pairs], and bytes of a token.
        scales, scale_bytes: float32 [n_tokens, adapters], and bytes of a token.
        piece_rows, piece_tokens: rows of a pair's A, and tokens, of a piece.
        n_pairs: of a matrix and an adapter.
    """

    next_piece: Item
    n_tokens: Item
    n_in: Item
    x: Item
    low: Item
    low_bytes: Item
    scales: Item
    scale_bytes: Item
    piece_rows: Item
    piece_tokens: Item
    n_pairs: Item


class ExpandJob(NamedTuple):
    """B times what `ShrinkJob` left, added to products. After it the `LowRankOutput`s of
    the matrices stand, and then the `LowRankItem`s of all.

    Attributes:
        next_chunk: the chunk of panels to take next, counted through all matrices.
        n_tokens: of the batch.
        low, low_bytes, scales, scale_bytes: as in `ShrinkJob`.
        chunk: panels of a chunk.
        n_matrices: that follow.
    """

    next_chunk: Item
    n_tokens: Item
    low: Item
    low_bytes: Item
    scales: Item
    scale_bytes: Item
    chunk: Item
    n_matrices: Item


class LowRankOutput(NamedTuple):
    """A product that is added to.

    Attributes:
        out: float32 [n_tokens, n_out].
        n_out, n_panels: its rows, and the panels of B.
        first_pair, n_pairs: its `LowRankItem`s.
    """

    out: Item
    n_out: Item
    n_panels: Item
    first_pair: Item
    n_pairs: Item


class LowRankItem(NamedTuple):
    """An adapter's part of a product (`low_rank.LowRank`).

    Attributes:
        a: float16 [rank, n_in].
        b: float16 [panels, rank, 16].
        rank: of both.
        adapter: the column of its scales.
        low: the column where A x begins.
        factor: one float32, on the scales.
    """

    a: Item
    b: Item
    rank: Item
    adapter: Item
    low: Item
    factor: Item


class ExpertAdapterJob(NamedTuple):
    """What adapters add to products of experts, row by row. After it the `LowRankOutput`s of
    the stacks stand, and then the `ExpertItem`s of all.

    Attributes:
        next_row: the row to take next.
        n_rows, n_used: pairs of token and expert, and experts of a token.
        x, n_in, by_token: float32 by token or by row, and values of one.
        pairs, experts: int64, of each row its pair, and of each pair its expert.
        low, low_bytes: float32 [n_rows, ranks of all], and bytes of a row.
        scales, scale_bytes: as in `ShrinkJob`.
        n_matrices: that follow.
    """

    next_row: Item
    n_rows: Item
    n_used: Item
    x: Item
    n_in: Item
    by_token: Item
    pairs: Item
    experts: Item
    low: Item
    low_bytes: Item
    scales: Item
    scale_bytes: Item
    n_matrices: Item


class ExpertItem(NamedTuple):
    """A `LowRankItem` of a stack, and the bytes of A and of B from expert to expert; the rows of
    `out` begin at row `first` of B, a multiple of 16."""

    a: Item
    b: Item
    rank: Item
    adapter: Item
    low: Item
    factor: Item
    a_bytes: Item
    b_bytes: Item
    first: Item


EXPERT_ADAPTER_ITEMS = len(ExpertAdapterJob._fields)
SHRINK_ITEMS, EXPAND_ITEMS, OUTPUT_ITEMS = (
    len(kind._fields) for kind in (ShrinkJob, ExpandJob, LowRankOutput)
)


class FillJob(NamedTuple):
    """Panels to be made of a matrix, or of a stack of them.

    Attributes:
        next_panel: the panel to take next.
        first_panel, n_panels: those to be made, counted through all matrices.
        n_out, row_bytes: rows of one matrix, bytes of a row.
        block_bytes: of the format.
        record_blocks, record_bytes: blocks of a record, its bytes.
        panel_bytes: bytes of a panel.
        n_planes, table: rows and address of `PanelLayout.table`.
        rows, panels: of all matrices.
    """

    next_panel: int
    first_panel: int
    n_panels: int
    n_out: int
    row_bytes: int
    block_bytes: int
    record_blocks: int
    record_bytes: int
    panel_bytes: int
    n_planes: int
    table: int
    rows: int
    panels: int


class PlaneJob(NamedTuple):
    """One plane of a format's records, as a row of `PanelLayout.table`.

    Attributes:
        start: of its bytes in a block of the file.
        n_units, unit_bytes: units of a block, and bytes that stay together.
        record_start: where it starts in a record.
        change: what happens to a unit (`shared/cpu/panel_layout.py`).
    """

    start: int
    n_units: int
    unit_bytes: int
    record_start: int
    change: int


PACK_ITEMS, MULTIPLY_ITEMS, MATRIX_ITEMS = (
    len(kind._fields) for kind in (PackJob, MultiplyJob, MatrixJob)
)


class NormJob(NamedTuple):
    """Rows to be normed.

    Attributes:
        next_row: the row to take next.
        n_rows, n: rows, and values of a row.
        x, out: [n_rows, n]; the same only for RMSNorm.
        weight, bias: [n]; the bias may be 0 for none.
        eps: one float32.
    """

    next_row: Item
    n_rows: Item
    n: Item
    x: Item
    weight: Item
    eps: Item
    out: Item
    bias: Item = 0


class GateJob(NamedTuple):
    """activation(gate) * up, in the place of `gate`; `n` values, a multiple of 16."""

    next_part: Item
    n: Item
    gate: Item
    up: Item


class ActivationJob(NamedTuple):
    """activation(x) in place of x, times `up` where the block is gated.

    Attributes:
        next_row: the row to take next.
        n_rows, n: rows, and values of one, a multiple of 16.
        x, up: [n_rows, n]; `up` is 0 without a gate.
        parameters: float32 [4], xIELU's as they are used (alpha_p, alpha_n, beta, eps) and,
            with sparsity, the number of standard deviations; or 0.
    """

    next_row: Item
    n_rows: Item
    n: Item
    x: Item
    up: Item = 0
    parameters: Item = 0


class ResidualJob(NamedTuple):
    """out = residual + scale * norm(x), row by row.

    Attributes:
        next_row: the row to take next.
        n_rows, n: rows, and values of one.
        x: [n_rows, n]; its rows are overwritten.
        weight, eps: of RMSNorm, or 0.
        scale: one float32.
        residual, out: [n_rows, n].
    """

    next_row: Item
    n_rows: Item
    n: Item
    x: Item
    weight: Item
    eps: Item
    scale: Item
    residual: Item
    out: Item


class SplitJob(NamedTuple):
    """q and its gate, which a product gives head by head, to places of their own.

    Attributes:
        next_row: the token to take next.
        n_rows, n_heads, head_dim: sizes; `head_dim` is a multiple of 16.
        both: [n_rows, n_heads, 2, head_dim].
        q, gate: [n_rows, n_heads, head_dim].
    """

    next_row: Item
    n_rows: Item
    n_heads: Item
    head_dim: Item
    both: Item
    q: Item
    gate: Item


class AttentionGateJob(NamedTuple):
    """Attention's output to be multiplied by the activation of a gate, in place.

    Attributes:
        next_row: the token to take next.
        n_rows, n_heads, head_dim: sizes; `head_dim` is a multiple of 16.
        x: [n_rows, n_heads, head_dim].
        gate: [n_rows, n_heads, head_dim], or [n_rows, n_heads] where `is_by_head`, before its
            activation.
        is_by_head: each head has one gate.
        is_softplus: the activation is softplus, not a sigmoid.
    """

    next_row: Item
    n_rows: Item
    n_heads: Item
    head_dim: Item
    x: Item
    gate: Item
    is_by_head: Item
    is_softplus: Item


class ClampJob(NamedTuple):
    """Values that become at least a bound's negative and at most the bound, in place.

    Attributes:
        next_piece: the piece to take next.
        n: values.
        x: [n].
        limit: one float32.
    """

    next_piece: Item
    n: Item
    x: Item
    limit: Item


class DecayJob(NamedTuple):
    """Decays by channel, in the place of what they are made of.

    Attributes:
        next_row: the token to take next.
        n_rows, n_heads, n: sizes; `n` channels of a head are a multiple of 16.
        x: [n_rows, n_heads, n], to which dt is added: exp(a softplus(x + dt)), or
            exp(least sigmoid(a (x + dt))).
        dt: [n_heads, n].
        a: [n_heads].
        least: one float32, or 0 for softplus.
    """

    next_row: Item
    n_rows: Item
    n_heads: Item
    n: Item
    x: Item
    dt: Item
    a: Item
    least: Item = 0


class SinkJob(NamedTuple):
    """Sums of attention to be shared with sinks, in place.

    Attributes:
        next_row: the token to take next.
        n_rows, n_heads, head_dim: sizes; `head_dim` is a multiple of 16.
        x: [n_rows, n_heads, head_dim].
        lse: [n_rows, n_heads], log-sum-exp of a head's logits.
        sinks: [n_heads], the logit of each head's sink.
    """

    next_row: Item
    n_rows: Item
    n_heads: Item
    head_dim: Item
    x: Item
    lse: Item
    sinks: Item


class MergeJob(NamedTuple):
    """Sums of attention over up to five segments to be merged, in the place of the first.

    Attributes:
        next_row: the token to take next.
        n_rows, n_heads, head_dim: sizes; `head_dim` is a multiple of 16.
        n_parts: of segments.
        sinks: [n_heads], the logit of each head's sink, or 0 for none.
        x0 to x4: [n_rows, n_heads, head_dim] of each segment.
        lse0 to lse4: [n_rows, n_heads], log-sum-exp of a head's logits in each segment.
    """

    next_row: Item
    n_rows: Item
    n_heads: Item
    head_dim: Item
    n_parts: Item
    sinks: Item
    x0: Item
    x1: Item
    x2: Item
    x3: Item
    x4: Item
    lse0: Item
    lse1: Item
    lse2: Item
    lse3: Item
    lse4: Item


MOST_PARTS = 5
"""Segments of a merge."""


class RopeJob(NamedTuple):
    """Heads to be normed and turned, in place.

    Attributes:
        next_token: the token to take next.
        n_tokens, n_heads, head_dim: sizes.
        x: [n_tokens, n_heads, head_dim].
        weight, eps: of a norm of each head, or 0.
        weight_stride: bytes from one head's weight to the next; 0 if all have one.
        centred: the mean is taken off first (LayerNorm).
        norm_last: the norm comes after RoPE.
        n_pairs: pairs of channels that are turned, or 0.
        neighbours: whether the channels of a pair are neighbours (`RopeSpec.interleaved`).
        cos, sin: [n_tokens, n_pairs], or 0.
    """

    next_token: Item
    n_tokens: Item
    n_heads: Item
    head_dim: Item
    x: Item
    weight: Item = 0
    eps: Item = 0
    n_pairs: Item = 0
    neighbours: Item = 0
    cos: Item = 0
    sin: Item = 0
    weight_stride: Item = 0
    centred: Item = 0
    norm_last: Item = 0


TOKENS_AT_ONCE = 64
"""Tokens whose activations a thread packs at a time; they and a head's matrix fit its cache."""


class HeadJob(NamedTuple):
    """Products of each head's matrix [n_out, n_in] with that head's rows.

    Attributes:
        next_piece, n_parts: the piece of work to take next, `n_parts` of each head.
        n_heads, n_tokens, n_in, n_out: sizes.
        x, x_head, x_token: float32, and bytes from head to head and from token to token.
        out, out_head, out_token: the same of results.
        data, matrix_bytes: matrices, and bytes of one.
        item_bytes, n_items: panels or rows of a matrix, bytes of one.
        n_records, n_blocks, panel_bytes: of a panel; 0 for rows.
        scratch, scratch_bytes: memory of the threads, and how much each has: a panel, then packed
            activations; 0 for rows.
    """

    next_piece: Item
    n_parts: Item
    n_heads: Item
    n_tokens: Item
    n_in: Item
    n_out: Item
    x: Item
    x_head: Item
    x_token: Item
    out: Item
    out_head: Item
    out_token: Item
    data: Item
    matrix_bytes: Item
    item_bytes: Item
    n_items: Item
    n_records: Item = 0
    n_blocks: Item = 0
    panel_bytes: Item = 0
    scratch: Item = 0
    scratch_bytes: Item = 0


class LateJob(NamedTuple):
    """A matrix, or a stack of them.

    Attributes:
        multiply: the worker that multiplies its panels.
        n_out, row_bytes: rows of one matrix, bytes of a row.
        block_bytes, record_blocks, record_bytes, panel_bytes, n_planes, table: as in `FillJob`.
        rows, panels: of all matrices.
        n_laid: panels that are made, from the first on.
    """

    multiply: int
    n_out: int
    row_bytes: int
    block_bytes: int
    record_blocks: int
    record_bytes: int
    panel_bytes: int
    n_planes: int
    table: int
    rows: int
    panels: int
    n_laid: int = 0


N_LAID = LateJob._fields.index("n_laid")

assert 8 * (MULTIPLY_ITEMS + MATRIX_ITEMS) <= PART_BYTES


class EmbeddingJob(NamedTuple):
    """A row of a matrix with panels, as float32 times a factor.

    Attributes:
        next_piece: unused, as there is one piece.
        n_in: values of the row.
        row_bytes, block_bytes, record_blocks, record_bytes, n_planes, table: as in `FillJob`.
        record_values: of a row in a record.
        row: the row, in the file.
        record: memory for a record of a panel.
        values: memory for its first row, float32 [record_values].
        scale: one float32, the factor.
        out: float32 [n_in].
    """

    next_piece: int
    n_in: int
    row_bytes: int
    block_bytes: int
    record_blocks: int
    record_bytes: int
    record_values: int
    n_planes: int
    table: int
    row: int
    record: int
    values: int
    scale: int
    out: int


class RecordJob(NamedTuple):
    """What `lay_panel` reads of a job, for a record alone: `row_bytes` are a row's in it."""

    row_bytes: int
    block_bytes: int
    record_blocks: int
    record_bytes: int
    n_planes: int
    table: int


class GuessJob(NamedTuple):
    """What is known of the tokens, from one to the next. Addresses are int64, too.

    Attributes:
        next_piece: unused, as there is one piece.
        is_over: whether no further token is to be evaluated.
        n_evaluated: tokens that were.
        n_given, given: the tokens at the start, int64 [n_given]; the first is prepared.
        n_guessed, most: tokens that were guessed, and how many may be.
        n_vocab: tokens that are guessed.
        logits: float32 [n_vocab] after the last one.
        tokens, probabilities: int64 and float32 [most], the guesses.
        likely: one float32, the chance that all of them are right.
        p_min: one float32.
        n_bounds, bounds, chances, least: as `Guessing` has them, float32.
        row_worker, row_job: decode a row of the embedding (`EmbeddingJob`).
        row_item: address of the item that names the row.
        first_row, row_bytes: of the embedding.
        n_grow, grow: items that are one more for each token: their addresses, int64 [n_grow].
        n_clear, clear: memory that is 0 for each token: int64 [n_clear, 2], addresses and words.
        n_turns, turns: rotations: int64 [n_turns, 3], where they go, where the last token's
            are, and how many floats.
    """

    next_piece: int
    is_over: int
    n_evaluated: int
    n_given: int
    given: int
    n_guessed: int
    most: int
    n_vocab: int
    logits: int
    tokens: int
    probabilities: int
    likely: int
    p_min: int
    n_bounds: int
    bounds: int
    chances: int
    least: int
    row_worker: int
    row_job: int
    row_item: int
    first_row: int
    row_bytes: int
    n_grow: int
    grow: int
    n_clear: int
    clear: int
    n_turns: int
    turns: int


IS_OVER, N_EVALUATED, N_GUESSED = (
    GuessJob._fields.index(name) for name in ("is_over", "n_evaluated", "n_guessed")
)


class LatentRowsJob(NamedTuple):
    """Rows of a latent and a rotated part become two: the latent normed, the other turned.

    Attributes:
        next_row: the row to take next.
        n_rows, latent_dim, rope_dim: sizes.
        x: [n_rows, latent_dim + rope_dim].
        weight, eps: of RMSNorm.
        latent, rotated: [n_rows, latent_dim] and [n_rows, rope_dim].
        n_pairs, neighbours, cos, sin: as in `RopeJob`; 0 pairs are not turned.
    """

    next_row: Item
    n_rows: Item
    latent_dim: Item
    rope_dim: Item
    x: Item
    weight: Item
    eps: Item
    latent: Item
    rotated: Item
    n_pairs: Item = 0
    neighbours: Item = 0
    cos: Item = 0
    sin: Item = 0


class LatentQueriesJob(NamedTuple):
    """Heads of q: scaled, and their rotated parts turned, in places of their own.

    Attributes:
        next_row: the token to take next.
        n_rows, n_heads, nope_dim, rope_dim: sizes.
        x: [n_rows, n_heads, nope_dim + rope_dim]; scaled in place.
        rotated: [n_rows, n_heads, rope_dim].
        scale: [n_rows], or 0.
        n_pairs, neighbours, cos, sin: as in `RopeJob`; 0 pairs are not turned.
    """

    next_row: Item
    n_rows: Item
    n_heads: Item
    nope_dim: Item
    rope_dim: Item
    x: Item
    rotated: Item
    scale: Item = 0
    n_pairs: Item = 0
    neighbours: Item = 0
    cos: Item = 0
    sin: Item = 0
