"""What number formats share: bits and rounding in NumPy, and parts for Numba and Triton."""
