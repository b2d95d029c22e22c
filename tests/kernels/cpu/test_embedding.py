"""Rows of the embedding that a kernel decodes, against those that NumPy decodes."""

from __future__ import annotations

import numpy as np
import pytest

from localkv.kernels.cpu.linear.embedding import Embedding
from localkv.kernels.cpu.linear.jobs import LAYOUTS
from support.quick import quick
from support.random_packed import random_packed


@pytest.mark.parametrize("name", quick(LAYOUTS, ["q8_0", "q4_0", "q4_K", "q6_K"]))
def test_one_row_has_the_bits_that_it_has_among_others(name: str) -> None:
    """Also where the last record is not full, and with a factor."""
    values = LAYOUTS[name].record_values
    block = LAYOUTS[name].format.block_size
    weight, embedding = random_packed(name, 5, 2 * values + block), Embedding()
    for scale in (1.0, 33.94):
        all_rows = embedding(np.arange(5), weight, scale)
        assert all_rows.shape == weight.shape
        for token in range(5):
            one = embedding(np.array([token]), weight, scale)
            assert np.array_equal(one.view(np.int32), all_rows[[token]].view(np.int32))


def test_each_matrix_has_its_own_rows() -> None:
    weights = [random_packed("q6_K", 3, 512, seed=seed) for seed in range(2)]
    embedding = Embedding()
    for weight in (*weights, *weights):
        assert np.array_equal(embedding(np.array([2]), weight, 1.0), weight[2:3].decode())
