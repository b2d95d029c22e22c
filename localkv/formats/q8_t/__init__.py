"""q8_t: signed bytes with a scale for each token and KV head, `x = d q`."""
