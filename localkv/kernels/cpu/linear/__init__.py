"""Products with packed matrices: layouts, packing of activations, tiles."""
