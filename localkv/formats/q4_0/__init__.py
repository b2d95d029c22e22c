"""q4_0: 4-bit codes and a scale, `x = d (q - 8)` (ggml's `block_q4_0`)."""
