"""iq4_xs: iq4_nl's codebook, 8 groups of 32, `x = d (scale - 32) codebook[q]` (`block_iq4_xs`)."""
