"""q4_1: 4-bit codes, a scale and a minimum, `x = d q + m` (ggml's `block_q4_1`)."""
