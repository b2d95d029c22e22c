"""How a GPU's attention cuts its work, without torch or Triton."""

from __future__ import annotations

FEW_TOKENS = 8
"""New tokens of a sequence up to which its context is split among programs."""
MOST_SPLITS = 128
"""Among how many programs at most."""
MOST_CHANNELS = 512
"""Of a head of K or of V."""
