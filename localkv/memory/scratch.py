"""The memory of a batch besides weights and cache: an upper bound, from the model's sizes alone.

Activations are float32. At every moment there are those that the forward pass keeps (x, q and the
attention's output) and those of one operation; the widest operation counts, with every tensor that
torch holds at its peak. Added to these are the memory of the backend's products and
attention (`kernels/footprint.py`), and the logits of one token with sampling's copies of them.
Code, libraries and Python itself are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from localkv.config import ModelConfig
from localkv.kernels.footprint import ALLOCATOR, FLOAT, Footprint, HeadSizes, Matrix

VOCABULARY_BYTES = 64
"""Per token of the vocabulary: logits, and the sampler's ids, keys and probabilities."""
INDEX_BYTES = 64
"""Per token of a batch: its id, position, slots, and the like, int64 each."""


def scratch_bytes(
    config: ModelConfig,
    *,
    n_ctx: int,
    n_batch: int,
    n_threads: int,
    footprint: Footprint,
    matrices: Iterable[Matrix],
) -> int:
    """Bytes that a batch takes at most.

    Args:
        n_ctx: tokens of context; a batch is no longer.
        n_batch: most tokens evaluated at a time.
        n_threads: threads of the CPU's kernels.
        footprint: the backend's.
        matrices: the model's weights.
    """
    n_tokens = min(n_batch, n_ctx)
    widest = max(config.n_embd, config.n_heads * config.head_dim, _ffn_width(config))
    activations = n_tokens * (FLOAT * activation_width(config) + INDEX_BYTES)
    products = footprint.product_bytes(
        matrices, n_tokens=n_tokens, widest=widest, n_threads=n_threads
    )
    heads = HeadSizes(config.n_heads, config.n_kv_heads, config.head_dim)
    attention = footprint.attention_bytes(
        heads, n_ctx=n_ctx, n_tokens=n_tokens, n_threads=n_threads
    )
    return int(ALLOCATOR * (activations + products)) + attention + VOCABULARY_BYTES * config.n_vocab


def _ffn_width(config: ModelConfig) -> int:
    moe = config.moe
    return config.n_ff if moe is None else max(moe.n_ff, moe.n_ff_shared)


def activation_width(config: ModelConfig) -> int:
    """Values per token that activations hold at their peak."""
    x, q = config.n_embd, config.n_heads * config.head_dim
    kv = config.n_kv_heads * config.head_dim
    rope = config.head_dim
    # x and its norm, q; k and v, both rotated, and the scratch of encoding one of them
    store = 2 * x + q + 4 * kv + 8 * kv
    # x and its norm, q before, while and after it is turned, k and v
    turn = 2 * x + 4 * q + 2 * kv
    # x; q, and either q rotated or the output, while a Hadamard transform holds three of its kind
    attend = x + 6 * q
    # x, q and the output of attention are kept; the norm, gate, up, their product, down, the sum
    feed_forward = 2 * x + 2 * q + 4 * _ffn_width(config) + 2 * x
    if config.moe is not None:
        feed_forward += 3 * x  # the experts' sum, the rows of one expert, its weighted output
    return rope + max(store, turn, attend, feed_forward)
