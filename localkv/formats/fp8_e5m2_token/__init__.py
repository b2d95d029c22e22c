"""fp8_e5m2_token: fp8_e5m2 with a scale per row, `x = d * value`."""
