"""q5_K: 5-bit codes, 8 groups of 32, `x = d scale q - dmin min` (ggml's `block_q5_K`)."""
