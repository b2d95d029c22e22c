"""Compiling kernels with Numba: sources, machine code, where it is kept, helpers that compile."""
