"""K in the cache as it is before RoPE, on the reference backend, against K as it is after."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localkv import LLM
from localkv.errors import ModelFileError, UsageError
from support.latent_models import latent_tensors, write_latent
from support.program import Program
from support.random_model import variant
from support.tiny_model import write_tiny_model

IDS = [(i * 7919 + 13) % 96 for i in range(90)]


def logits_of(path: Path, **options: object) -> np.ndarray:
    options = {"n_ctx": 128, "n_batch": 40, **options}
    return LLM(path, device="reference", **options).logits(IDS)


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3", "gemma3"))]
)
def test_the_same_logits(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    variant(name).write(path)
    for type_k, rotation, tolerance in (("f32", "auto", 2e-4), ("f16", "on", 2e-2)):
        types = {"cache_type_k": type_k, "cache_type_v": "f32", "kv_rotation": rotation}
        after, before = (logits_of(path, **types, k_before_rope=of) for of in (False, True))
        np.testing.assert_allclose(before, after, atol=tolerance)
    # codes of K are other ones
    types = {"cache_type_k": "nuq3", "cache_type_v": "f32", "kv_tail": 16}
    errors = [np.abs(logits_of(path, **types, k_before_rope=of) - after) for of in (False, True)]
    assert np.abs(errors[0] - errors[1]).max() > 1e-3
    assert max(error.mean() for error in errors) < 4 * min(error.mean() for error in errors)


def test_it_is_refused_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    variant("llama").write(path)
    for device in ("cpu", "auto"):
        with pytest.raises(UsageError, match=f"k_before_rope: .* device {device} has no others"):
            LLM(path, device=device, k_before_rope=True)
    for option in ("kv_profile", "kv_scales"):
        with pytest.raises(UsageError, match=f"{option}: measured of K as it is after RoPE"):
            LLM(path, device="reference", k_before_rope=True, **{option: tmp_path / "any.json"})
    write_latent(path, "minicpm3", latent_tensors("minicpm3"))
    with pytest.raises(ModelFileError, match="can't run latents with K before RoPE"):
        LLM(path, device="reference", k_before_rope=True)


def test_saved_states_are_of_one_of_them(tmp_path: Path) -> None:
    path, state = write_tiny_model(tmp_path / "model.gguf"), tmp_path / "state"
    kept = [LLM(path, device="reference", n_ctx=64, k_before_rope=of) for of in (True, False)]
    for of, other, words in ((*kept, "before"), (*kept[::-1], "after")):
        of.complete([1, 2, 3], max_tokens=1)
        of.save_state(state)
        with pytest.raises(UsageError, match=f"its keys are as they are {words} RoPE"):
            other.load_state(state, convert=True)


def test_the_option(program: Program, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model.gguf")
    argv = ("complete", "-m", path, "-p", "1 2", "-n", "1", "--kv-k-before-rope", "-v")
    result = program(*argv, "--device", "reference", "-c", "64")
    assert result.code == 0, result.err
    assert "K rotated as it is read" in result.err
    for device in ("auto", "cpu", "cuda"):
        result = program(*argv, "--device", device)
        assert (result.code, result.out) == (2, "")
        assert result.err_lines[-2:] == [
            "error: --kv-k-before-rope: kernels read K as it is after RoPE, and device "
            f"{device} has no others",
            "hint: leave it out, or compare with --device reference, which is slow",
        ]
