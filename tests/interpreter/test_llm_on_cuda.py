"""`LLM(path, device="cuda")` as users call it, on a GPU that is Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localkv import LLM
from localkv.cache.kv_cache import KVCache
from localkv.config import CacheConfig
from localkv.errors import DoesNotFitError, LocalKVError
from localkv.kernels import select
from localkv.kernels.gpu import triton_backend as module
from localkv.kernels.gpu.device import CudaMemory
from localkv.kernels.select import select_backend
from localkv.loader.gguf_file import open_gguf
from localkv.loader.weights import checked_spec
from localkv.memory.plan import ModelMemory
from localkv.model import Transformer
from support.forward import nmse
from support.gguf_bytes import spoil
from support.program import Program
from support.quick import quick
from support.tiny_model import write_tiny_model

PAGE_BYTES = 128 << 10
"""A page of the tiny model's two layers in f16."""
PROMPT = "Once upon a time there was a small fox who lived near the river."


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch, large_tiles: None) -> None:
    """A GPU, as far as the choice of a backend can see; its memory is the CPU's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (64 << 30, 80 << 30))
    backend = module.triton_backend
    memory = CudaMemory(torch.device("cpu"))
    monkeypatch.setattr(
        module, "triton_backend", lambda device: replace(backend("cpu"), memory=memory)
    )
    monkeypatch.setattr(select, "nvidia_driver_is_here", lambda: True)
    monkeypatch.setattr(select, "built_without_cuda", lambda: False)


@pytest.fixture(scope="module", params=["dense", pytest.param("experts", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / "model.gguf"
    return write_tiny_model(path, n_experts=4 if request.param == "experts" else 0)


@pytest.mark.parametrize("tensor", quick(["attn_q", "attn_k", "attn_v"], ["attn_k"]))
def test_a_nan_is_an_error_not_text(model: Path, tensor: str, tmp_path: Path) -> None:
    """In a prompt of few tokens, and in one of more than a program takes at once."""
    path = spoil(model, f"blk.1.{tensor}.weight", tmp_path / "m.gguf", 0)
    llm = LLM(path, device="cuda", cache_type_k="q8_0", cache_type_v="q4_0", n_ctx=64)
    with pytest.raises(LocalKVError, match="the model produced NaN or infinite logits"):
        llm.complete("The", max_tokens=2, temperature=0.0)
    assert np.isnan(llm.logits(list(range(1, 41)))[-1]).all()


def test_text_is_the_references(model: Path) -> None:
    """Greedily: a prompt in chunks, steps, a second prompt that shares tokens with the first."""
    texts = []
    for device in ("reference", "cuda"):
        llm = LLM(model, device=device, cache_type_k="q8_0", cache_type_v="q4_0", n_batch=24)
        assert llm.backend.name == device
        first = llm.complete(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True)
        second = llm.complete(PROMPT + " The owl", max_tokens=3, temperature=0.0, ignore_eos=True)
        assert second.usage.cached_tokens > 0
        texts.append((first.text, second.text))
    assert texts[0] == texts[1]
    assert all(len(text) > 0 for text in texts[0])


def test_exact_activations_are_not_rounded_to_fp16(model: Path) -> None:
    """A prompt of many tokens, through an f32 cache; the reference rounds nothing."""
    ids = list(range(1, 81))

    def logits(device: str, activations: str) -> np.ndarray:
        types = {"cache_type_k": "f32", "cache_type_v": "f32"}
        llm = LLM(model, device=device, n_ctx=128, activations=activations, **types)
        return llm.logits(ids)

    want = logits("reference", "exact")
    rounded, exact = (nmse(logits("cuda", how), want) for how in ("auto", "exact"))
    assert exact < 0.1 * rounded < 1e-4


def test_draws_on_the_device_repeat(tiny_model: Path) -> None:
    """Draws repeat as often as the seed is the same."""
    llm = LLM(tiny_model, device="cuda", n_ctx=64)
    one, same, other = (
        llm.complete("The fox", max_tokens=3, temperature=1.5, seed=seed, ignore_eos=True).text
        for seed in (1, 1, 2)
    )
    assert one == same != other


@pytest.mark.slow
def test_streams_take_turns(tiny_model: Path) -> None:
    """One that is overtaken while the device is a token ahead says what it says alone."""
    llm = LLM(tiny_model, device="cuda", n_ctx=64)
    options = {"max_tokens": 3, "temperature": 1.5, "seed": 1, "ignore_eos": True}
    wanted = [llm.complete(text, **options).text for text in ("The fox", "The owl")]
    streams = [llm.stream(text, **options) for text in ("The fox", "The owl")]
    begun = [next(stream) for stream in streams]
    assert [a + "".join(b) for a, b in zip(begun, streams, strict=True)] == wanted


def test_pages_change_their_types_within_a_budget(tiny_model: Path) -> None:
    """While steps that a GPU would repeat draw tokens a step ahead."""
    texts = []
    for device in ("reference", "cuda"):
        llm = LLM(tiny_model, device=device, n_ctx=512, n_batch=128, kv_budget=PAGE_BYTES * 8 // 5)
        ids = (llm.tokenize(PROMPT) * 20)[:250]
        done = llm.complete(ids, max_tokens=10, temperature=0.0, ignore_eos=True)
        assert done.usage.requantised_pages == 1
        ladder = llm.engine.cache.ladder
        assert ladder is not None
        assert [ladder.rungs[page] for page in llm.engine.sequence.pages[0]] == [1, 0]
        texts.append(done.text)
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.long
def test_a_page_that_went_down_comes_back_up_for_a_tail(tiny_model: Path) -> None:
    texts = []
    budget = 5 * PAGE_BYTES // 2
    for device in ("reference", "cuda"):
        llm = LLM(tiny_model, device=device, n_ctx=768, kv_budget=budget, kv_tail=8)
        ids = (llm.tokenize(PROMPT) * 40)[:520]
        llm.complete(ids, max_tokens=2, temperature=0.0, ignore_eos=True)
        ladder = llm.engine.cache.ladder
        assert ladder is not None
        assert ladder.rungs[llm.engine.sequence.pages[0][0]] > 0
        done = llm.complete(ids[:100], max_tokens=4, temperature=0.0, ignore_eos=True)
        assert ladder.rungs[llm.engine.sequence.pages[0][0]] == 0
        texts.append(done.text)
    assert texts[0] == texts[1]


def test_auto_takes_the_gpu() -> None:
    assert select_backend("auto").name == "cuda"


def test_what_the_start_says(program: Program, tiny_model: Path) -> None:
    """The GPU, the kernel of each operation, what types are multiplied as, what -t does there."""
    run = ("complete", "-m", tiny_model, "-p", "The fox", "-n", "1", "-c", "64", "-v")
    result = program(*run, "--device", "cuda", "-t", "2", "-ctk", "bf16", "-ctv", "f32")
    assert result.code == 0
    memory, summary, *kernels, warning = result.err_lines
    assert memory.endswith("(context 64), on Triton's interpreter")
    assert summary.endswith("on cuda, Triton's interpreter")
    operations = {line.partition(": ")[0] for line in kernels}
    assert operations == {
        *module.METHODS.others,
        *("attention", "tiles of K", "tiles of V", "storing", "products"),
    }
    assert "tiles of K: tf32 (10 bits of mantissa, which hold bf16's 7)" in kernels
    assert any(line.startswith("tiles of V: tf32 in three products") for line in kernels)
    assert any(line.startswith("products: f16: Triton on packed weights") for line in kernels)
    assert "-t has no effect on a GPU" in warning


ALLOCATION = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB of "
    "which 1.00 MiB is free.\nSee documentation"
)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a function fail as torch does where a GPU of 8 GiB is full."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 6 << 30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: (6 << 30) + (1 << 20))

    def fails(owner: object, name: str, *, after: int = 0, error: Exception = ALLOCATION) -> None:
        real, calls = getattr(owner, name), []

        def call(*args: Any, **named: Any) -> Any:
            calls.append(0)
            if len(calls) > after:  # another process was faster
                monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 20, 8 << 30))
                raise error
            return real(*args, **named)

        monkeypatch.setattr(owner, name, call)

    return fails


def refused(path: Path, **options: Any) -> LocalKVError:
    with pytest.raises(LocalKVError) as error:
        LLM(path, device="cuda", **options).complete("The fox", max_tokens=4)
    assert "\n" not in str(error.value)
    return error.value


def test_no_room_for_the_weights(full: Any, tiny_model: Path) -> None:
    full(module, "prepare", after=3)
    error = refused(tiny_model)
    assert error.message == (
        "the GPU has no room for the weights' blk.0.attn_k.weight of 16.00 KiB, which asked for "
        "20.00 MiB more: 2.00 MiB of 8.00 GiB are free"
    )
    assert error.hint is not None
    assert "weights, K, V and scratch of 6.00 GiB in all would fit" in error.hint


def test_no_room_for_the_cache(full: Any, tiny_model: Path) -> None:
    """A page of 2 layers takes 128 KiB in f16."""
    full(KVCache, "__init__")
    error = refused(tiny_model, n_ctx=8192)
    assert error.message.startswith(
        "the GPU has no room for a KV cache of 4.00 MiB for 8192 tokens, which asked for"
    )
    assert error.hint is not None
    assert error.hint.startswith("4096 tokens (-c) would fit")


@pytest.mark.parametrize(("after", "what"), [(0, "a batch of 3 tokens"), (1, "a step's scratch")])
def test_no_room_for_scratch(full: Any, tiny_model: Path, after: int, what: str) -> None:
    full(Transformer, "forward", after=after)
    error = refused(tiny_model)
    assert what in error.message
    assert error.hint is not None
    assert "(-c)" in error.hint


def test_no_room_for_a_kernel(full: Any, tiny_model: Path) -> None:
    """Triton says so in its own way; what isn't about memory stays what it is."""
    full(Transformer, "forward", error=RuntimeError("Triton Error [CUDA]: out of memory"))
    error = refused(tiny_model)
    assert error.message == (
        "the GPU has no room for the scratch of a batch of 3 tokens: 2.00 MiB of 8.00 GiB are free"
    )
    full(Transformer, "forward", error=RuntimeError("Triton Error [CUDA]: device-side assert"))
    with pytest.raises(RuntimeError, match="device-side"):
        LLM(tiny_model, device="cuda", fit="off").complete("The fox", max_tokens=4)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"n_gpu_layers": 2}, "cuda0+cpu"),
        pytest.param(
            {"offload_kqv": False, "n_gpu_layers": "all"}, "cuda0+cpu", marks=pytest.mark.slow
        ),
    ],
)
def test_a_part_of_the_model_on_the_gpu(options: dict[str, Any], name: str, tmp_path: Path) -> None:
    """NumPy's arrays and the GPU's, in prompts of several chunks and in generated tokens."""
    path = write_tiny_model(tmp_path / "model.gguf")
    ids = [(7 * i) % 90 for i in range(20)]
    want = LLM(path, device="cpu", n_ctx=64)
    llm = LLM(path, device="cuda", n_ctx=64, n_batch=16, **options)
    assert llm.backend.name == name
    assert nmse(llm.logits(ids), want.logits(ids)) < 1e-5
    assert [device for device, _ in llm.memory.places] == ["cuda0", "cpu"]
    text = llm.complete("The fox", max_tokens=2, temperature=0).text
    assert text == want.complete("The fox", max_tokens=2, temperature=0).text


def test_what_a_gpu_has_no_room_for_is_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "model.gguf")
    gguf = open_gguf(path)
    config = checked_spec(gguf)
    memory = ModelMemory(tuple(gguf.tensors.values()), config, "cuda", 512, 1)
    free = memory.plan(CacheConfig(n_ctx=64)).total - 1
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 80 << 30))
    with pytest.raises(DoesNotFitError, match="is free on the GPU"):
        LLM(path, device="cuda", n_ctx=64, n_gpu_layers="all")
    llm = LLM(path, device="cuda", n_ctx=64)
    places = dict(llm.memory.places)
    assert places["cuda0"].total <= free
    assert llm.warnings[0].startswith("the model is larger than the ")
    assert llm.complete("The fox", max_tokens=2, temperature=0).text
