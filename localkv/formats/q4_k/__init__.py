"""q4_K: 4-bit codes, 8 groups of 32, `x = d scale q - dmin min` (ggml's `block_q4_K`)."""
