"""Embedding lookup: rows of a packed matrix, decoded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.kernels.bounds import check_array
from localkv.kernels.gpu.launch import launch
from localkv.kernels.gpu.products.products import planes_of
from localkv.kernels.gpu.products.tile import part_columns, scaled_codes
from localkv.kernels.gpu.products.tile_sizes import gpu_of
from localkv.quant_formats.packed_tensor import PackedTensor

WIDTH = 2048
"""Values that a program decodes: for each thread of its warp a unit of the types with a table."""


@triton.jit
def embed_kernel(
    ids_ptr, planes, out_ptr, n,
    READ: tl.constexpr, UNIT: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, tiles of a row).

    A recorded step is repeated before the host sees that no token could be drawn, which is shown by
    an id of -1: then it reads row 0.
    """
    token = tl.program_id(0).to(tl.int64)
    row = tl.maximum(tl.load(ids_ptr + token + tl.arange(0, 1)), 0)
    row = row if WIDE else row.to(tl.int32)
    first = tl.program_id(1) * VALUES
    parts = READ(planes, row, first, n, VALUES, False, PTX)
    for p in tl.static_range(len(parts)):
        y = scaled_codes(parts[p])
        column = part_columns(first, p, len(parts), UNIT, VALUES // UNIT)
        tl.store(out_ptr + token * n + column[None, :, :], y, mask=(column < n)[None, :, :])


def embed(token_ids: Tensor, token_embd: PackedTensor) -> Tensor:
    """Rows `token_ids` (int64 [tokens]) of `token_embd` [n_vocab, n_embd], as float32."""
    table = planes_of(token_embd)
    n = table.shape[-1]
    n_tokens = token_ids.shape[0]
    check_array("token ids", token_ids, "int64", n_tokens)
    out = torch.empty(n_tokens, n, dtype=torch.float32, device=token_ids.device)
    launch(
        embed_kernel,
        (n_tokens, triton.cdiv(n, WIDTH)),
        token_ids,
        table.operands,
        out,
        n,
        READ=table.layout.read,
        UNIT=table.layout.unit,
        VALUES=WIDTH,
        WIDE=table.needs_wide_index,
        PTX=gpu_of(token_ids.device).ptx,
        num_warps=1,
    )
    return out
