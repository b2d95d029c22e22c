"""Where options put the parts of a model, as llama.cpp counts layers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localkv.arch.placement import MANY, Offload, parsed_overrides
from localkv.arch.spec import ModelSpec
from localkv.config import CacheConfig
from localkv.errors import DoesNotFitError, UsageError
from localkv.kernels import select
from localkv.kernels.select import first_device, gpu_names
from localkv.loader.known_models import KNOWN_MODELS, shape_tensors
from localkv.memory.fit import check_parts_fit, offloads, placement_that_fits
from localkv.memory.plan import ModelMemory
from localkv.system.machine_memory import Budget

ONE, TWO = ["cuda0"], ["cuda0", "cuda1"]
GIB = 1 << 30


def model(name: str) -> tuple[ModelSpec, dict[str, tuple[int, ...]]]:
    shape = {tensor.name: tensor.shape for tensor in shape_tensors(name, "q4_0")}
    return KNOWN_MODELS[name].spec, shape


DENSE, DENSE_SHAPES = model("llama-1b")
ROUTED, ROUTED_SHAPES = model("qwen3-30b-a3b")


@pytest.mark.parametrize("n", [0, 1, 2, 16, 17, 99])
def test_the_last_layers_and_the_output_are_on_the_gpu(n: int) -> None:
    """llama.cpp: the first layer there is n_layers + 1 - N, and the output is layer n_layers."""
    placement = Offload(n).placed(DENSE, DENSE_SHAPES, ONE)
    first = max(DENSE.n_layers + 1 - n, 0)
    where = [placement.devices[k] for k in placement.layers]
    assert where == ["cpu" if i < first else "cuda0" for i in range(DENSE.n_layers)]
    assert placement.blocks == placement.layers
    assert placement.devices[placement.output] == ("cuda0" if n else "cpu")
    assert placement.devices[placement.embedding] == ("cuda0" if n > DENSE.n_layers else "cpu")
    assert placement.is_one == (n == 0 or n > DENSE.n_layers)
    assert placement.n_gpu_layers == min(n, DENSE.n_layers + 1)


def test_layers_are_divided_in_order() -> None:
    placement = Offload(split=(3.0, 1.0)).placed(DENSE, DENSE_SHAPES, TWO)
    assert placement.devices == ("cuda0", "cuda1")
    assert placement.layers == (0,) * 13 + (1,) * 3  # of 17, as the output counts as one
    assert (placement.embedding, placement.output) == (0, 1)
    with pytest.raises(UsageError, match=r"into 3 parts, but there is 1 GPU to use"):
        Offload(split=(1.0, 1.0, 1.0)).placed(DENSE, DENSE_SHAPES, ONE)


def test_experts_of_the_first_layers_are_on_the_cpu() -> None:
    placement = Offload(n_cpu_moe=5).placed(ROUTED, ROUTED_SHAPES, ONE)
    assert [placement.devices[k] for k in placement.blocks[:6]] == ["cpu"] * 5 + ["cuda0"]
    assert {placement.devices[k] for k in placement.layers} == {"cuda0"}
    named = Offload(overrides=parsed_overrides([r"blk\.[0-4]\.ffn_.*_exps=CPU"]))
    assert named.placed(ROUTED, ROUTED_SHAPES, ONE) == placement
    assert Offload(n_cpu_moe=MANY).placed(DENSE, DENSE_SHAPES, ONE).is_one  # there are none


def test_attention_is_on_the_cpu_with_its_cache() -> None:
    placement = Offload(kv_offload=False).placed(DENSE, DENSE_SHAPES, ONE)
    assert {placement.devices[k] for k in placement.layers} == {"cpu"}
    assert {placement.devices[k] for k in placement.blocks} == {"cuda0"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ffn_up_exps=CPU", "moves blk.0.ffn_up_exps.weight but not blk.0.ffn_"),
        ("ffn_gate_inp=CPU", "but not blk.0.ffn_"),
        ("attn_q[.]=CPU", "moves blk.0.attn_q.weight but not blk.0.attn_"),
        ("nothing=CPU", "'nothing' is in no tensor's name"),
        ("exps=CUDA3", "names 'cuda3', and the devices are cuda0, cpu"),
        ("exps", "is not REGEX=PLACE"),
        ("=CPU", "is not REGEX=PLACE"),
        ("(=CPU", "unterminated"),
    ],
)
def test_overrides_that_mean_nothing(text: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        Offload(overrides=parsed_overrides([text])).placed(ROUTED, ROUTED_SHAPES, ONE)
    assert words in str(raised.value)


@given(st.lists(st.text(max_size=12), max_size=3))
def test_any_override_is_read_or_refused(texts: list[str]) -> None:
    with suppress(UsageError):
        assert len(parsed_overrides(texts)) == len(",".join(texts).split(","))


def memory_of(name: str, spec: ModelSpec) -> ModelMemory:
    return ModelMemory(shape_tensors(name, "q4_0"), spec, "cuda", 512, 2)


@pytest.mark.parametrize(
    ("name", "spec", "shapes"),
    [("llama-1b", DENSE, DENSE_SHAPES), ("qwen3-30b-a3b", ROUTED, ROUTED_SHAPES)],
)
def test_bytes_of_places_are_those_of_the_whole(
    name: str, spec: ModelSpec, shapes: dict[str, tuple[int, ...]]
) -> None:
    """K, V and weights; less and less of them is on the GPU from way to way."""
    memory, cache = memory_of(name, spec), CacheConfig("q8_0", "q4_0", n_ctx=4096)
    whole, before = memory.plan(cache), float("inf")
    for way in offloads(spec):
        placed = replace(memory, placement=way.placed(spec, shapes, ONE))
        assert placed.placement is not None
        if placed.placement.is_one:
            continue
        plan = placed.plan(cache)
        places = dict(plan.places)
        assert sum(own.cache_k for own in places.values()) == whole.cache_k
        assert sum(own.cache_v for own in places.values()) == whole.cache_v
        gpu = places["cuda0"]
        here = sum(placed.placement.devices[k] == "cuda0" for k in placed.placement.layers)
        assert gpu.cache_k * spec.n_layers == whole.cache_k * here
        assert gpu.weights <= before
        before = gpu.weights


def test_as_much_as_fits_is_on_the_gpu() -> None:
    memory, cache = memory_of("qwen3-30b-a3b", ROUTED), CacheConfig(n_ctx=4096)
    most, host = memory.plan(cache).total, Budget(64 * GIB, "free")
    before = 0
    for n_bytes in (GIB // 2, 4 * GIB, 8 * GIB, most - 1, most):
        budgets = {"cuda0": Budget(n_bytes, "free on the GPU"), "cpu": host}
        placement, lines = placement_that_fits(memory, cache, ONE, budgets)
        placed = replace(memory, placement=placement)
        check_parts_fit(placed, cache, budgets)
        gpu = dict(placed.plan(cache).places).get("cuda0")
        on_gpu = 0 if gpu is None else gpu.total
        assert before <= (on_gpu or before)
        before = max(before, on_gpu)
        assert bool(lines) == (n_bytes < most)
    assert placement.is_one
    budgets = {"cuda0": Budget(4 * GIB, "free on the GPU"), "cpu": Budget(GIB, "free")}
    placed = replace(memory, placement=Offload(9).placed(ROUTED, ROUTED_SHAPES, ONE))
    with pytest.raises(DoesNotFitError, match=r"^CPU has 1\.00 GiB free, and its part takes "):
        check_parts_fit(placed, cache, budgets)


def test_gpus_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_names("CUDA1,cuda:0") == ["cuda1", "cuda0"]
    assert gpu_names("auto", 2) == ["cuda2"]
    assert gpu_names("cpu", 2) == []
    assert (first_device("cuda", 1), first_device("cuda", 0)) == ("cuda1", "cuda")
    monkeypatch.setattr(select, "why_no_gpu", lambda: ("there is none", ""))
    assert (first_device("auto", 1), first_device("cpu", 1)) == ("auto", "cpu")
    for device, words in (("cuda0,cpu", "'cpu' is no GPU"), ("cuda0,cuda0", "names a GPU twice")):
        with pytest.raises(UsageError, match=words):
            gpu_names(device)
    with pytest.raises(UsageError, match="main_gpu is -1"):
        gpu_names("cuda", -1)
