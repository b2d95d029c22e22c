"""Kernels compiled ahead of time for GPUs that need not be there: what does the machine code do?"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    raise pytest.UsageError("tests/aot needs Triton's compiler: unset TRITON_INTERPRET")
if find_spec("triton") is None:  # there is none for this platform
    collect_ignore_glob = ["test_*.py"]
