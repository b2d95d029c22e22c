"""Attention over latents on a GPU."""
