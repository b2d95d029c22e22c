"""q3_1: 3-bit codes, a scale and a minimum, `x = d q + m`."""
