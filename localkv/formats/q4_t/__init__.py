"""q4_t: 4-bit codes with a scale and a minimum for each token and KV head, `x = d q + m`."""
