"""iq2_xs: points of a grid with signs, 16 groups of 16, `x = d (2 s + 1) / 8 grid[q]`."""
