"""Attention that reads packed K and V, for generated tokens and for prompts."""
