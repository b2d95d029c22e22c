"""iq1_m: points of a ternary grid, 16 groups of 16, `x = d (2 s + 1) (grid[q] +- 1/8)`."""
