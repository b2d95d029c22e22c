"""q2_0: 2-bit codes and a scale, `x = d (2 q - 3)`."""
