"""fp8_e4m3: 4 bits of exponent, 3 of mantissa, no infinities (OCP's OFP8 E4M3)."""
