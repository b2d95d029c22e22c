"""Plain torch, slow and easy to trust: what tests compare with, and the GPU's rarer steps."""
