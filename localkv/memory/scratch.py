"""What a batch takes besides weights and cache: an upper bound, from the model's sizes alone.

Activations are float32. At every moment there are those that the forward pass keeps (x, q and the
attention's output) and those of one operation; the widest operation counts, with every tensor that
torch holds at its peak. To these come the packed activations of a product, a decoded tile of a
weight, the threads' scratch of attention, and the logits of one token with what sampling makes of
them. Code, libraries and what Python itself takes are not counted.

Tensors come and go in several sizes, and malloc keeps what was freed, so the process grows by more
than is in use at once: by up to twice as much, measured with glibc. `ALLOCATOR` stands for that.
"""

from __future__ import annotations

from localkv.config import ModelConfig
from localkv.formats.base import TILE_VALUES
from localkv.kernels.cpu.attention.sizes import (
    FEW_ROWS,
    block_scratch_floats,
    most_parts,
    partial_floats,
    row_scratch_floats,
)
from localkv.kernels.cpu.linear.panel_bytes import MADE_BYTES

FLOAT = 4
ALLOCATOR = 2.0
"""Bytes that the process grows by for each byte of tensors in use at the peak."""
ACTIVATION_BYTES = 4.125
"""Per value of a product's left side when it is packed: float32 and a sum per 32 values."""
TILE_BYTES = 12
"""Per value of a tile: codes, float32, and one step between."""
MAX_TILE_ROWS = 8
"""Rows of attention that decode kernels hold in registers at once, where there are most."""
GPU_FEW_TOKENS, GPU_MOST_SPLITS = 8, 64
"""New tokens of a sequence up to which a GPU splits the context, and the most pieces."""
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
    backend: str,
    packs_activations: bool,
    largest_decoded: int,
    largest_made_panel: int,
) -> int:
    """Bytes that a batch takes at most.

    Args:
        n_ctx: tokens of context; a batch is no longer.
        n_batch: most tokens evaluated at a time.
        n_threads: threads of the CPU's kernels.
        backend: its name; the reference decodes the whole cache of a layer.
        packs_activations: some matrix is multiplied with activations in 8 bits, or in blocks.
        largest_decoded: values of the largest matrix that is decoded for a product, 0 without one.
        largest_made_panel: bytes of the largest panel that is made for a product, 0 without one.
    """
    n_tokens = min(n_batch, n_ctx)
    widest = max(config.n_embd, config.n_heads * config.head_dim, _ffn_width(config))
    per_token: float = FLOAT * activation_width(config) + INDEX_BYTES
    if packs_activations:
        per_token += ACTIVATION_BYTES * widest
    if largest_decoded:
        per_token += FLOAT * widest  # what a tile's product is before it is put in its place
    tile = TILE_BYTES * min(TILE_VALUES, largest_decoded)
    if backend == "reference":
        attention = _reference_attention_bytes(config, n_ctx, n_tokens)
    elif backend == "cuda":
        attention = _gpu_attention_bytes(config)
    else:
        attention = cpu_attention_bytes(config, n_threads)
    logits = VOCABULARY_BYTES * config.n_vocab
    panels = n_threads * max(MADE_BYTES, largest_made_panel) if largest_made_panel else 0
    return int(ALLOCATOR * (n_tokens * per_token + tile + panels)) + attention + logits


def _ffn_width(config: ModelConfig) -> int:
    moe = config.moe
    return config.n_ff if moe is None else max(moe.n_ff, moe.n_ff_shared)


def activation_width(config: ModelConfig) -> int:
    """Values per token that activations hold at their peak."""
    x, q = config.n_embd, config.n_heads * config.head_dim
    kv = config.n_kv_heads * config.head_dim
    rope = config.head_dim
    # x and its norm, q; k and v, both rotated, and what encoding one of them takes
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


def _gpu_attention_bytes(config: ModelConfig) -> int:
    """Outputs and sums that the splits of a context leave to be merged."""
    return FLOAT * GPU_FEW_TOKENS * config.n_heads * GPU_MOST_SPLITS * (config.head_dim + 1)


def cpu_attention_bytes(config: ModelConfig, n_threads: int) -> int:
    """As `kernels/cpu/attention/packed_attention.py` takes scratch memory, whatever the batch."""
    d, n_kv_heads = config.head_dim, config.n_kv_heads
    most = MAX_TILE_ROWS
    n_rows = -(-max(FEW_ROWS, config.n_heads // n_kv_heads) // most) * most
    per_thread = max(block_scratch_floats(d), row_scratch_floats(n_rows, most, d))
    return FLOAT * (n_threads * per_thread + partial_floats(most_parts(n_kv_heads), n_rows, d))


def _reference_attention_bytes(config: ModelConfig, n_ctx: int, n_tokens: int) -> int:
    """K and V of one layer, one of them in three steps, and the logits, masked and as weights."""
    kv_values = n_ctx * config.n_kv_heads * config.head_dim
    logit_values = n_ctx * config.n_heads * n_tokens
    return int(ALLOCATOR * FLOAT * (4 * kv_values + 3 * logit_values))
