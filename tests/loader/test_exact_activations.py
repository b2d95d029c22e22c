"""`activations="exact"`: a model computes as if its file were of float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from localkv import LLM
from localkv.arch.spec import ModelSpec
from localkv.cache.layout import SegmentSpec
from localkv.config import CacheConfig
from localkv.errors import UsageError, byte_size
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.gguf_file import open_gguf
from localkv.loader.gguf_header import TensorInfo
from localkv.loader.model_header import model_spec
from localkv.loader.smoothing import Smoothing
from localkv.loader.weights import load_model
from localkv.memory.draft_file import DraftFile
from localkv.memory.plan import ModelMemory, requantised
from localkv.simd.cpu_features import HAS_BFLOAT_DOTS, HAS_BYTE_DOTS
from support.expert_models import EXPERT_MODELS
from support.f32_copy import f32_copy
from support.forward import new_cache, run
from support.held_bytes import held
from support.hybrid_models import hybrid
from support.program import Program
from support.quick import quick
from support.random_gemma import RandomGemma
from support.random_model import variant

IDS = [(i * 37 + 11) % 96 for i in range(24)]
Write = Callable[[Path], Path]


def of_type(name: str, kind: GGMLType) -> Write:
    return lambda path: variant(name).write(path, kind)


FILES: dict[str, Write] = {
    "q4_0": of_type("llama", GGMLType.Q4_0),
    "q8_0": of_type("llama", GGMLType.Q8_0),
    "bf16": of_type("llama", GGMLType.BF16),
    "tied q4_0": of_type("llama-tied", GGMLType.Q4_0),
    "tied f16": of_type("llama-tied", GGMLType.F16),
    "fused q5_1": of_type("llama-fused-qkv", GGMLType.Q5_1),
    "experts q8_0": of_type("qwen2moe", GGMLType.Q8_0),
    "experts f16": of_type("llama-moe", GGMLType.F16),
    "one stack of gate and up": EXPERT_MODELS["mellum"].write,
    "latents": EXPERT_MODELS["deepseek2-ocr"].write,
    "recurrent": hybrid("nemotron_h_moe").write,
}
"""Files by what is particular to them."""


def exact(path: Path, **options: Any) -> LLM:
    return LLM(path, n_ctx=64, activations="exact", progress=False, **{"device": "cpu", **options})


@pytest.mark.parametrize("name", quick(list(FILES), ["q8_0", "tied q4_0", "experts f16"]))
def test_logits_and_memory_are_those_of_a_float32_file(name: str, tmp_path: Path) -> None:
    path = FILES[name](tmp_path / "model.gguf")
    whole = LLM(f32_copy(path, tmp_path / "f32.gguf"), device="cpu", n_ctx=64, progress=False)
    llm = exact(path)
    assert np.array_equal(llm.logits(IDS), whole.logits(IDS))
    words = llm.kernels["products"]
    assert "float32 activations" in words
    assert not any(word in words for word in ("bit", "rounded"))
    assert (llm.memory.weights_mapped, llm.memory.weights_allocated) == held(llm)
    assert llm.memory.weights_decoded == llm.memory.weights_allocated


@pytest.mark.parametrize("options", [{"use_mmap": False}, {"mlock": True}])
def test_other_ways_of_loading_give_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    path = FILES["tied q4_0"](tmp_path / "model.gguf")
    llm, plain = exact(path, **options), exact(path)
    assert np.array_equal(llm.logits(IDS), plain.logits(IDS))
    assert llm.memory.weights_decoded == plain.memory.weights_decoded > 0
    assert llm.memory.weights == plain.memory.weights
    assert (llm.memory.weights_mapped > 0) == ("use_mmap" not in options)


def test_a_model_that_drafts_keeps_its_types(tiny_model: Path) -> None:
    gguf = open_gguf(tiny_model)
    memory = ModelMemory(tuple(gguf.tensors.values()), model_spec(gguf), "cuda", 512, 1)
    memory = replace(memory, activations="exact")
    draft = DraftFile.of(tiny_model, gguf, "f16", "f16").memory(memory)
    plan = replace(memory, draft=draft).plan(CacheConfig(n_ctx=256))
    assert plan.weights_decoded > 0
    assert plan.draft is not None
    assert plan.draft.weights_decoded == 0
    assert plan.draft.weights < plan.weights


def test_smoothed_weights_are_decoded(tmp_path: Path) -> None:
    """Smoothing multiplies with powers of two, so logits stay the same bits."""
    path = FILES["q4_0"](tmp_path / "model.gguf")
    gguf = open_gguf(path)
    halves = tuple((exponent,) * 64 for exponent in (1, -2))
    smoothing = Smoothing(0.5, {0: halves}, {})
    decoded = {name for name, tensor in gguf.tensors.items() if len(tensor.shape) > 1}
    models = [
        load_model(gguf, cpu_backend(), smoothing=one, decoded=decoded)[0]
        for one in (None, smoothing)
    ]
    first, second = (
        run(model, new_cache(model, SegmentSpec("f32", "f32")), IDS) for model in models
    )
    assert np.array_equal(first, second)
    weights = [model.weights.layers[0].mixer.attn_k.weight.decode() for model in models]
    assert np.array_equal(weights[1][:64], weights[0][:64] / 2)


def test_weights_that_round_nothing_stay_in_the_file(tmp_path: Path) -> None:
    llm = exact(FILES["tied f16"](tmp_path / "f16.gguf"))
    assert llm.memory.weights_decoded == llm.memory.weights_allocated == 0
    llm = exact(FILES["q4_0"](tmp_path / "q4_0.gguf"), device="reference")
    assert llm.memory.weights_decoded == llm.memory.weights_allocated == 0


def decoded_types(
    tensors: tuple[TensorInfo, ...], config: ModelSpec, backend: str
) -> dict[str, bool]:
    """Whether matrices of each type are decoded."""
    memory = ModelMemory(tensors, config, backend, 512, 1, activations="exact")
    return {t.format.name: t.name in memory.decoded for t in tensors if len(t.shape) > 1}


def test_what_is_decoded_by_device(tmp_path: Path) -> None:
    for kind in ("q4_0", "q8_0", "f16", "bf16", "f32"):
        config, tensors = header(
            variant("llama").write(tmp_path / "m.gguf", GGMLType[kind.upper()])
        )
        found = {
            device: decoded_types(tensors, config, device)[kind]
            for device in ("cpu", "cuda", "reference")
        }
        on_cpu = {"q4_0": HAS_BYTE_DOTS, "q8_0": HAS_BYTE_DOTS, "bf16": HAS_BFLOAT_DOTS}
        assert found == {
            "cpu": on_cpu.get(kind, False), "cuda": kind != "f32", "reference": False
        }  # fmt: skip
    config, tensors = header(variant("llama-moe").write(tmp_path / "experts.gguf"))
    for device in ("cpu", "cuda", "reference"):
        assert decoded_types(tensors, config, device)["f16"], "ggml's rounding, in experts"


def header(path: Path) -> tuple[ModelSpec, tuple[TensorInfo, ...]]:
    gguf = open_gguf(path)
    return model_spec(gguf), tuple(gguf.tensors.values())


def test_rows_that_are_looked_up_stay_packed(tmp_path: Path) -> None:
    """No product reads them: an embedding beside an output matrix, and rows of tokens."""
    for write, names in (
        (FILES["q4_0"], {"token_embd.weight"}),
        (RandomGemma().write, {"per_layer_token_embd.weight"}),
    ):
        config, tensors = header(write(tmp_path / "model.gguf"))
        tensors = requantised(tensors, "q8_0")
        memory = ModelMemory(tensors, config, "cuda", 512, 1, activations="exact")
        matrices = {t.name for t in tensors if len(t.shape) > 1 and t.format.name != "f32"}
        assert matrices - memory.decoded == names


def test_the_plan_says_what_is_decoded(program: Program, tmp_path: Path) -> None:
    path = FILES["tied q4_0"](tmp_path / "model.gguf")
    llm = exact(path)
    argv = ("plan", "-m", path, "--activations", "exact", "-dev", "cpu", "-c", 64)
    planned = json.loads(program(*argv, "--json").out)
    for name in ("weights_mapped", "weights_allocated", "weights_decoded"):
        assert planned[name] == getattr(llm.memory, name)
    f16 = next(quant for quant in planned["quants"] if quant["type"] == "f16")
    assert f16["bytes"] < planned["weights_decoded"], "F16 takes no part of this"
    words = f"{byte_size(llm.memory.weights_decoded)} of them decoded to float32"
    shown = program(*argv).out
    assert words in shown
    assert "--activations exact" in shown


def test_other_names_are_refused(program: Program, tmp_path: Path) -> None:
    path = FILES["q4_0"](tmp_path / "model.gguf")
    with pytest.raises(UsageError, match="unknown activations 'q8'"):
        LLM(path, activations="q8")
    report = program("plan", "-m", path, "--activations", "q8")
    assert (report.code, report.err) == (
        2, "error: --activations: 'q8' is not one of auto, exact\n"
    )  # fmt: skip
