"""What attention's machine code does with types that have a scale for each channel."""

from __future__ import annotations

from typing import Any

import pytest

from localkv.kernels.gpu.attention.decode import decode_kernel
from localkv.kernels.gpu.attention.prefill import prefill_kernel
from localkv.quant_formats import FORMATS
from support.aot.aot_report import ATTENTION_FACTOR, MOST_SPILLS, SHARED_KIB, report
from support.aot.attention_builds import build
from support.quick import quick

# warp instructions per key, as in test_aot_attention.py, where q4_0 has 32 and 102: at
# most 1.3 times as many
DECODE_BUDGET = {
    "q8_0c": 35.5, "q4_1c": 36, "q4_1c128": 36, "kv3_1c": 41.5, "kv3_1c128": 41.5, "kv2_1c": 35,
}  # fmt: skip
PREFILL_BUDGET = {
    "q8_0c": 108, "q4_1c": 107, "q4_1c128": 107, "kv3_1c": 114, "kv3_1c128": 114, "kv2_1c": 105,
}  # fmt: skip
CASES = [
    (decode_kernel, 90, "q4_1c"),
    (decode_kernel, 86, "kv3_1c"),
    (decode_kernel, 100, "kv2_1c"),
    (decode_kernel, 120, "q8_0c"),
    (decode_kernel, 90, "kv3_1c128"),
    (decode_kernel, 80, "q4_1c128"),
    (prefill_kernel, 90, "q4_1c128"),
    (prefill_kernel, 89, "kv3_1c128"),
    (prefill_kernel, 89, "kv3_1c"),
    (prefill_kernel, 80, "q4_1c"),
]


@pytest.mark.parametrize(
    ("kernel", "arch", "name"),
    quick(CASES, CASES[:1]),
    ids=lambda x: str(getattr(x, "__name__", x)),
)
def test_attention(kernel: Any, arch: int, name: str) -> None:
    compiled, tiles = build(kernel, arch, name, name, 128)
    got = report(compiled)
    assert got.n_local <= MOST_SPILLS, "registers are spilled in the main loop"
    assert got.stack_bytes <= 64, "registers are spilled outside of it"
    assert got.shared_bytes <= SHARED_KIB[arch] * 1024
    budgets = DECODE_BUDGET if kernel is decode_kernel else PREFILL_BUDGET
    per_key = got.n_loop * tiles.warps / tiles.keys
    if kernel is decode_kernel or arch != 100:
        assert per_key <= ATTENTION_FACTOR * budgets[name]


def test_every_type_has_a_budget() -> None:
    assert {fmt.name for fmt in FORMATS.values() if fmt.group_tokens > 1} == set(DECODE_BUDGET)
