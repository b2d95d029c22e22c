"""The memory of a batch besides weights and cache: an upper bound, from the model's sizes alone.

Activations are float32. At every moment there are those that the forward pass keeps (x, q and the
attention's output) and those of one operation; the widest operation counts, with every array
that is held at its peak. Added to these are the memory of the backend's products and
attention (`kernels/footprint.py`), and the logits of one token with sampling's copies of them.
Code, libraries and Python itself are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from localkv.arch.spec import LayerSpec, ModelSpec
from localkv.kernels.footprint import ALLOCATOR, FLOAT, Footprint, HeadSizes, Matrix

VOCABULARY_BYTES = 64
"""Per token of the vocabulary: logits, and the sampler's ids, keys and probabilities."""
INDEX_BYTES = 64
"""Per token of a batch: its id, position, slots, and the like, int64 each."""


def scratch_bytes(
    config: ModelSpec,
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
    widths = [q_width(layer) for layer in config.kinds] + [layer.n_ff for layer in config.kinds]
    widest = max(config.n_embd, *widths)
    width = max(activation_width(config.n_embd, layer) for layer in config.kinds)
    activations = n_tokens * (FLOAT * width + INDEX_BYTES)
    products = footprint.product_bytes(
        matrices, n_tokens=n_tokens, widest=widest, n_threads=n_threads
    )
    heads = {
        HeadSizes(spec.n_heads, spec.n_kv_heads, max(spec.key_dim, spec.value_dim))
        for spec in (layer.attention for layer in config.kinds)
    }
    attention = max(
        footprint.attention_bytes(sizes, n_ctx=n_ctx, n_tokens=n_tokens, n_threads=n_threads)
        for sizes in heads
    )
    return int(ALLOCATOR * (activations + products)) + attention + VOCABULARY_BYTES * config.n_vocab


def q_width(layer: LayerSpec) -> int:
    """Values of q, or of attention's output, per token."""
    spec = layer.attention
    return spec.n_heads * max(spec.key_dim, spec.value_dim)


def activation_width(n_embd: int, layer: LayerSpec) -> int:
    """Values per token that activations of a layer hold at their peak."""
    x, q = n_embd, q_width(layer)
    kv = layer.attention.n_kv_heads * max(layer.attention.key_dim, layer.attention.value_dim)
    rope = layer.attention.key_dim
    # x and its norm, q; k and v, both rotated, and the scratch of encoding one of them
    store = 2 * x + q + 4 * kv + 8 * kv
    # x and its norm, q before, while and after it is turned, k and v
    turn = 2 * x + 4 * q + 2 * kv
    # x; q, and either q rotated or the output, while a Hadamard transform holds three of its kind
    attend = x + 6 * q
    # x, q and the output of attention are kept; the norm, gate, up, their product, down, the sum
    feed_forward = 2 * x + 2 * q + 4 * layer.n_ff + 2 * x
    if layer.moe is not None:
        feed_forward += 3 * x  # the experts' sum, the rows of one expert, its weighted output
    if layer.parallel or layer.post_attn_norm is not None or layer.post_ffn_norm is not None:
        feed_forward += 2 * x  # the layer's input, what a block adds before its norm
    return rope + max(store, turn, attend, feed_forward)
