"""How many tokens are many for a GPU's products, without torch or Triton."""

from __future__ import annotations

MANY_TOKENS = 65
"""From this number of tokens on, matrices are decoded to fp16 before they are multiplied.

With 64 that was as fast on an H200 as packed products, and with 512 2.5 to 5 times as fast.
"""
DECODED_BYTES = 128 << 20
"""Scratch for a decoded matrix; of a larger one, as many rows at a time as fit."""
