"""What a backend can't run is refused by name, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localkv.arch.spec import AttentionSpec, MlpSpec
from localkv.errors import ModelFileError
from localkv.kernels.backend import Backend
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.layer_kinds import WORDS
from localkv.loader.synthetic import synthetic_model
from localkv.loader.weights import load_model
from support.random_model import RandomModel

CPU = cpu_backend()


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (replace(CPU, mixers={MlpSpec: CPU.mixers[AttentionSpec]}), "attention"),
        (replace(CPU, ffns={}), "a dense feed-forward block"),
        (replace(CPU, lacks=lambda layer: "heads of 64 channels"), "heads of 64 channels"),
    ],
    ids=["mixer", "block", "other"],
)
def test_layers_without_a_way(backend: Backend, reason: str, tmp_path: Path) -> None:
    message = rf"^device cpu can't run {reason} \(layer 0 of a llama model\)$"
    with pytest.raises(ModelFileError, match=message):
        load_model(RandomModel().write(tmp_path / "model.gguf"), backend)
    with pytest.raises(ModelFileError, match=f"can't run {reason}"):
        synthetic_model("llama-1b", "q4_0", backend)


def test_every_kind_has_a_name() -> None:
    """And the CPU a way to run it."""
    assert set(WORDS) == {*CPU.mixers, *CPU.ffns}
