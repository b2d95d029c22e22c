"""Whole models on the backend's table, against the reference's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType
from torch.utils._python_dispatch import TorchDispatchMode

from localkv.arch import ARCHS
from localkv.cache.layout import SegmentSpec
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.kernels.gpu.device_draw import device_draw
from localkv.kernels.gpu.triton_backend import triton_backend
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.gguf_file import open_gguf, read_metadata
from localkv.loader.model_header import model_spec
from localkv.loader.weights import load_model
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.cache_types import scales_of
from support.dense_variants import MECHANISMS, dense_variant
from support.expert_models import EXPERT_MODELS
from support.expert_models import IDS as EXPERT_IDS
from support.f32_copy import f32_copy
from support.forward import CONFORMANCE_IDS, logits, new_cache, nmse, run
from support.quick import quick
from support.random_gemma import RandomGemma
from support.random_model import variant
from support.summary import Summary

pytestmark = pytest.mark.usefixtures("large_tiles")

IDS = [(i * 37 + 11) % 96 for i in range(12)]


@pytest.mark.parametrize(
    ("name", "weight_type"),
    quick(
        [
            ("llama-tied", GGMLType.Q8_0),
            ("llama-fused-qkv", GGMLType.Q4_0),
            ("llama-biases", GGMLType.Q4_1),
            ("qwen3", GGMLType.F16),
            ("qwen2moe", GGMLType.Q8_0),
            ("qwen3moe", GGMLType.F32),
            ("gemma3", GGMLType.Q8_0),
            ("command-r", GGMLType.Q8_0),
        ],
        [("llama-biases", GGMLType.Q4_1), ("qwen3moe", GGMLType.F32)],
    ),
)
def test_models(name: str, weight_type: GGMLType, tmp_path: Path) -> None:
    """A prompt, and tokens one at a time."""
    path = variant(name).write(tmp_path / "model.gguf", weight_type)
    want = logits(path, reference_backend(torch.float64), IDS, "f32")
    exact = weight_type == GGMLType.F32
    assert nmse(logits(path, triton_backend("cpu"), IDS, "f32"), want) < (1e-9 if exact else 1e-5)
    assert nmse(logits(path, triton_backend("cpu"), IDS[:3], "f32", chunk=1), want[:3]) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["deci", "gpt2", "gptneox", "granite_swa", "olmo", "openelm", "plamo3"]
)
def test_architectures_without_conformance_data(name: str, tmp_path: Path) -> None:
    path = dense_variant(name).write(tmp_path / "model.gguf", GGMLType.F32)
    want = logits(path, reference_backend(torch.float64), IDS, "f32")
    assert nmse(logits(path, triton_backend("cpu"), IDS, "f32"), want) < 1e-9
    assert nmse(logits(path, triton_backend("cpu"), IDS[:3], "f32", chunk=1), want[:3]) < 1e-9


EXPERTS = [
    "dbrx",
    "grok",
    "muse-glimmer",
    "phimoe",
    "step35",
    "laguna",
    "laguna-m",
    "mimo2",
    "maple",
    "spark2_5",
]
"""Experts beside biases of norms, gates of heads, heads of V that are narrower than K's, limits."""


@pytest.mark.parametrize("name", quick(EXPERTS, ["mimo2"]))
def test_gates_of_heads_narrow_values_and_limits(name: str, tmp_path: Path) -> None:
    """A prompt and tokens behind it. A value at an edge of a packed cache's codes may send a token
    to another expert, so the median row counts there."""
    path = f32_copy(EXPERT_MODELS[name].write(tmp_path / "f16.gguf"), tmp_path / "f32.gguf")
    ids = EXPERT_IDS[:24]
    for pair in (("f32", "f32"), ("q8_0", "q8_0")):
        want, got = (
            run(model, new_cache(model, SegmentSpec(*pair)), ids, chunk=22)
            for model in (
                load_model(path, backend)[0]
                for backend in (reference_backend(torch.float64), triton_backend("cpu"))
            )
        )
        if pair[0] == "f32":
            assert nmse(got, want) < 1e-9
        rows = [nmse(one, other) for one, other in zip(got, want, strict=True)]
        assert np.median(rows) < 5e-4


FAMILIES = [("q8_0", "q4_0"), ("fp8_e4m3", "fp8_e5m2"), ("fp8_e4m3_token", "fp8_e4m3_token")]
"""Blocks, fp8, and rows with a scale: the ways in which caches are packed."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_packed_caches(name: str, tmp_path: Path) -> None:
    """Each mechanism, in one family of types or another, through the reference's packed cache."""
    path = dense_variant(name).write(tmp_path / "model.gguf", GGMLType.F32)
    pair = FAMILIES[list(MECHANISMS).index(name) % len(FAMILIES)]
    want, got = (
        run(model, new_cache(model, SegmentSpec(*pair)), IDS, chunk=9)
        for model in (
            load_model(path, backend)[0]
            for backend in (reference_backend(torch.float64), triton_backend("cpu"))
        )
    )
    # products in fp16 move values by 3e-4, and those at an edge between codes then get the other
    # one; quantisation itself costs 5e-3 to 2e-2, and a mechanism that is left out more
    assert nmse(got, want) < 5e-4


