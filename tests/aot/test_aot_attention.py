"""What attention's machine code does on six generations of GPUs, for every type on either side."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from localkv.kernels.gpu.attention.decode import decode_kernel
from localkv.kernels.gpu.attention.packed_attention import TileConfig
from localkv.kernels.gpu.attention.prefill import prefill_kernel
from localkv.quant_formats import TOKEN_FORMATS
from support.aot.aot_report import (
    ARCHS,
    ATTENTION_FACTOR,
    MOST_SPILLS,
    SHARED_KIB,
    Report,
    gpus_in_turn,
    report,
    types_on_gpus,
)
from support.aot.attention_builds import build
from support.quick import quick

NAMES = [fmt.name for fmt in TOKEN_FORMATS.values() if fmt.has_part("gpu") and not fmt.shared_codec]
GPUS = (90, 86, 120, 100)
"""GPUs with instructions of their own: 80 and 89 have 86's."""
APART = 8 * 256 * 16
"""Bytes that pages lie apart."""
OTHER_DIMS = ((64, 64), (80, 80), (96, 96), (112, 112), (192, 128), (256, 256), (512, 512))

# warp instructions per key of a KV head with 128 channels, four query heads and one new token
DECODE_BUDGET = {
    "f32": 116,
    "f16": 24,
    "bf16": 43.5,
    "q8_0": 34.5,
    "q5_1": 43,
    "q5_0": 42,
    "q4_1": 34,
    "q4_0": 32,
    "iq4_nl": 47.5,
    "kv3_1": 37,
    "kv3_0": 35.5,
    "kv2_1": 32,
    "kv2_0": 32,
    "q8_t": 34.5,
    "q4_t": 34.5,
    "nuq4": 41.25,
    "nuq3": 41.5,
    "nuq2": 36,
    "fp8_e4m3": 40,
    "fp8_e4m3_token": 45,
    "fp8_e5m2": 24,
    "fp8_e5m2_token": 29,
}
# the same per key and block of queries
PREFILL_BUDGET = {
    "f32": 154,
    "f16": 87,
    "bf16": 104,
    "q8_0": 106,
    "q5_1": 115,
    "q5_0": 112,
    "q4_1": 109,
    "q4_0": 102,
    "iq4_nl": 116,
    "kv3_1": 109,
    "kv3_0": 106,
    "kv2_1": 102,
    "kv2_0": 102,
    "q8_t": 106,
    "q4_t": 108,
    "nuq4": 122.5,
    "nuq3": 119,
    "nuq2": 112,
    "fp8_e4m3": 105,
    "fp8_e4m3_token": 114,
    "fp8_e5m2": 89,
    "fp8_e5m2_token": 98,
}


def budget(budgets: dict[str, float], name: str) -> float:
    """A type without a limit of its own may cost as much as any other with blocks."""
    blocks = [most for other, most in budgets.items() if TOKEN_FORMATS[other].shares_scale]
    return ATTENTION_FACTOR * budgets.get(name, max(blocks))


def wide_bytes(names: tuple[str, str], dims: tuple[int, int], tiles: TileConfig) -> float:
    """Bytes of codes that a thread loads of a tile, if its share is 16 at least."""
    threads = 32 * tiles.warps
    total = 0.0
    for name, head_dim in zip(names, dims, strict=True):
        (codes,) = (p for p in TOKEN_FORMATS[name].planes if p.name in ("qs", "values"))
        share = head_dim // TOKEN_FORMATS[name].block_size * codes.n_bytes * tiles.keys / threads
        n_loads = 1 if codes.n_bytes in (8, 16) else 2  # halves of a row, of types of a byte
        total += share if share / n_loads >= 16 else 0
    return total


def checked(
    kernel: Any, arch: int, names: tuple[str, str], head_dim: int, **options: Any
) -> tuple[Report, float]:
    """The report, and warp instructions per key."""
    compiled, tiles = build(kernel, arch, *names, head_dim, **options)
    value_dim = options.get("value_dim", head_dim)
    got = report(compiled)
    assert got.n_local <= MOST_SPILLS, "registers are spilled in the main loop"
    assert got.stack_bytes <= 64, "registers are spilled outside of it"
    assert got.shared_bytes <= SHARED_KIB[arch] * 1024
    assert got.loads["128"] >= 0.95 * wide_bytes(names, (head_dim, value_dim), tiles), got.loads
    assert got.matrix_ops
    return got, got.n_loop * tiles.warps / tiles.keys


@types_on_gpus(NAMES, (86, 90, 120), ("f16", "q5_1", "fp8_e4m3"))
def test_decode(arch: int, name: str) -> None:
    _, per_key = checked(decode_kernel, arch, (name, name), 128)
    assert per_key <= budget(DECODE_BUDGET, name)


@types_on_gpus(NAMES, (86, 90), ("f16", "q5_1", "q8_0"))
def test_prefill(arch: int, name: str) -> None:
    got, per_key = checked(prefill_kernel, arch, (name, name), 128)
    if arch != 100:
        assert per_key <= budget(PREFILL_BUDGET, name)
    if arch == 90 and name not in ("f32", "bf16"):
        assert all(op.startswith("HGMMA") for op in got.matrix_ops)


@pytest.mark.parametrize("arch", [90, 120])
def test_prompts_multiply_codes(arch: int) -> None:
    """Tensor cores read K as e4m3, and V as fp16."""
    compiled, _ = build(prefill_kernel, arch, "fp8_e4m3", "fp8_e4m3", 128, codes=True)
    got = report(compiled)
    assert got.n_local == 0
    assert got.stack_bytes <= 64
    assert got.shared_bytes <= SHARED_KIB[arch] * 1024
    ptx = compiled.asm["ptx"]
    product = r"wgmma\.mma_async.*\.f32\.e4m3\.e4m3" if arch == 90 else r"mma\.sync.*e4m3"
    assert re.search(product, ptx)


