"""The two published models that tests/real reads."""

from __future__ import annotations

FILES = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3": "gemma-3-270m-q4_k_m.gguf"}
"""Their names in the folder, by short names."""
