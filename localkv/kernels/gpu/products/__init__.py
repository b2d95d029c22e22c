"""Products with packed matrices in planes."""
