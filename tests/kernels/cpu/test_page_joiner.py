"""Huge pages for panels: they come while the panels are in use, and nothing in them changes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from localkv.kernels.cpu.linear import arena as arenas
from localkv.kernels.cpu.linear.arena import HUGE_BYTES, Bytes, PageJoiner, PanelArena


def asks_for_huge_pages(x: Bytes) -> bool:
    """Whether the system has been asked to join the pages in the middle of an array."""
    at, found = x.ctypes.data + x.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if part := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(part[1], 16) <= at < int(part[2], 16)
        elif found and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="Linux' huge pages")
def test_panels_get_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this Linux has no huge pages")
    joiner = PageJoiner()
    monkeypatch.setattr(arenas, "JOINER", joiner)
    arena = PanelArena()
    taken = [arena.take(n_bytes) for n_bytes in (20 << 20, 3 << 20, 3 << 20, 100)]
    wanted = [np.random.default_rng(i).integers(256, size=len(x)) for i, x in enumerate(taken)]
    for x, values in zip(taken, wanted, strict=True):
        x[:] = values
    assert not asks_for_huge_pages(taken[0])
    for x in taken:
        arena.join_pages(x)
    assert all(asks_for_huge_pages(x) for x in taken)
    joiner.finish()
    assert joiner.n_tried >= (20 << 20) // HUGE_BYTES - 1
    for x, values in zip(taken, wanted, strict=True):
        assert np.array_equal(x, values)
