"""q3_K: 3-bit codes, 16 groups of 16, `x = d (scale - 32) (q - 4)` (ggml's `block_q3_K`)."""
