"""How much of generated tokens' attention one launch has memory for. Imports no NumPy: plans do."""

from __future__ import annotations

from localkv.kernels.cpu.attention.sizes import most_parts

TOGETHER = 4
"""Tokens with long contexts whose parts fit a launch. Where there are more, layers run one by one,
which takes Python a millisecond each."""


def launch_parts(n_kv_heads: int) -> int:
    """Parts (of all KV heads) of a launch for several tokens."""
    return TOGETHER * most_parts(n_kv_heads)
