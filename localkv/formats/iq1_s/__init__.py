"""iq1_s: points of a ternary grid, 8 groups of 32, `x = d (2 s + 1) (grid[q] +- 1/8)`."""
