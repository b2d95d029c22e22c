"""Kernels in Triton, one file per operation, and what launches them.

Only what runs on a GPU imports this package. Kernels read lengths, page tables and slots from the
device's memory and are launched in grids that don't depend on them, so that launches can be
recorded once and repeated. Each launch says whether a multiplication and an addition may become one
operation: Triton's default for that changes after 3.9.
"""
