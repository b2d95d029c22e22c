"""What the workers of the CPU's products get: arrays of int64, read as named tuples.

Where a job is made (`linear/products.py`) an item may also name memory; workers find its address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from localkv.kernels.cpu.linear.panel_bytes import IN_PLACE_FORMAT_NAMES, ROUNDED_ROW_NAMES
from localkv.quant_formats.shared.cpu.panel_layout import BLOCK
from localkv.simd.cpu_features import HAS_AVX512, HAS_BFLOAT_DOTS, HAS_BYTE_DOTS

if TYPE_CHECKING:
    from localkv.kernels.cpu.runtime.chain import Item

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
"""Of a token's activations in BF16, for `BLOCK` columns."""

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
        packed: of all tokens (see `linear/packing.py`).
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
        group, panels: panels that a thread makes on the way at a time, and memory for those of all
            threads; 0 where none are made.
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
        rows, panels: those of all matrices.
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
