"""iq4_nl: 4-bit codes of a codebook and a scale, `x = d codebook[q]` (ggml's `block_iq4_nl`)."""
