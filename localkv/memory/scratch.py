"""The memory of a batch besides weights and cache: an upper bound, from the model's sizes alone.

Activations are float32. At every moment there are those that the forward pass keeps (x, q and the
attention's output) and those of one operation; the widest operation counts, with every array
that is held at its peak. Added to these are the memory of the backend's products and
attention (`kernels/footprint.py`), and the logits of one token with sampling's copies of them.
Code, libraries and Python itself are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from localkv.arch.spec import (
    AttentionSpec,
    DeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    Mixer,
    ModelSpec,
    MoeSpec,
    ShortConvSpec,
)
from localkv.cache.layout import PAGE_TOKENS, GroupLayout
from localkv.kernels.footprint import ALLOCATOR, FLOAT, Footprint, HeadSizes, Matrix

PACKED = 1.0625
"""Values that a packed one takes at most: float32, and two sums for 32."""
VOCABULARY_BYTES = 64
"""Per token of the vocabulary: logits, and the sampler's ids, keys and probabilities."""
INDEX_BYTES = 64
"""Per token of a batch: its id, position, slots, and the like, int64 each."""
REPACK_BYTES = 20
"""Per value of a page of one layer that changes its types: float32, rotated and not, both packed
forms, and what references of formats hold meanwhile. The most of any step was 19.4."""


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
    width = _with_streams(config, width)
    activations = n_tokens * (FLOAT * width + INDEX_BYTES)
    products = footprint.product_bytes(
        matrices, n_tokens=n_tokens, widest=widest, n_threads=n_threads
    )
    attention = max(
        (
            footprint.attention_bytes(sizes, n_ctx=n_ctx, n_tokens=n_tokens, n_threads=n_threads)
            for sizes in filter(None, {_head_sizes(layer.mixer) for layer in config.kinds})
        ),
        default=0,
    )
    return int(ALLOCATOR * (activations + products)) + attention + VOCABULARY_BYTES * config.n_vocab


def repack_bytes(layouts: Iterable[GroupLayout]) -> int:
    """Bytes that pages of a cache with a budget take at most while they change their types, one
    layer after the other."""
    return sum(
        REPACK_BYTES * PAGE_TOKENS * group.n_kv_heads * (group.key_dim + group.value_dim)
        for group in (layout.group for layout in layouts if layout.budget is not None)
    )


def _with_streams(config: ModelSpec, width: int) -> int:
    """Values per token with those that are kept besides x: `width` counts one layer's."""
    n_embd = config.n_embd
    if config.per_layer_input is not None:
        rows = config.n_layers * config.per_layer_input.width
        # a row for each layer is kept; before, it is decoded, projected, normed and added
        width = max(rows + width, n_embd + 4 * rows)
    if config.altup is not None:
        # what was, what is predicted or corrected, and one more in between; Laurel's two rows
        width += (3 * config.altup.n_streams + 2) * n_embd
    return width


def _head_sizes(mixer: Mixer | None) -> HeadSizes | None:
    """Heads as attention's kernels see them; None without attention."""
    match mixer:
        case AttentionSpec():
            width = max(mixer.key_dim, mixer.value_dim)
            return HeadSizes(mixer.n_heads, mixer.n_kv_heads, width)
        case LatentAttentionSpec():
            width = mixer.latent_dim + mixer.rope_dim
            return HeadSizes(mixer.n_heads, 1, width, mixer.rope_dim)
    return None


def q_width(layer: LayerSpec) -> int:
    """Values per token of q, with its gate, or of attention's output; of a recurrent mixer those
    of what its first product gives."""
    match layer.mixer:
        case DeltaNetSpec() as mixer:
            return 2 * (mixer.n_key_heads + mixer.n_value_heads) * mixer.head_dim
        case ShortConvSpec() as mixer:
            return 3 * mixer.width
        case Mamba2Spec() as mixer:
            return 2 * mixer.width + 2 * mixer.n_groups * mixer.state_dim + mixer.n_heads
    sizes = _head_sizes(layer.mixer)
    if sizes is None:
        return 0
    gated = isinstance(layer.mixer, AttentionSpec) and layer.mixer.gated
    return sizes.n_heads * sizes.head_dim * (2 if gated else 1)


def _expert_width(n_embd: int, layer: LayerSpec, moe: MoeSpec) -> int:
    """Values per token where experts are steps of a chain, whose memory is one piece.

    For each expert of a token there are its input and its output, gate and up, and what of these is
    packed for products, which takes as many bytes as float32 at most, and sums.
    """
    n_dense = moe.n_ff_shared + (layer.mlp.n_ff if layer.mlp is not None else 0)
    by_pair = (1 + PACKED) * n_embd + (2 + PACKED) * moe.n_ff
    # x, its norms, the router's logits, what dense blocks give, and the sum
    by_token = 8 * n_embd + 2 * moe.n_experts + (2 + PACKED) * n_dense
    return int((moe.n_experts_used * by_pair + by_token) / ALLOCATOR) + 2 * q_width(layer)


def activation_width(n_embd: int, layer: LayerSpec) -> int:
    """Values per token that activations of a layer hold at their peak."""
    if layer.beside is not None:  # the first one's output is kept
        second = replace(layer, mixer=layer.beside, beside=None)
        first = replace(layer, beside=None)
        widths = (activation_width(n_embd, one) for one in (first, second))
        return max(widths) + q_width(first)
    x, q = n_embd, q_width(layer)
    sizes = _head_sizes(layer.mixer)
    kv = sizes.n_kv_heads * sizes.head_dim if sizes else 0
    rope = sizes.head_dim if sizes else 0
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
        feed_forward = max(feed_forward, _expert_width(n_embd, layer, layer.moe))
    if layer.parallel or layer.post_attn_norm is not None or layer.post_ffn_norm is not None:
        feed_forward += 2 * x  # the layer's input, what a block adds before its norm
    return rope + max(store, turn, attend, feed_forward)
