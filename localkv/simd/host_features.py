"""Features that Numba will compile for, without importing it: plans of memory need them."""

from __future__ import annotations

import functools
import os


@functools.cache
def expects_vnni() -> bool:
    """The future `cpu_features.HAS_VNNI`, unless a configuration file of Numba's changes it."""
    listed = os.environ.get("NUMBA_CPU_FEATURES")
    if listed is None:
        if os.environ.get("NUMBA_CPU_NAME", "").lower() == "generic":
            return False
        from llvmlite import binding

        try:
            listed = binding.get_host_cpu_features().flatten()
        except RuntimeError:  # LLVM does not know the system
            return False
    needed = {"+avx512f", "+avx512bw", "+avx512vl", "+avx512dq", "+avx512vnni"}
    return needed <= set(listed.split(","))
