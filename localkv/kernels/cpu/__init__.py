"""The CPU backend: kernels that Numba compiles, the threads that run them, their table."""
