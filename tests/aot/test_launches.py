"""What the backend launches for whole models.

Launches take tensors of the GPU only, and ask the host for nothing while a step is recorded. All
are compiled when a model is loaded, and are fit for each GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import MagicMock

import pytest
import torch
import triton
import triton.language as tl
from gguf import GGMLQuantizationType as GGMLType

from localkv import LLM
from localkv.cache.ladder import DEFAULT_LADDER, Pair, parse_ladder
from localkv.cache.layout import PAGE_TOKENS
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.errors import LocalKVError
from localkv.kernels import select
from localkv.kernels.gpu import triton_backend as backend_module
from localkv.kernels.gpu.device_draw import device_draw
from localkv.kernels.gpu.launch import compile_together, launch
from localkv.loader.known_models import KNOWN_MODELS
from localkv.loader.weights import load_model
from localkv.sampling.params import SamplingParams
from support.aot.aot_report import MOST_SPILLS, SHARED_KIB, report, resources
from support.aot.paper_gpu import META, PaperDriver, PaperGpu, paper_driver, paper_gpu, paper_model
from support.dense_variants import MECHANISMS, dense_variant
from support.expert_models import EXPERT_MODELS
from support.hybrid_models import hybrid
from support.program import Program
from support.quick import quick
from support.random_model import VARIANTS, variant
from support.tiny_model import write_tiny_model

MOST_STACK = 128
"""Bytes of local memory of a thread, for registers that are spilled outside of loops."""
GREEDY = SamplingParams(temperature=0.0)
CHAINS = (
    GREEDY,
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_k=0),
    SamplingParams(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0),
    SamplingParams(temperature=0.8, top_k=0, min_keep=3),
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PaperGpu]:
    with paper_gpu(monkeypatch) as gpu:
        yield gpu


def place(engine: Engine, depth: int) -> None:
    """Forget all, and pretend that `depth` tokens are in the cache."""
    engine.reset()
    engine.cache.reserve(engine.sequence, depth, depth)
    engine.sequence.length = depth
    engine.cached_ids[:] = [0] * depth


def run_steps(engine: Engine, params: SamplingParams) -> None:
    draw = device_draw(params)
    assert draw is not None
    assert engine.loop is not None
    ids = list(engine.loop.tokens(engine.sequence, 7, draw, seed=1, number=0, limit=3))
    assert len(ids) == 3


WEIGHTS = (GGMLType.Q8_0, GGMLType.F16)
FEW_MODELS = [
    ("llama", GGMLType.F16),
    ("llama-biases", GGMLType.Q8_0),
    ("qwen3moe", GGMLType.Q8_0),
    ("gemma3", GGMLType.Q8_0),
    ("command-r", GGMLType.F16),
]
MODELS = dict.fromkeys([*FEW_MODELS, *zip(VARIANTS, itertools.cycle(WEIGHTS), strict=False)])


@pytest.mark.parametrize(("name", "weight_type"), quick(MODELS, FEW_MODELS))
def test_models(name: str, weight_type: GGMLType, gpu: PaperGpu, tmp_path: Path) -> None:
    """From the file to drawn tokens, for each architecture."""
    path = variant(name).write(tmp_path / "model.gguf", weight_type)
    model, _ = load_model(path, gpu.backend)
    pair = (
        ("q8_0", "fp8_e4m3_token") if model.config.groups[0].key_dim % 32 == 0 else ("f16", "bf16")
    )
    engine = Engine(model, CacheConfig(*pair, n_ctx=600), n_batch=128)
    engine.warm_up()
    assert all(kernel.ahead for kernel in gpu.kernels.values())
    for n_tokens in (1, 3, 20, 128):
        assert engine.evaluate([0] * n_tokens, logits="all").device == META
    assert len(gpu.kernels) > 10
    for params in CHAINS:
        run_steps(engine, params)
    assert engine.logits([1, 2, 3]).device.type == "cpu"


EXPERTS = ("step35", "laguna-m", "mimo2", "maple")
HYBRIDS = ("kimi-linear", "bailingmoe3", "nemotron_h_super")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MECHANISMS, *EXPERTS, *HYBRIDS])
def test_architectures(name: str, gpu: PaperGpu, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    if name in MECHANISMS:
        dense_variant(name).write(path, GGMLType.Q8_0)
    else:
        (EXPERT_MODELS[name] if name in EXPERTS else hybrid(name)).write(path)
    model, _ = load_model(path, gpu.backend)
    engine = Engine(model, CacheConfig("q8_0", "q4_0", n_ctx=600), n_batch=128)
    engine.warm_up()
    assert all(kernel.ahead for kernel in gpu.kernels.values())
    for n_tokens in (1, 3, 20, 128):
        assert engine.evaluate([0] * n_tokens, logits="all").device == META
    run_steps(engine, CHAINS[0])


@pytest.mark.parametrize(
    "ladder",
    [parse_ladder("f16,q8_0,q8_0/q4_0,q4_0"), pytest.param(DEFAULT_LADDER, marks=pytest.mark.slow)],
    ids=["rows", "groups"],
)
def test_a_budget(ladder: tuple[Pair, ...], gpu: PaperGpu) -> None:
    """Steps of all runs of pages that a text has, and what changes pages, are compiled ahead; while
    pages change, nothing asks the host."""
    model = paper_model(gpu, KNOWN_MODELS["llama-1b"].spec, "q8_0", 2)
    page = 2 * 8 * PAGE_TOKENS * 64 * 2 * 2
    cache = CacheConfig("f16", "f16", n_ctx=1500, kv_budget=3 * page, kv_ladder=ladder)
    engine = Engine(model, cache, n_batch=128)
    engine.warm_up()
    assert all(kernel.ahead for kernel in gpu.kernels.values())
    assert engine.loop is not None
    n_kernels, n_buckets = len(gpu.kernels), len(engine.loop._buckets)
    for _ in range(11):
        assert engine.evaluate([0] * 128, logits="last").device == META
        run_steps(engine, GREEDY)
    assert engine.cache.requantised.n_pages > 4
    assert (len(gpu.kernels), len(engine.loop._buckets)) == (n_kernels, n_buckets)


def test_a_step_that_asks_the_host_is_noticed(gpu: PaperGpu) -> None:
    x = torch.zeros(3, dtype=torch.int64, device=META)
    assert int(x[1]) == 1
    gpu.recording = True
    with torch.inference_mode():
        for ask in (lambda: int(x[1]), lambda: x[x[0]], lambda: x.cpu(), lambda: x + torch.ones(3)):
            with pytest.raises((AssertionError, RuntimeError)):
                ask()


@pytest.fixture
def chosen(gpu: PaperGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--device cuda` is the GPU on paper."""
    monkeypatch.setattr(select, "nvidia_driver_is_here", lambda: True)
    monkeypatch.setattr(select, "built_without_cuda", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "paper")
    monkeypatch.setattr(backend_module, "triton_backend", lambda device: gpu.backend)


