"""What the CPU backend takes in memory: panels of weights, packed activations, threads' scratch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from localkv.kernels.cpu.attention.jobs import most_latent_floats
from localkv.kernels.cpu.attention.sizes import (
    FEW_ROWS,
    MOST_TILE_ROWS,
    block_scratch,
    launch_parts,
    most_run_block_floats,
    part_result,
    row_scratch,
)
from localkv.kernels.cpu.linear.jobs import (
    BFLOAT_BLOCK_BYTES,
    IN_PLACE_FORMAT_NAMES,
    MADE_BYTES,
    PANEL_FORMAT_NAMES,
    PART_BYTES,
    ROUNDED_ROW_NAMES,
    ROUNDED_ROWS,
    bfloat_blocks,
    panels_bytes,
)
from localkv.kernels.footprint import FLOAT, HeadSizes, Matrix, copied_vector_bytes
from localkv.quant_formats.base import QuantFormat
from localkv.quant_formats.shared.cpu.panel_layout import LANES

PACKED_BYTES = 4.25
"""Per value of a product's left side when it is packed: float32 and two sums per 32 values."""
MOST_DECODE_ROWS = 8
"""Rows of attention that decode kernels hold in registers at once, where there are most."""


def is_of_host() -> bool:
    return True


def _in_panels(fmt: QuantFormat) -> bool:
    """Whether a matrix is multiplied in panels."""
    return fmt.name in PANEL_FORMAT_NAMES


def _has_byte_dots() -> bool:
    from localkv.simd.cpu_features import HAS_BYTE_DOTS  # LLVM is not loaded for most plans

    return HAS_BYTE_DOTS


def _is_laid_out(fmt: QuantFormat) -> bool:
    """Whether its panels are made when it is loaded, so that its rows need no memory."""
    in_place = fmt.name in IN_PLACE_FORMAT_NAMES and _has_byte_dots()
    return _in_panels(fmt) and not in_place


def rounds_activations(fmt: QuantFormat) -> bool:
    """To 8 bits beside panels where CPUs multiply bytes, to BF16 where they multiply that."""
    return (_in_panels(fmt) and _has_byte_dots()) or fmt.name in ROUNDED_ROWS


def copied_bytes(fmt: QuantFormat, shape: Sequence[int], *, is_looked_up: bool) -> int:
    """Panels; an embedding that is only read by row has none."""
    if len(shape) == 1:
        return copied_vector_bytes(fmt, shape)
    return panels_bytes(fmt, shape) if _is_laid_out(fmt) and not is_looked_up else 0


def product_bytes(
    matrices: Iterable[Matrix], *, n_tokens: int, widest: int, n_threads: int
) -> float:
    """Packed activations, and panels that threads make on the way; rows are read as they are."""
    matrices = list(matrices)
    in_panels = [matrix for matrix in matrices if _in_panels(matrix.format)]
    packed = PACKED_BYTES * widest * n_tokens if in_panels else 0
    if any(matrix.format.name in ROUNDED_ROW_NAMES for matrix in matrices):
        packed += BFLOAT_BLOCK_BYTES * bfloat_blocks(widest) * n_tokens
    made = [panels_bytes(matrix.format, (LANES, matrix.n_in)) for matrix in in_panels]
    return packed + (n_threads * (max(MADE_BYTES, *made) + PART_BYTES) if made else 0)


def attention_bytes(heads: HeadSizes, *, n_ctx: int, n_tokens: int, n_threads: int) -> int:
    """The scratch memory of `attention/packed_attention.py` and `latent_attention.py`, whatever the
    batch."""
    if heads.rope_dim:
        return FLOAT * most_latent_floats(
            heads.n_heads, heads.head_dim - heads.rope_dim, heads.rope_dim, n_threads
        )
    d, n_kv_heads = heads.head_dim, heads.n_kv_heads
    most = MOST_DECODE_ROWS
    n_rows = -(-max(FEW_ROWS, heads.n_heads // n_kv_heads) // most) * most
    per_thread = max(block_scratch(MOST_TILE_ROWS, d).end, row_scratch(n_rows, most, d).end)
    few = n_threads * per_thread + launch_parts(n_kv_heads) * part_result(n_rows, d).end
    return FLOAT * max(few, n_threads * most_run_block_floats(d))
