"""A layer, or a whole token, as one chain of workers."""
