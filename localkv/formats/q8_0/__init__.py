"""q8_0: 32 signed bytes and a scale, `x = d q` (ggml's `block_q8_0`, `dequantize_row_q8_0`)."""
