"""Kernels in Triton, one file per operation, and their launchers.

Only code for GPUs imports this package. Kernels read lengths, page tables and slots from the
device's memory and are launched in grids that don't depend on them, so that launches can be
recorded once and repeated. All of them go through `launch`, by which a model's kernels can also be
compiled ahead, on all cores.
"""