TOKENS = {"gpt-oss": 78, "exaone4-swa": 30}
"""Fewer where a token that follows is sent to one of two experts that are 2e-4 apart, and where
64 layers take long; other files have their windows."""


@pytest.mark.parametrize("arch", quick(ARCHS, ["command-r"]))
@pytest.mark.long
def test_llama_cpp_logits(arch: str, conformance: Path, summary: Summary) -> None:
    """Every architecture reads a prompt, and a few tokens behind it.

    They reach beyond a window of 64, if it has one, and a block of 64 of a recurrent layer.
    """
    files = [
        path
        for path in sorted((conformance / "archs2").glob("*.gguf"))
        if read_metadata(path).string("general.architecture") == arch
    ]
    if not files:
        pytest.skip(f"no conformance data of {arch}")
    found = {}
    for path in files:
        spec = model_spec(open_gguf(path))
        looks_back = spec.states or any(group.reach for group in spec.groups)
        n, chunk = (80, 72) if looks_back else (24, 20)
        n = TOKENS.get(path.stem.removesuffix("-mxfp4"), n)
        want = np.fromfile(path.with_suffix(".logits.f32"), np.float32).reshape(300, -1)[:n]
        ids = [i % want.shape[1] for i in CONFORMANCE_IDS[:n]]
        got = logits(path, triton_backend("cpu"), ids, "f16", chunk=chunk)
        found[path.stem] = nmse(got, want)
    summary("NMSE against llama.cpp, Triton's interpreter", found)
    assert max(found.values()) <= 2e-6, found


class WithoutHost(TorchDispatchMode):
    """Refuses what can't be recorded: numbers that the host asks for, and those it brings."""

    REFUSED = ("_local_scalar_dense", "item", "nonzero", "masked_select", "lift_fresh", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.REFUSED, f"a step can't be recorded: {name}"
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3moe", "llama-tied"])
def test_a_step_asks_the_host_for_nothing(name: str, tmp_path: Path) -> None:
    """Routing, slots, page tables and draws included."""
    path = variant(name).write(tmp_path / "model.gguf", GGMLType.Q8_0)
    model, _ = load_model(path, triton_backend("cpu"))
    engine = Engine(model, CacheConfig("q8_0", "q4_0", n_ctx=300))
    engine.evaluate(IDS)
    loop = engine.loop
    assert loop is not None
    bucket = loop._place([engine.sequence], [engine.sequence.length])
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)):
        draw = device_draw(params)
        assert draw is not None
        with WithoutHost():
            loop._run(bucket, draw)
            loop._run(bucket, None)
    with pytest.raises(AssertionError, match="recorded"), WithoutHost(), torch.inference_mode():
        int(torch.zeros(1))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gemma4", "gemma3n"])
def test_rows_of_tokens_are_looked_up_before_a_step(arch: str, tmp_path: Path) -> None:
    path = RandomGemma(arch).write(tmp_path / "model.gguf")
    engines = []
    for backend in (triton_backend("cpu"), reference_backend()):
        model, _ = load_model(path, backend)
        engines.append(Engine(model, CacheConfig("f32", "f32", n_ctx=256)))
        engines[-1].evaluate(IDS[:3])
    ours, theirs = engines
    for token in IDS[3:5]:
        want = theirs.evaluate([token], generated=True)
        torch.testing.assert_close(ours.evaluate([token], generated=True), want, rtol=0, atol=1e-4)
    assert ours.loop is not None
    bucket = ours.loop._place([ours.sequence], [ours.sequence.length])
    with WithoutHost():
        ours.loop._run(bucket, None)


def test_a_tied_embedding_is_held_once(tmp_path: Path) -> None:
    path = variant("llama-tied").write(tmp_path / "model.gguf", GGMLType.Q8_0)
    model, _ = load_model(path, triton_backend("cpu"))
    assert model.weights.output.weight is model.weights.token_embd
    assert not model.weights.token_embd.reads_rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("type_k", "type_v"),
    [("f16", "fp8_e5m2_head"), ("q8_0", "q4_0"), ("q4_1", "bf16"), ("fp8_e4m3_token", "iq4_nl")],
)
def test_generation_through_a_packed_cache(type_k: str, type_v: str, tmp_path: Path) -> None:
    """Prompts in chunks, recorded steps and draws, across a page: the reference's tokens."""
    path = variant("llama-tied").write(tmp_path / "model.gguf", GGMLType.F32)
    texts = []
    for backend in (reference_backend(), triton_backend("cpu")):
        model, _ = load_model(path, backend)
        scales = scales_of(model.config, 3.0, 5.0) if "fp8_e5m2_head" in (type_k, type_v) else None
        config = CacheConfig(type_k, type_v, n_ctx=300, kv_scales=scales)
        engine = Engine(model, config, n_batch=200)
        greedy = Sampler(SamplingParams(temperature=0.0), n_vocab=model.config.n_vocab)
        prompt = [(i * 31 + 7) % 96 for i in range(253)]
        texts.append(
            list(
                BatchEngine(engine).generate(
                    prompt, GenerationOptions(sampler=greedy, max_tokens=6)
                )
            )
        )
    assert texts[0] == texts[1]
