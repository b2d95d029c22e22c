"""Linux's futex, on which threads of compiled code sleep (`simd/atomic.py`), without Numba."""

from __future__ import annotations

import platform
import sys

_NUMBERS = {"x86_64": 202, "aarch64": 98}
FUTEX = _NUMBERS.get(platform.machine(), -1) if sys.platform == "linux" else -1
"""The number of the system call, or -1."""

HAS_FUTEX = FUTEX != -1
