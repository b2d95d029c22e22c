"""q2_K: 2-bit codes, 16 groups of 16, `x = d scale q - dmin min` (ggml's `block_q2_K`)."""
