"""Kernels in Triton's interpreter, on tensors of the CPU: are the values right?

The interpreter must be chosen before Triton is imported, and holds for a whole process. So these
tests are left out of a run of all tests, and have one of their own: `pytest tests/interpreter`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.interpreted import replace_language_once

if TYPE_CHECKING:
    from localkv.kernels.gpu.products.tile_sizes import TileSizes

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("Triton is loaded without its interpreter: run tests/interpreter alone")
os.environ["TRITON_INTERPRET"] = "1"
if find_spec("triton") is None:  # there is none for this platform
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A GPU doesn't warn of infinities and NaN, which kernels may compute and then discard.

    The interpreter of Triton 3.6 takes loop bounds in a way that NumPy 2.4 no longer allows and
    earlier ones warn of.
    """
    warnings = ("ignore::RuntimeWarning", "ignore:Conversion of an array with ndim > 0")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for warning in warnings:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session", autouse=True)
def _language_replaced_once() -> None:
    replace_language_once()


@pytest.fixture
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of few programs: the interpreter takes as long for one, however large its tile."""
    from localkv.kernels.gpu import moe
    from localkv.kernels.gpu.products import activations, products
    from localkv.kernels.gpu.products.tile_sizes import tile_sizes

    def large(*args: Any, **settings: Any) -> TileSizes:
        return replace(tile_sizes(*args, **settings), rows=128)

    monkeypatch.setattr(moe, "tile_sizes", large)
    monkeypatch.setattr(products, "tile_sizes", large)
    monkeypatch.setattr(activations, "ROWS", 16)
