"""Bytes that a test has to move between memory and the processor, at least.

Each matrix is read once per batch, and so is each row of K and V that its tokens see, packed or in
the tail, and each page table by each layer; a new row is written once, or twice if it is in a tail
as well. Activations are left out: they stay in the processor's caches. So a figure is that
of a program that never reads anything twice, and its share of the bandwidth says how much could
still be gained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localkv.bench.grid import BenchTest
from localkv.cache.layout import GroupLayout, bytes_of, pages_for, read_rows, written_rows
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.layer_weights import tensors_of
from localkv.model import Transformer

PAGE_ENTRY = 8
"""Bytes of a page's number in a page table."""
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps")


def weight_bytes(model: Transformer, n_tokens: int) -> float:
    """Bytes of weights that a batch of `n_tokens` reads for the logits of its last token.

    Of routed experts those count that tokens are expected to be sent to if every expert is as
    likely: E (1 - (1 - k / E)^n) of E, with k for each of n tokens.
    """
    weights = model.weights
    embedding = weights.token_embd
    total: float = n_tokens * embedding.format.row_bytes(embedding.shape[-1])
    total += _bytes(weights.output) + _bytes(weights.output_norm) + _bytes(weights.altup)
    if (per_layer := weights.per_layer) is not None:
        rows = per_layer.token_embd
        total += n_tokens * rows.format.row_bytes(rows.shape[-1])
        total += _bytes(per_layer.model_proj) + _bytes(per_layer.proj_norm)
    for spec, layer in zip(model.config.layers, weights.layers, strict=True):
        total += _bytes(layer)
        if (moe := spec.moe) is not None:
            unused = (1 - moe.n_experts_used / moe.n_experts) ** n_tokens
            total -= unused * sum(_bytes(getattr(layer.moe, name)) for name in _EXPERTS)
    return total


def bytes_per_token(
    model: Transformer, layouts: Sequence[GroupLayout], test: BenchTest, n_batch: int
) -> float:
    """Bytes that are moved for each token of a test, on average.

    Args:
        layouts: of the cache.
        n_batch: most tokens evaluated at a time.
    """
    total = 0.0
    for start in range(0, test.n_prompt, n_batch):
        n = min(n_batch, test.n_prompt - start)
        total += weight_bytes(model, n) + _row_bytes(layouts, test.n_depth + start, n)
    if n := test.n_gen:
        total += n * weight_bytes(model, 1)
        first = test.n_before_gen
        total += sum(_row_bytes(layouts, at, 1) for at in range(first, first + n))
    return total / test.n_tokens


def _row_bytes(layouts: Sequence[GroupLayout], n_before: int, n_new: int) -> int:
    """Bytes of rows of K and V that new tokens read, their own included, and write; and of page
    tables."""
    total = 0
    for layout in layouts:
        read = read_rows(layout, n_before, n_new)
        total += bytes_of(layout, read) + bytes_of(layout, written_rows(layout, n_before, n_new))
        total += PAGE_ENTRY * len(layout.group.layers) * sum(pages_for(n) for n in read)
    return total


def _bytes(part: Any) -> int:
    """Bytes of all tensors in a part of the weights, as they lie in memory."""
    return sum(
        tensor.n_bytes if isinstance(tensor, PackedTensor) else tensor.nbytes
        for tensor in tensors_of(part)
    )
