"""What attention's machine code does on six generations of GPUs, for every type on either side."""

from __future__ import annotations

from typing import Any

import pytest
from aot_report import ARCHS, Report, report
from attention_builds import build

from localkv.kernels.gpu.attention_config import TileConfig
from localkv.kernels.gpu.attention_decode import decode_kernel
from localkv.kernels.gpu.attention_prefill import prefill_kernel
from localkv.quant_formats import KV_FORMATS

NAMES = list(KV_FORMATS)
OTHER_DIMS = (64, 96, 256)
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""What a block may take, by compute capability."""

# warp instructions per key of a KV head with 128 channels, four query heads and one new token
DECODE_BUDGET: dict[str, float] = {}
# the same per key and block of queries
PREFILL_BUDGET: dict[str, float] = {}


def code_bytes(names: tuple[str, str], head_dim: int, tiles: TileConfig) -> float:
    """Bytes of codes (not of scales, minima and fifth bits) that a thread has of a tile."""
    per_key = sum(
        head_dim // KV_FORMATS[name].block_size * plane.n_bytes
        for name in names
        for plane in KV_FORMATS[name].planes
        if plane.name in ("qs", "values")
    )
    return per_key * tiles.keys / (32 * tiles.warps)


def checked(
    kernel: Any, arch: int, names: tuple[str, str], head_dim: int, **options: Any
) -> tuple[Report, float]:
    """The report, and warp instructions per key."""
    compiled, tiles = build(kernel, arch, *names, head_dim, **options)
    got = report(compiled)
    assert got.n_local == 0, "registers are spilled in the main loop"
    assert got.stack_bytes <= 64, "registers are spilled outside of it"
    assert got.shared_bytes <= SHARED_KIB[arch] * 1024
    assert got.loads["128"] >= 0.95 * code_bytes(names, head_dim, tiles), got.loads
    assert got.matrix_ops
    return got, got.n_loop * tiles.warps / tiles.keys


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ARCHS)
def test_decode(arch: int, name: str) -> None:
    _, per_key = checked(decode_kernel, arch, (name, name), 128)
    assert per_key <= DECODE_BUDGET[name]


@pytest.mark.parametrize(
    ("arch", "name"),
    [(arch, name) for arch in (86, 90) for name in NAMES]
    + [(arch, name) for arch in (80, 89, 100, 120) for name in ("f16", "q5_1", "q8_0")],
)
def test_prefill(arch: int, name: str) -> None:
    got, per_key = checked(prefill_kernel, arch, (name, name), 128)
    if arch != 100:
        assert per_key <= PREFILL_BUDGET[name]
    if arch == 90 and name not in ("f32", "bf16"):
        assert all(op.startswith("HGMMA") for op in got.matrix_ops)


@pytest.mark.parametrize("head_dim", OTHER_DIMS)
@pytest.mark.parametrize("arch", ARCHS)
def test_other_head_sizes(arch: int, head_dim: int) -> None:
    """With types that change from one to the next, so that many pairs turn up."""
    at = ARCHS.index(arch) * len(OTHER_DIMS) + OTHER_DIMS.index(head_dim)
    names = (NAMES[at % len(NAMES)], NAMES[(at * 2 + 5) % len(NAMES)])
    checked(decode_kernel, arch, names, head_dim)
    checked(prefill_kernel, arch, names[::-1], head_dim)


@pytest.mark.parametrize("arch", [86, 90, 100])
def test_options_cost_no_registers(arch: int) -> None:
    """Softcap and window, many query heads, several new tokens."""
    options = {"softcap": True, "window": True}
    checked(decode_kernel, arch, ("q4_0", "q8_0"), 128, group=8, n_new=8, **options)
    checked(prefill_kernel, arch, ("q4_0", "q8_0"), 128, group=5, **options)
