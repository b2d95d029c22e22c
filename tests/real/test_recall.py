"""A sentence from 6,000 tokens back is found through caches that are meant for long contexts."""

from __future__ import annotations

from pathlib import Path

import pytest

from localkv import LLM
from localkv.config import CacheConfig
from localkv.quality.needle import Needle, plant, recall
from support.real_models import FILES

N_CTX, COUNT = 6200, 2


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder / FILES["smollm2"], n_ctx=N_CTX, progress=False)


@pytest.fixture(scope="module")
def needles(llm: LLM, handbook: str) -> list[Needle]:
    def encode(text: str) -> list[int]:
        return llm.tokenize(text, add_special=False)

    return plant(encode, encode(handbook), N_CTX)[0][:COUNT]


def test_packed_caches_recall_nearly_as_well(llm: LLM, needles: list[Needle]) -> None:
    """In logarithms of the probability of the right answer; a cache of too few bits loses it."""
    f16, packed, few = (
        recall(llm.engine.model, CacheConfig(*pair, n_ctx=N_CTX), needles)
        for pair in (("f16", "f16"), ("q8_0", "q4_0"), ("kv2_0", "kv2_0"))
    )
    assert f16.distance > 6000
    assert packed.right == f16.right > 0 == few.right
    assert packed.log_p > f16.log_p - 1
    assert few.log_p < f16.log_p - 5
