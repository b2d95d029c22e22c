"""States of recurrent layers on the command line: what they take, and the checkpoints of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from localkv.cache.recurrent_state import state_bytes
from localkv.config import CacheConfig
from localkv.errors import UsageError
from localkv.loader.gguf_file import open_gguf
from localkv.loader.model_header import model_spec
from support.hybrid_models import hybrid


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return hybrid("qwen35").write(tmp_path / "model.gguf")


def test_plan_and_show_count_states(program: Any, file: Path) -> None:
    n_bytes = state_bytes(model_spec(open_gguf(file)).states)
    plans = {
        n: json.loads(program("plan", file, "-c", "512", "--json", "-ctxcp", n).out)
        for n in ("0", "3")
    }
    assert plans["0"]["states"] == plans["3"]["states"] == n_bytes > 0
    assert plans["0"]["checkpoints"] == 0
    assert plans["3"]["checkpoints"] == 3 * n_bytes
    totals = [plans[n]["pairs"][0]["total"] for n in ("0", "3")]
    assert totals[1] - totals[0] == 3 * n_bytes
    assert "of recurrent layers, float32 with any K and V" in program("plan", file).out
    assert "for each sequence, float32" in program("show", file).out


def test_the_memory_line_counts_states(file: Path) -> None:
    from localkv import LLM
    from localkv.commands.model import memory_line

    llm = LLM(file, device="cpu", n_ctx=256, ctx_checkpoints=2, checkpoint_min_step=16)
    n_bytes = llm.engine.cache.states.n_bytes
    assert llm.memory.states == n_bytes
    assert llm.memory.checkpoints == 2 * n_bytes
    assert "states " in memory_line(llm)
    assert "of checkpoints" in memory_line(llm)
    assert llm.engine.cache.states.config.step == 16


@pytest.mark.parametrize("changes", [{"ctx_checkpoints": -1}, {"checkpoint_min_step": 0}])
def test_numbers_that_make_no_sense(changes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="checkpoints"):
        CacheConfig(**changes)
