"""iq2_xxs: points of a grid with signs, 8 groups of 32, `x = d (2 s + 1) / 8 grid[q]`."""
