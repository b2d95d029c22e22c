"""q5_1: 5-bit codes, a scale and a minimum, `x = d q + m` (ggml's `block_q5_1`)."""
