"""q6_K: 6-bit codes, 16 groups of 16, `x = d scale (q - 32)` (ggml's `block_q6_K`)."""
