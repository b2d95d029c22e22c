"""What the workers of products of each head's matrix get: an array of int64, read as a named tuple.

Where a chain makes a job (`linear/head_products.py`) an item may also name memory; workers find its
address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from localkv.kernels.cpu.runtime.chain import Item

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
