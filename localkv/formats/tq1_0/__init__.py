"""tq1_0: five ternary values a byte, 256 with one scale, `x = d (q - 1)` (`block_tq1_0`)."""