SIZES = [
    (arch, kernel, *dims)
    for at, dims in enumerate(OTHER_DIMS)
    for arch in ((86, 100) if at % 2 else (90, 120))
    for kernel in (decode_kernel, prefill_kernel)
]


@pytest.mark.parametrize(
    ("arch", "kernel", "key_dim", "value_dim"),
    quick(SIZES, (), [*SIZES[::4], *SIZES[3::4]]),
    ids=lambda x: str(getattr(x, "__name__", x)),
)
def test_other_head_sizes(arch: int, kernel: Any, key_dim: int, value_dim: int) -> None:
    """With types that change from one to the next, so that many pairs turn up."""
    names = NAMES if key_dim < 512 else [name for name in NAMES if name != "f32"]
    names = [name for name in names if key_dim % TOKEN_FORMATS[name].block_size == 0]
    at = ARCHS.index(arch) * len(OTHER_DIMS) + OTHER_DIMS.index((key_dim, value_dim))
    pair = (names[at % len(names)], names[(at * 2 + 5) % len(names)])
    pair = pair if kernel is decode_kernel else pair[::-1]
    checked(kernel, arch, pair, key_dim, value_dim=value_dim)


@pytest.mark.slow
@gpus_in_turn("type_k,type_v", [("f16", "q8_0"), ("q8_0", "f16")], (86, 90, 120))
def test_halves_beside_codes(arch: int, type_k: str, type_v: str) -> None:
    """K is copied to shared memory as it is while V is decoded: together they need the most."""
    checked(prefill_kernel, arch, (type_k, type_v), 256)


@pytest.mark.slow
@gpus_in_turn("type_k,type_v", [("q8_0", "q4_0"), ("bf16", "f16")], (120, 90, 86))
def test_most_queries_of_wide_heads(arch: int, type_k: str, type_v: str) -> None:
    """Eight heads and four new tokens, the most that are not a prompt's."""
    checked(decode_kernel, arch, (type_k, type_v), 512, group=8, n_new=4)


@gpus_in_turn(
    "kernel,head_dim,group",
    [(decode_kernel, 64, 8), *product((prefill_kernel, decode_kernel), (64, 128, 256), (4,))],
    (100, 90, 86, 120),
)
def test_sixteen_numbers_are_looked_up_in_runs(
    arch: int, kernel: Any, head_dim: int, group: int
) -> None:
    """What is the same for sixteen bytes `look_up_sixteen` takes from the first one alone. Where
    tiles are small threads have fewer, one after the other."""
    compiled, tiles = build(kernel, arch, "nuq4", "nuq4", head_dim, group=group)
    code = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = #ttg.blocked<{sizePerThread = \[1, (\d+)\]", code, re.M))
    results = r"packed_element = 16.*?-> tensor<(\d+)x(\d+)xf16, (#\w+)>"
    found = re.findall(results, code)
    assert len(found) >= 2, "of K and V"
    for rows, n_bytes, layout in found:
        share = int(rows) * int(n_bytes) // (32 * tiles.warps)
        assert int(layouts[layout]) == min(16, share)


@gpus_in_turn("kernel", [decode_kernel, prefill_kernel])
def test_bias_by_distance(arch: int, kernel: Any) -> None:
    """BLOOM, MPT and Baichuan 13B have a KV head for each head."""
    checked(kernel, arch, ("q4_0", "q8_0"), 128, group=1, alibi=True)


@gpus_in_turn("window", [1, 2], (90, 86, 100))
def test_options_cost_no_registers(arch: int, window: int) -> None:
    """Softcap and window (or chunks), many query heads, several new tokens."""
    options = {"softcap": True, "window": window}
    checked(decode_kernel, arch, ("q4_0", "q8_0"), 128, group=8, n_new=8, **options)
    checked(prefill_kernel, arch, ("q4_0", "q8_0"), 128, group=5, **options)


@gpus_in_turn("kernel,part", [*product((decode_kernel, prefill_kernel), (1, 2))], GPUS)
def test_tails_cost_no_registers(arch: int, kernel: Any, part: int) -> None:
    """What is read up to the tail (1), and the tail itself (2), in layers with a window."""
    if kernel is prefill_kernel and part == 1:
        checked(kernel, arch, ("q4_0", "q8_0"), 128, tail=1, window=1)
    elif kernel is prefill_kernel:
        checked(kernel, arch, ("f16", "f16"), 128, tail=2)
    elif part == 1:
        _, per_key = checked(kernel, arch, ("q4_0", "q4_0"), 128, tail=1)
        assert per_key <= budget(DECODE_BUDGET, "q4_0")
    else:
        checked(kernel, arch, ("f16", "f16"), 128, group=8, n_new=8, tail=2, window=1)


@gpus_in_turn("name", ["f16", "q4_0"])
def test_pages_that_are_apart_cost_no_registers(arch: int, name: str) -> None:
    """Reads a cache with a budget, with units of 16 bytes a row: loads are as wide as ever."""
    _, per_key = checked(decode_kernel, arch, (name, name), 128, page_bytes=APART)
    assert per_key <= budget(DECODE_BUDGET, name) + 0.5  # to find the page


@pytest.mark.parametrize("arch", quick(ARCHS, [90], (86, 90, 120)))
def test_prompts_find_pages_that_are_apart(arch: int) -> None:
    checked(prefill_kernel, arch, ("q8_0", "q4_0"), 128, page_bytes=APART)
