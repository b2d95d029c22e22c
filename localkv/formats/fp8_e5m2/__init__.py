"""fp8_e5m2: 5 bits of exponent, 2 of mantissa (OCP's OFP8 E5M2)."""
