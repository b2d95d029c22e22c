"""mxfp4: 4-bit floats and a power of two, `x = 2^(e - 128) twice[q]` (ggml's `block_mxfp4`)."""
