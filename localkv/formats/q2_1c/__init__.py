"""q2_1c: 2-bit codes, a scale and a minimum per channel of 32 tokens, `x = d q + m`."""
