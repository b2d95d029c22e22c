"""q8_0c: signed bytes and a scale per channel of 32 tokens, `x = d q`."""
