"""RoPE options against llama.cpp's logits, in plans, and in what is kept of a model."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localkv.arch.spec import RopeSpec
from localkv.cache.profile import read_profile, write_profile
from localkv.config import Overrides, RopeOptions
from localkv.errors import UsageError
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import reference_backend
from localkv.kernels.rope import rope_frequencies, rope_table
from localkv.llm import LLM
from localkv.loader.gguf_file import open_gguf
from localkv.loader.model_fingerprint import measured_hash, model_fingerprint, model_hash
from localkv.loader.model_header import model_spec, with_overrides
from support.forward import logits, nmse
from support.own_models import IDS, N_VOCAB, SHOWN
from support.paths import ROOT
from support.program import Program
from support.random_model import VARIANTS, RandomModel
from support.rope_options import CASES, YARN, write_case

STORED = json.loads((ROOT / "tests" / "data" / "llama_cpp_rope.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_logits(name: str, tmp_path: Path) -> None:
    rows = np.frombuffer(base64.b64decode(STORED[name]), np.float32).reshape(-1, N_VOCAB)
    path = write_case(name, tmp_path / "model.gguf")
    gguf = with_overrides(open_gguf(path), Overrides(rope=RopeOptions(**CASES[name][1])))
    for backend in (reference_backend(), cpu_backend()):
        assert nmse(logits(gguf, backend, IDS, "f32", chunk=17)[list(SHOWN)], rows) <= 1e-6
    without = logits(path, reference_backend(), IDS, "f32")[list(SHOWN)]
    assert nmse(without, rows) > 1e-4  # the options change something


def _context(name: str, tmp_path: Path, **options: Any) -> int:
    path = RandomModel(**VARIANTS[name]).write(tmp_path / "model.gguf")
    return model_spec(
        with_overrides(open_gguf(path), Overrides(rope=RopeOptions(**options)))
    ).n_ctx_train


def test_scaling_makes_the_trained_context_longer(tmp_path: Path) -> None:
    trained = _context("qwen3", tmp_path)
    assert _context("qwen3", tmp_path, rope_scaling="yarn", rope_scale=4.0) == 4 * trained
    assert _context("qwen3", tmp_path, **YARN) == 64
    assert _context("qwen3", tmp_path, rope_freq_scale=0.5) == 2 * trained
    assert _context("qwen3", tmp_path, rope_freq_base=1e6) == trained


def test_distances_are_exact_to_the_end_of_a_scaled_context() -> None:
    """Qwen 3 with YaRN: from 131,071 backwards a query sees keys as from the beginning, where
    float32 angles would be off by 131,071 times their rounding, 4e-3."""
    rope = RopeSpec(128, 1e6, scaling="yarn", factor=4.0, original_context_length=32768)
    rope = replace(rope, yarn_ext_factor=1.0)
    freqs, arrays = rope_frequencies(rope), NumpyArrays()

    def rotated(positions: np.ndarray) -> np.ndarray:
        table = rope_table(freqs, positions, rope, arrays)
        return table.cos.astype(np.float64) + 1j * table.sin

    for back in (1, 100, 32_767, 65_000):
        near, far = (rotated(np.array([p, p + back])) for p in (5, 131_071 - back))
        products = [(rows[1] * rows[0].conj()) for rows in (near, far)]
        assert np.abs(products[0] - products[1]).max() < 4e-7


def test_defaults_of_llama_cpp_leave_what_the_file_says() -> None:
    zeros = dict.fromkeys(("rope_scale", "rope_freq_base", "rope_freq_scale"), 0.0)
    factors = ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_slow", "yarn_beta_fast")
    assert not RopeOptions(**zeros, yarn_orig_ctx=0, **dict.fromkeys(factors, -1.0)).keys
    assert set(RopeOptions(yarn_ext_factor=0.0).keys) == {"rope.scaling.yarn_ext_factor"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_scaling": "cubic"}, "unknown RoPE scaling 'cubic'"),
        ({"rope_scale": 2.0, "rope_freq_scale": 0.5}, "both scale positions"),
        ({"rope_scale": -2.0}, "--rope-scale -2.0 is out of range"),
        ({"rope_freq_scale": 1e9}, "--rope-freq-scale 1000000000.0 is out of range"),
        ({"rope_freq_base": float("nan")}, "--rope-freq-base nan is out of range"),
        ({"yarn_ext_factor": 99.0}, "--yarn-ext-factor 99.0 is out of range"),
    ],
)
def test_a_value_that_makes_no_sense(
    options: dict[str, Any], message: str, tiny_model: Path
) -> None:
    with pytest.raises(UsageError) as raised:
        with_overrides(open_gguf(tiny_model), Overrides(rope=RopeOptions(**options)))
    assert message in str(raised.value)


def test_a_saved_state_refuses_other_options(tiny_model: Path, tmp_path: Path) -> None:
    state = tmp_path / "text.state"
    with LLM(tiny_model, n_ctx=64, device="cpu", rope_scale=2.0) as llm:
        llm.complete("one two three", max_tokens=2)
        llm.save_state(state)
        assert llm.load_state(state)
    with (
        LLM(tiny_model, n_ctx=64, device="cpu") as llm,
        pytest.raises(UsageError, match="rotated by other RoPE parameters") as raised,
    ):
        llm.load_state(state)
    assert raised.value.hint is not None
    assert "--rope-scale" in raised.value.hint


def test_no_warning_within_the_scaled_context(tiny_model: Path) -> None:
    beyond = "longer than the 256 the model was trained for"
    with LLM(tiny_model, n_ctx=512, device="cpu", **{**YARN, "yarn_orig_ctx": None}) as llm:
        assert not any("trained for" in line for line in llm.warnings)
    with LLM(tiny_model, n_ctx=512, device="cpu", rope_freq_base=2e4) as llm:
        assert any(beyond in line for line in llm.warnings)


def test_measurements_are_kept_apart_by_what_options_replace(tiny_model: Path) -> None:
    gguf = open_gguf(tiny_model)
    plain, fingerprint = model_hash(gguf), model_fingerprint(gguf)
    assert measured_hash(gguf) == plain
    n_layers = gguf.metadata.integer("llama.block_count")
    for options, is_other, is_another_model in (
        (Overrides({"tokenizer.ggml.add_bos_token": False}), False, False),
        (Overrides({"llama.block_count": n_layers}), False, False),
        (Overrides({"llama.attention.layer_norm_rms_epsilon": 1e-3}), True, True),
        (Overrides(rope=RopeOptions(rope_scale=2.0)), True, False),
    ):
        changed = with_overrides(gguf, options)
        assert model_hash(changed) == plain
        assert (measured_hash(changed) != plain) == is_other
        assert (model_fingerprint(changed) != fingerprint) == is_another_model


def test_a_profile_is_measured_with_the_options(tiny_model: Path, program: Program) -> None:
    scaled, plain = (tiny_model.with_name(f"{name}.json") for name in ("scaled", "plain"))
    few = ("--tokens", "64", "--types", "q4_0", "--kv-tail", "0", "--smooth", "0")
    options = ("-m", tiny_model, "--device", "cpu", "--rope-scale", "2")
    done = program("calibrate", *options, *few, "-o", scaled)
    assert done.code == 0, done.err
    with LLM(tiny_model, n_ctx=64, device="cpu", kv_profile=scaled, rope_scale=2.0) as llm:
        assert llm.kv_types is not None
    with pytest.raises(UsageError, match=r"measured with other options"):
        LLM(tiny_model, n_ctx=64, device="cpu", kv_profile=scaled)
    write_profile(plain, replace(read_profile(scaled), model=model_hash(open_gguf(tiny_model))))
    with pytest.raises(UsageError, match="measured without the options that replace"):
        LLM(tiny_model, n_ctx=64, device="cpu", kv_profile=plain, rope_scale=2.0)


def test_a_model_without_rope(tmp_path: Path) -> None:
    from support.dense_variants import dense_variant

    path = dense_variant("gpt2").write(tmp_path / "model.gguf")
    with pytest.raises(UsageError, match="has no RoPE that options could change"):
        model_spec(with_overrides(open_gguf(path), Overrides(rope=RopeOptions(rope_scale=2.0))))
