"""fp8_e4m3_token: fp8_e4m3 with a scale per row, `x = d * value`."""
