"""The type that llama-quantize gives a matrix, by the length of its rows."""

from __future__ import annotations

import pytest

from localkv.loader.quantised_format import quantised_format
from localkv.quant_formats import FORMATS, QuantFormat

NARROW = {
    "q2_K": "q4_0", "q3_K": "q4_0", "q4_K": "q5_0", "q5_K": "q5_1", "q6_K": "q8_0",
    "iq4_xs": "iq4_nl", "iq3_s": "iq4_nl", "iq3_xxs": "iq4_nl", "iq2_s": "iq4_nl",
    "iq2_xs": "iq4_nl", "iq2_xxs": "iq4_nl", "iq1_m": "iq4_nl", "iq1_s": "iq4_nl",
    "tq1_0": "q4_0", "tq2_0": "q4_0", "q2_0": "q4_0",
}  # fmt: skip


@pytest.mark.parametrize(
    "fmt", [x for x in FORMATS.values() if x.is_weight], ids=lambda fmt: fmt.name
)
def test_rows_that_are_no_whole_blocks(fmt: QuantFormat) -> None:
    def chosen(n_in: int) -> str:
        return quantised_format(n_in, fmt.name, is_output=False).name

    assert chosen(512) == fmt.name
    narrow = NARROW.get(fmt.name, fmt.name if fmt.block_size <= 32 else "f16")
    assert chosen(96) == narrow
    assert chosen(72) == (fmt.name if fmt.block_size == 1 else "f16")
