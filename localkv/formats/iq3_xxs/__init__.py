"""iq3_xxs: points of a grid with signs, 8 groups of 32, `x = d (2 s + 1) / 4 grid[q]`."""
