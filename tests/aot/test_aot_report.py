"""The report of machine code, on kernels of which one knows what they do."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl

from support.aot.aot_report import ARCHS, Report, compile_kernel, report
from support.quick import quick


@triton.jit
def sum_kernel(x_ptr, out_ptr, n, STRIDE: tl.constexpr):
    i = tl.arange(0, 1024)
    total = tl.zeros((1024,), tl.float32)
    for start in range(0, n, 1024):
        total += tl.load(x_ptr + (start + i) * STRIDE)
    tl.store(out_ptr + i, total)


@triton.jit
def product_kernel(x_ptr, out_ptr, n):
    i = tl.arange(0, 128)
    at = i[:, None] * 128 + i[None, :]
    total = tl.zeros((128, 128), tl.float32)
    for start in range(n):
        x = tl.load(x_ptr + start * 16384 + at)
        total = tl.dot(x, x, total)
    tl.store(out_ptr + at, total)


def summing(arch: int, stride: int) -> Report:
    types = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}
    return report(compile_kernel(sum_kernel, arch, types, {"STRIDE": stride}, num_warps=4))


@pytest.mark.parametrize("arch", quick(ARCHS, [80, 120]))
def test_widths(arch: int) -> None:
    wide, narrow = summing(arch, 1), summing(arch, 3)
    assert set(wide.loads) == {"128"}
    assert wide.wide_share() == 1
    assert set(narrow.loads) == {"32"}
    assert narrow.wide_share() == 0
    assert min(wide.n_loop, narrow.n_loop) > 10


def test_products_and_spills() -> None:
    """A warp can't hold 128 x 128 sums in registers, eight can."""
    types = {"x_ptr": "*fp16", "out_ptr": "*fp32", "n": "i32"}
    few, many = (report(compile_kernel(product_kernel, 80, types, {}, num_warps=n)) for n in (1, 8))
    assert few.n_local > 0
    assert few.registers == 255
    assert many.n_local == many.stack_bytes == 0
    assert list(many.matrix_ops) == ["HMMA.16816"]
    hopper = report(compile_kernel(product_kernel, 90, types, {}, num_warps=8))
    assert {op.split(".")[0] for op in hopper.matrix_ops} == {"HGMMA"}
    assert hopper.shared_bytes >= 32768
