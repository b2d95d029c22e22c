"""Packing rows of K and V into pages, and the rotation before it."""
