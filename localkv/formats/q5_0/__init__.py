"""q5_0: 5-bit codes and a scale, `x = d (q - 16)` (ggml's `block_q5_0`)."""