@pytest.mark.usefixtures("chosen")
def test_llm(tmp_path: Path) -> None:
    """`LLM` runs as users call it, with tokens drawn on the GPU and on the host."""
    llm = LLM(write_tiny_model(tmp_path / "model.gguf"), device="cuda", cache_type_k="q4_0")
    settings: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"dynatemp_range": 0.5},
        {"repeat_penalty": 1.3},
    )
    for options in settings:
        done = llm.complete("The fox", max_tokens=4, ignore_eos=True, **options)
        assert done.usage.completion_tokens == 4


@pytest.mark.usefixtures("chosen")
def test_a_budget_beside_windows(tmp_path: Path) -> None:
    """Layers with a window have their own pages, while the pages of the others change."""
    path = variant("gemma3").write(tmp_path / "model.gguf", GGMLType.F16)
    llm = LLM(path, device="cuda", n_ctx=600, n_batch=128, kv_budget=1 << 20)
    engine = llm.engine
    assert engine.cache.ladder is not None
    assert len(engine.cache.pools) == 2
    for _ in range(4):
        assert engine.evaluate([0] * 128, logits="last").device == META
        run_steps(engine, GREEDY)


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize(
    "arguments",
    [
        ("complete", "-p", "The fox", "-n", "3", "-ctk", "fp8_e4m3_token", "-ctv", "f32"),
        ("bench", "-p", "16", "-n", "4", "-pg", "16,4", "-d", "0,32", "-r", "1"),
        ("perplexity", "-f", "text", "-c", "64", "--kl-divergence", "-ctk", "q4_0"),
        ("perplexity", "-f", "text", "-c", "64", "--prefill-exact"),
        ("perplexity", "-f", "text", "-c", "64", "--calibrate-kv", "scales"),
    ],
)
def test_commands(arguments: tuple[str, ...], program: Program, tmp_path: Path) -> None:
    """Their values mean nothing, but they bring none to the wrong device."""
    (tmp_path / "text").write_text("The fox said hello to the owl, and the owl to the fox. " * 20)
    command, *options = (str(tmp_path / a) if a in ("text", "scales") else a for a in arguments)
    model = write_tiny_model(tmp_path / "model.gguf")
    result = program(command, "-m", model, *options, "--device", "cuda")
    assert result.code == 0, result.err
    assert "paper" in result.out + result.err or command == "perplexity"


