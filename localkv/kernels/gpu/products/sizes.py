"""How many tokens are many for a GPU's products, without torch or Triton."""

from __future__ import annotations

MANY_TOKENS = 65
"""From this number of tokens on, matrices are decoded to fp16 before they are multiplied.

On an H200 that took 0.9 to 1.4 times as long as a packed product with 64 tokens, 0.8 to 1.1 times
with 128 and 0.4 to 0.6 times with 512; for gate and up together 0.6 to 1.1, 0.4 to 0.7 and 0.2 to
0.4 times. Measured types: f16, q8_0, q4_0 and q4_K.
"""
DECODED_BYTES = 128 << 20
"""Scratch for a decoded matrix; of a larger one, as many rows at a time as fit."""
