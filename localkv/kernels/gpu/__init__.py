"""The GPU's kernels, in Triton, and what launches them."""