EDGES = sorted({at + by for at in range(16, 144, 16) for by in (-1, 0, 1)})
"""Around all multiples of a tile's tokens."""
WAITS = [
    (90, 132, "llama-8b", "q4_0", ("q8_0", "q4_0"), 20000),
    (89, 24, "llama-8b", "q4_K", ("f16", "f16"), 20000),
    (120, 170, "llama-1b", "q8_0", ("fp8_e4m3", "q5_1"), 20000),
    (80, 108, "llama-70b", "f16", ("q4_0", "q4_0"), 20000),
    (90, 132, "qwen3-30b-a3b", "q4_K", ("q8_0", "q8_0"), 20000),
    (100, 148, "llama-8b", "q4_0", ("q8_0", "q4_0"), 1000),
    (86, 28, "llama-1b", "q6_K", ("bf16", "q4_0"), 700),
    (90, 132, "gemma3-1b", "q4_0", ("q8_0", "q4_0"), 20000),
]


@pytest.mark.parametrize(
    ("arch", "n_processors", "shape", "weights", "pair", "n_ctx"),
    quick(WAITS, [WAITS[2], WAITS[5]]),
)
def test_nothing_is_compiled_while_a_user_waits(
    arch: int,
    n_processors: int,
    shape: str,
    weights: str,
    pair: tuple[str, str],
    n_ctx: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts of any length, at any depth, and steps use the kernels that `warm_up` has used.

    Of every length with the first of the GPUs and models; with others of those around which
    launchers choose other kernels."""
    lengths = range(1, 140) if (arch, shape) == (90, "llama-8b") else (*range(1, 12), *EDGES)
    deep = (1, 2, 3, 4, 5, 8, 9, 100, 512) if arch in (90, 120) else (1, 4, 9, 512)
    with paper_gpu(monkeypatch, arch, n_processors) as gpu:
        # the sixth layer of Gemma 3 is the first without a window
        model = paper_model(
            gpu, KNOWN_MODELS[shape].spec, weights, 6 if shape == "gemma3-1b" else 2
        )
        engine = Engine(model, CacheConfig(*pair, n_ctx=n_ctx))
        engine.warm_up()
        assert all(kernel.ahead for kernel in gpu.kernels.values())
        known = set(gpu.kernels)
        for n_tokens in (*lengths, 200, 255, 256, 257, 300, 400, 511, 512):
            place(engine, 0)
            engine.evaluate([0] * n_tokens)
            assert set(gpu.kernels) == known, f"{n_tokens} tokens"
        for depth in (1, 100, 255, 256, 300, 600, 900, 1500, 3000, 7000, 12345, 19000):
            for n_tokens in deep:
                if depth + n_tokens > n_ctx:
                    continue
                place(engine, depth)
                engine.evaluate([0] * n_tokens)
                assert set(gpu.kernels) == known, f"{n_tokens} tokens behind {depth}"
            if depth + 3 <= n_ctx:
                place(engine, depth)
                run_steps(engine, GREEDY)
                assert set(gpu.kernels) == known


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "n_layers"),
    [("gpt-oss-20b", 3), ("qwen35-0.8b", 5), ("lfm2-1.2b", 4), ("deepseek-v2-lite", 3)],
)
def test_layers_of_several_kinds(shape: str, n_layers: int, gpu: PaperGpu) -> None:
    """What prompts and recorded steps of a model launch was compiled when it was loaded."""
    model = paper_model(gpu, KNOWN_MODELS[shape].spec, "q8_0", n_layers)
    engine = Engine(model, CacheConfig("q8_0", "q8_0", n_ctx=2000))
    engine.warm_up()
    assert all(kernel.ahead for kernel in gpu.kernels.values())
    known = set(gpu.kernels)
    for n_tokens in (1, 3, 8, 9, 40, 128, 300, 512):
        engine.reset()
        engine.evaluate([0] * n_tokens)
        assert set(gpu.kernels) == known, f"{n_tokens} tokens"
    run_steps(engine, GREEDY)
    assert set(gpu.kernels) == known


def test_kernels_of_all_layers_are_compiled_together(gpu: PaperGpu) -> None:
    """Though only some layers are launched for it: here the third is the first of its kind."""
    others = {f"blk.{i}.ffn_down.weight": "q6_K" for i in (2, 5, 7)}
    model = paper_model(gpu, KNOWN_MODELS["llama-1b"].spec, "q4_K", 8, others)
    assert len(model.one_of_each_layer().weights.layers) == 4
    Engine(model, CacheConfig("q8_0", "q4_0", n_ctx=600)).warm_up()
    products = [k for k in gpu.kernels.values() if k.name == "linear_kernel"]
    assert len(products) > 10
    assert all(kernel.ahead for kernel in gpu.kernels.values())


@triton.jit
def add_kernel(x_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x_ptr + i, tl.load(x_ptr + i) + 1)


@triton.jit
def wrong_kernel(x_ptr, N: tl.constexpr):
    tl.static_assert(N == 0)
    tl.store(x_ptr, N)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> PaperDriver:
    driver = paper_driver(90)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return driver


def test_compile_together(driver: PaperDriver) -> None:
    """By Triton itself, and without a launch, which would need a GPU."""
    x = torch.empty(64, device=META)

    def run() -> None:
        for n in (32, 64, 32):
            launch(add_kernel, (1,), x, N=n)

    compile_together(run)
    compiled = add_kernel.device_caches[driver.device][0].values()
    assert len(compiled) == 2
    assert all(kernel.asm["cubin"] for kernel in compiled)


@pytest.mark.usefixtures("driver")
def test_what_can_not_be_compiled_is_an_error() -> None:
    """One launch fails, and each launch fails."""
    x = torch.empty(64, device=META)
    compile_together(lambda: launch(wrong_kernel, (1,), x, N=64))
    for _ in range(2):
        with pytest.raises(triton.CompilationError):
            launch(wrong_kernel, (1,), x, N=64)


def test_a_compiler_that_a_launch_needs_is_named() -> None:
    """Triton 3.6 fails so; other errors stay what they are."""
    kernel = MagicMock()
    kernel.__getitem__.return_value.side_effect = RuntimeError("Failed to find C compiler.")
    with pytest.raises(LocalKVError, match="needs a C compiler"):
        launch(kernel, (1,))
    kernel.__getitem__.return_value.side_effect = RuntimeError("device-side assert triggered")
    with pytest.raises(RuntimeError, match="device-side assert"):
        launch(kernel, (1,))


def test_compile_together_is_given_up(driver: PaperDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits, or by the function, as where memory runs out: later all is compiled."""
    monkeypatch.setattr("localkv.kernels.gpu.launch.usable_cores", lambda: 1)
    x = torch.empty(64, device=META)

    def run() -> None:
        for n in (128, 256, 512, 1024):
            launch(add_kernel, (1,), x, N=n)

    def fail() -> None:
        run()
        raise LocalKVError("full")

    with monkeypatch.context() as patch:
        patch.setattr(triton.runtime._async_compile, "as_completed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compile_together(run)
    for _ in range(2):
        with pytest.raises(LocalKVError, match="full"):
            compile_together(fail)
    compile_together(run)
    compiled = add_kernel.device_caches[driver.device][0].values()
    assert len([kernel.asm["cubin"] for kernel in compiled]) == 4


def interrupted(futures: object) -> NoReturn:
    raise KeyboardInterrupt


LOADED = [
    (90, "llama-8b", "q4_0", ("q8_0", "q4_0")),
    (86, "qwen3-30b-a3b", "q4_K", ("q4_0", "fp8_e4m3")),
    (120, "llama-1b", "q8_0", ("f16", "f16")),
]


@pytest.mark.parametrize(("arch", "shape", "weights", "pair"), quick(LOADED, (), LOADED[1:2]))
@pytest.mark.long
def test_all_that_a_model_launches_is_compiled(
    arch: int, shape: str, weights: str, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the types, alignments and tiles that the launchers choose: nothing is spilled in a loop,
    and a block has room on the GPU."""
    with paper_gpu(monkeypatch, arch) as gpu:
        engine = Engine(
            paper_model(gpu, KNOWN_MODELS[shape].spec, weights, 2), CacheConfig(*pair, n_ctx=9000)
        )
        engine.warm_up()
    kernels = list(gpu.kernels.values())
    assert {"prefill_kernel", "decode_kernel", "store_kernel"} <= {k.name for k in kernels}
    for kernel in kernels:
        compiled = kernel.compile()
        takes = resources(compiled)
        assert takes["STACK"] <= MOST_STACK, kernel.name
        assert takes["STACK"] == 0 or report(compiled).n_local <= MOST_SPILLS, kernel.name
        assert compiled.metadata.shared <= 1024 * SHARED_KIB[arch], kernel.name
        assert 32 * kernel.options["num_warps"] * takes["REG"] <= 65536, kernel.name
