"""Models of every family with windows: the same bytes, whether rows are kept or given back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.errors import ModelFileError
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.weights import load_model

IDS = np.random.default_rng(9).integers(64, size=1700).tolist()
QUICK = ("gemma3", "gemma4")
SLOW = ("cohere2", "exaone4-swa", "gemma2", "gemma3n", "gemma4-moe", "gpt-oss", "olmo3")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_logits_are_the_same_bytes_as_with_all_rows(conformance: Path, name: str) -> None:
    path = conformance / "archs2" / f"{name}.gguf"
    try:
        model, _ = load_model(path, cpu_backend())
    except ModelFileError as error:
        pytest.skip(str(error))
    windows = [group.reach for group in model.config.groups if group.reach]
    assert windows
    found = []
    for swa_full in (False, True):
        cache = CacheConfig("q8_0", "q8_0", n_ctx=2048, swa_full=swa_full)
        engine = Engine(model, cache, n_batch=128)
        found.append(engine.logits(IDS).tobytes())
        assert any(engine.sequence.gone) != swa_full
    assert found[0] == found[1]
