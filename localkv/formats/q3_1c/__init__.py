"""q3_1c: 3-bit codes, a scale and a minimum per channel of 32 tokens, `x = d q + m`."""
