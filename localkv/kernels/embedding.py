"""Embedding lookup: rows of a packed matrix, decoded."""

from __future__ import annotations

import torch
from torch import Tensor

from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.torch_codec import decoded


def embed(token_ids: Tensor, token_embd: PackedTensor, dtype: torch.dtype) -> Tensor:
    """Rows `token_ids` (int64 [tokens]) of `token_embd` [n_vocab, n_embd], as `dtype`."""
    return decoded(token_embd[token_ids], dtype)
