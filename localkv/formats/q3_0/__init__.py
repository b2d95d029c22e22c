"""q3_0: 3-bit codes and a scale, `x = d (q - 4)`."""
