"""iq3_s: points of a grid with signs, 8 groups of 32, `x = d (2 s + 1) grid[q]` (`block_iq3_s`)."""
