"""q2_1: 2-bit codes, a scale and a minimum, `x = d q + m`."""
