"""Texts that are written to files with their rows, and read again."""
