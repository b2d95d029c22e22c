"""Going over to another model with options that name a KV profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from localkv.chat.engine import EngineOptions
from localkv.chat.model_choice import Models
from support.tiny_model import write_tiny_model


def test_a_profile_stays_with_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    first, second = (write_tiny_model(tmp_path / f"{name}.gguf") for name in "ab")
    types = {"cache_type_k": None, "cache_type_v": None}
    options = EngineOptions(str(first), {**types, "kv_profile": "p.json", "kv_bits": 6.75})
    assert Models().carried_over(options, first) == options
    without = Models().carried_over(options, second)
    assert without.model == str(second)
    assert without.arguments == {"cache_type_k": "q8_0", "cache_type_v": "q4_0"}
    second.with_suffix(".kv.json").touch()
    other = Models().carried_over(options, second)
    assert other.arguments == {**types, "kv_profile": "auto", "kv_bits": 6.75}
    named = EngineOptions(str(first), {"cache_type_k": "f16", "kv_profile": "auto"})
    second.with_suffix(".kv.json").unlink()
    assert Models().carried_over(named, second).arguments == {"cache_type_k": "f16"}
