"""nvfp4: 4-bit floats, a scale for each 16, `x = scale[d] twice[q]` (ggml's `block_nvfp4`)."""
