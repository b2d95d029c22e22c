"""tq2_0: ternary in 2 bits each, 256 with one scale, `x = d (q - 1)` (ggml's `block_tq2_0`)."""
