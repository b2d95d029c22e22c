"""q4_1c: 4-bit codes, a scale and a minimum per channel of 32 tokens, `x = d q + m`."""
