"""Kernels compiled ahead of time for GPUs that need not be there: what does the machine code do?"""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    raise pytest.UsageError("tests/aot needs Triton's compiler: unset TRITON_INTERPRET")
pytest.importorskip("triton")
