"""`localkv plan`: its bytes against real allocations, its table, its advice, and what it reads."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from localkv import LLM
from localkv.cache.layout import cache_segments
from localkv.config import PRESETS, CacheConfig
from localkv.errors import HubError
from localkv.kernels.select import select_backend
from localkv.loader.chosen_cache import LARGE_BIAS, kv_risks
from localkv.loader.gguf_file import open_gguf
from localkv.loader.hub import remote_header
from localkv.loader.known_models import KNOWN_MODELS, shape_tensors
from localkv.loader.synthetic import RandomTensors
from localkv.loader.tensor_reader import TensorReader
from localkv.loader.weights import model_weights
from localkv.memory.plan import QUANTS, ModelMemory, bits_per_weight, requantised
from localkv.quant_formats import FORMATS, KV_FORMATS
from localkv.system.machine_memory import Budget
from localkv.system.threads import n_threads
from support.fake_hub import FakeHub
from support.held_bytes import held, storages
from support.layouts import with_attention
from support.program import Program, Result, loaded_by
from support.quick import quick
from support.random_model import variant
from support.torch_edge import torch_cache

GIB = 1 << 30


@pytest.fixture
def plan(program: Program) -> Any:
    """Runs `localkv plan` and returns what `--json` prints; `runs`: something fits."""

    def run(*argv: object, runs: bool = True) -> Any:
        result = program("plan", *argv, "--json")
        assert result.code == (0 if runs else 1), result.err
        return json.loads(result.out)

    return run


# -- the bytes


@pytest.mark.parametrize(
    ("name", "changes", "weight_type"),
    quick(
        [
            ("llama", {"head_dim": 32}, GGMLType.F16),
            ("llama-hd80", {}, GGMLType.Q8_0),
            ("llama", {"head_dim": 128}, GGMLType.Q8_0),
            ("llama-tied", {"n_vocab": 992, "n_ff": 192}, GGMLType.F16),
            ("llama-tied", {"n_vocab": 992, "n_ff": 192}, GGMLType.Q8_0),
            ("qwen2moe", {}, GGMLType.F16),
            ("qwen3moe", {"head_dim": 96}, GGMLType.Q8_0),
        ],
        [("llama-hd80", {}, GGMLType.Q8_0), ("qwen2moe", {}, GGMLType.F16)],
    ),
)
def test_bytes_are_those_that_are_allocated(
    plan: Any, tmp_path: Path, name: str, changes: dict[str, Any], weight_type: GGMLType
) -> None:
    path = variant(name, **changes).write(tmp_path / "model.gguf", weight_type)
    found = plan(path, "--all", "-c", 300, "--device", "cpu")
    llm = LLM(path, device="cpu", n_ctx=300)
    mapped, copied = held(llm)
    assert found["weights_allocated"] == pytest.approx(copied, rel=0.01)
    if "output.weight" not in llm.gguf.tensors and copied:
        mapped -= llm.gguf.tensors["token_embd.weight"].n_bytes  # rows of it are read in the file
    assert found["weights_mapped"] == pytest.approx(mapped, rel=0.01)
    config = llm.config
    fitting = [n for n, fmt in KV_FORMATS.items() if config.groups[0].key_dim % fmt.block_size == 0]
    assert len(found["pairs"]) == len(fitting) ** 2
    for row in found["pairs"]:
        rest = found["weights_mapped"] + found["weights_allocated"] + found["scratch"]
        assert row["total"] == rest + row["cache_k"] + row["cache_v"]
        if (fitting.index(row["type_k"]) + fitting.index(row["type_v"])) % len(fitting):
            continue  # each type has another one on the other side
        types = CacheConfig(row["type_k"], row["type_v"], n_ctx=300)
        cache = torch_cache(
            n_layers=config.n_layers,
            n_kv_heads=config.groups[0].n_kv_heads,
            head_dim=config.groups[0].key_dim,
            segments=cache_segments(types, config.groups[0]),
            n_ctx=300,
        )
        allocated = (storages(cache, "k"), storages(cache, "v"))
        assert (row["cache_k"], row["cache_v"]) == pytest.approx(allocated, rel=0.01)


def test_complete_says_the_same(plan: Any, program: Program, tiny_model: Path) -> None:
    flags = ("-c", 256, "-ctk", "q8_0", "-ctv", "q4_0", "-t", n_threads())
    planned = plan(tiny_model, *flags, "--device", "cpu")
    argv = ("complete", "-m", tiny_model, "-p", "x", "-n", 1, *flags, "--device", "cpu", "--json")
    taken = json.loads(program(*argv).out)["memory"]
    (row,) = planned["pairs"]
    assert row["total"] == taken["total"]
    assert (row["cache_k"], row["cache_v"]) == (taken["cache_k"], taken["cache_v"])
    assert planned["scratch"] == taken["scratch"]


def test_llama_3_70b_at_128k(plan: Any) -> None:
    """80 layers, 8 KV heads of 128, K and V in f16: 40 GiB; 320 if all 64 heads had their own."""
    argv = ("--synthetic", "llama-70b:q4_K", "-c", 131072, "--memory", "80GiB", "-ctk", "f16")
    found = plan(*argv)
    (row,) = found["pairs"]
    assert row["cache_k"] + row["cache_v"] == 40 * GIB
    config = with_attention(KNOWN_MODELS["llama-70b"].spec, n_kv_heads=64)
    memory = ModelMemory(shape_tensors("llama-70b", "q4_K"), config, "cpu", 512, 1)
    every_head = memory.plan(CacheConfig(n_ctx=131072))
    assert every_head.cache_k + every_head.cache_v == 320 * GIB


@pytest.mark.parametrize("shape", ["llama-tiny", "moe-tiny"])
@pytest.mark.parametrize("type_name", ["q4_0", "f16"])
def test_a_shape_s_tensors_are_those_that_a_model_of_it_has(shape: str, type_name: str) -> None:
    taken = {}

    class Recorder(RandomTensors):
        def packed(self, name: str, shape: tuple[int, ...]) -> Any:
            tensor = super().packed(name, shape)
            taken[name] = (tensor.shape, tensor.format.name, tensor.rows.nbytes)
            return tensor

    backend = select_backend("reference")
    source = Recorder(type_name, 0, KNOWN_MODELS[shape])
    config = KNOWN_MODELS[shape].spec
    model_weights(TensorReader(source, backend), config)
    listed = shape_tensors(shape, type_name)
    assert taken == {t.name: (t.shape, t.format.name, t.n_bytes) for t in listed}


def test_several_sequences(plan: Any, tiny_model: Path) -> None:
    one, three = (plan(tiny_model, "--sequences", n, "--memory", "1G") for n in (1, 3))
    for row, more in zip(one["pairs"], three["pairs"], strict=True):
        assert more["cache_k"] == 3 * row["cache_k"]
        assert more["longest_context"] == pytest.approx(row["longest_context"] / 3, rel=0.01)


# -- other types of weights


def test_other_types_of_weights_take_what_llama_quantize_makes_of_them(tmp_path: Path) -> None:
    """A file that really is of that type has the bytes that were counted."""
    model = variant("llama", n_embd=256, n_ff=512, head_dim=64, n_vocab=512)
    as_f16 = open_gguf(model.write(tmp_path / "f16.gguf", GGMLType.F16)).tensors.values()
    as_q8 = open_gguf(model.write(tmp_path / "q8.gguf", GGMLType.Q8_0)).tensors.values()
    counted = requantised(as_f16, "q8_0")
    assert [(t.name, t.format.name, t.n_bytes) for t in counted] == [
        (t.name, t.format.name, t.n_bytes) for t in as_q8
    ]
    smaller = {t.name: t.format.name for t in requantised(as_f16, "q4_K")}
    assert smaller["blk.0.attn_q.weight"] == "q4_K"
    assert smaller["output.weight"] == "q6_K"
    assert smaller["blk.0.attn_norm.weight"] == "f32"


def test_rows_without_whole_blocks_and_routers() -> None:
    some = shape_tensors("llama-tiny", "f16")[0]

    def kind(name: str, n_in: int) -> str:
        tensor = replace(some, name=name, shape=(8, n_in))
        return requantised([tensor, replace(some, name="output.weight")], "q4_K")[0].format.name

    assert kind("a.weight", 256) == "q4_K"
    assert kind("a.weight", 96) == "q5_0"
    assert kind("a.weight", 40) == "f16"
    assert kind("blk.0.ffn_gate_inp.weight", 256) == "f16"


def test_more_bits_in_weights_leave_less_context(plan: Any) -> None:
    found = plan("--synthetic", "llama-8b:q4_K", "--memory", "12GiB")
    rows = found["quants"]
    assert [row["type"] for row in rows] == list(QUANTS)
    assert [row["type"] for row in rows if row["is_own"]] == ["q4_K"]
    bits = [row["bits_per_weight"] for row in rows]
    assert bits == sorted(bits, reverse=True)
    for pair in ("f16/f16", "q8_0/q8_0", "q8_0/q4_0", "q4_0/q4_0"):
        contexts = [row["longest_context"][pair] for row in rows]
        assert contexts == sorted(contexts)
    own = next(row for row in rows if row["is_own"])
    by_pair = {f"{r['type_k']}/{r['type_v']}": r["longest_context"] for r in found["pairs"]}
    assert own["longest_context"].items() <= by_pair.items()
    assert bits_per_weight(shape_tensors("llama-8b", "q8_0")) == pytest.approx(8.5, abs=0.01)


# -- what is asked, and what is advised


def test_the_advice_can_be_pasted(plan: Any, program: Program, tiny_model: Path) -> None:
    found = plan(tiny_model, "--memory", "1GiB", "--device", "cpu")
    command = found["recommendation"]["command"]
    assert command == f"localkv chat -m {tiny_model} --device cpu -c 256 -ctk f16 -ctv f16"
    result = program("plan", tiny_model, "--memory", "1GiB", "--device", "cpu")
    assert result.out.splitlines()[-1] == command
    assert shlex.split(command)[0] == "localkv"


def test_advice_without_a_template_or_a_file(plan: Any, tmp_path: Path) -> None:
    path = variant("llama").write(tmp_path / "a model.gguf")
    command = plan(path, "--memory", "1GiB", "-ub", 64)["recommendation"]["command"]
    flags = "-c 1024 -ctk f16 -ctv f16 -ub 64"
    assert command == f"localkv complete -m '{path}' {flags} -p \"Once upon a time\""
    argv = ("--synthetic", "llama-tiny:q4_0", "-c", "512", "--memory", "1GiB")
    assert plan(*argv)["recommendation"]["command"] == "-c 512 -ctk f16 -ctv f16"


def test_the_most_bits_that_fit_are_advised(plan: Any) -> None:
    shape = ("--synthetic", "llama-8b:q4_K", "-c", 131072, "--device", "cpu")
    for memory, expected in (
        ("24GiB", ("f16", "f16")),
        ("15GiB", ("q8_0", "q8_0")),
        ("12GiB", ("q8_0", "q4_0")),
        ("10GiB", ("q4_0", "q4_0")),
    ):
        advice = plan(*shape, "--memory", memory)["recommendation"]
        assert (advice["type_k"], advice["type_v"], advice["n_ctx"]) == (*expected, 131072)
    found = plan(*shape, "--memory", "7GiB", runs=False)
    advice, row = found["recommendation"], found["pairs"][-1]
    assert (advice["n_ctx"], advice["quant"]) == (row["longest_context"], None)
    assert advice["n_ctx"] < 131072
    assert "fit in none: q4_0/q4_0, the smallest, takes" in advice["reason"]
    less = ("--memory", "4.3GiB", "-c", 2048)
    advice = plan(*shape, *less, runs=False)["recommendation"]
    assert (advice["quant"], advice["command"]) == ("q3_K", None)
    assert "with Q3_K weights 2048 tokens fit in f16/f16" in advice["reason"]
    advice = plan(*shape, "--memory", "1GiB", runs=False)["recommendation"]
    assert (advice["type_k"], advice["quant"], advice["command"]) == (None, None, None)


@pytest.mark.slow
def test_types_that_are_named(plan: Any, program: Program, tiny_model: Path) -> None:
    def pairs(*argv: object) -> list[tuple[str, str]]:
        return [
            (r["type_k"], r["type_v"]) for r in plan(tiny_model, "--memory", "1G", *argv)["pairs"]
        ]

    assert pairs("-ctk", "q8_0,Q4_0") == [("q8_0", "f16"), ("q4_0", "f16")]
    assert pairs("-ctk", "q8_0,bf16", "-ctv", "q4_0") == [("q8_0", "q4_0"), ("bf16", "q4_0")]
    assert pairs("--preset", "memory") == [("q4_1c128", "kv3_0")]
    assert pairs("--preset", "memory", "-ctk", "f32") == [("f32", "kv3_0")]
    assert pairs()[0] == ("f16", "f16")
    assert ("q8_0", "q4_0") in pairs()
    assert len(pairs("--all")) == len(KV_FORMATS) ** 2
    for argv, message in (
        (("-ctk", "q9"), "error: -ctk/--cache-type-k: unknown cache type 'q9'"),
        (("-ctv", "q8_0,q4"), "error: -ctv/--cache-type-v: unknown cache type 'q4'; did you mean"),
        (("--all", "-ctk", "f16"), "--all plans every pair"),
        (("--memory", "much"), "'much' is not a size"),
        (("--synthetic", "llama-8b:q4_0"), "--synthetic takes the place of a file"),
    ):
        result = program("plan", tiny_model, *argv)
        assert (result.code, result.out) == (2, "")
        assert message in result.err


def test_presets_are_spelled_out(program: Program, tiny_model: Path) -> None:
    result = program("plan", tiny_model, "--preset", "speed")
    assert result.err == f"preset speed: -ctk q8_0 -ctv q4_0; {PRESETS['speed'].reason}\n"
    result = program("plan", tiny_model, "--preset", "speed", "-ctv", "q8_0")
    assert result.err == "preset speed: -ctk q8_0 (given: -ctv q8_0)\n"


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("24GiB", 24 << 30),
        ("24G", 24 << 30),
        ("24gb", 24 * 10**9),
        ("1.5 TiB", 3 << 39),
        ("512m", 512 << 20),
        ("100000000", 10**8),
    ],
)
def test_sizes(plan: Any, tiny_model: Path, text: str, n_bytes: int) -> None:
    found = plan(tiny_model, "--memory", text)
    assert found["memory"] == {"n_bytes": n_bytes, "source": "given with --memory"}


@pytest.mark.parametrize("shape", ["llama-9b:q4_0", "llama-8b:q9", "llama-8b"])
def test_unknown_shapes(program: Program, shape: str) -> None:
    result = program("plan", "--synthetic", shape)
    assert result.code == 2
    assert result.err_lines[1].startswith("hint: ")


def test_heads_that_blocks_do_not_fit(plan: Any, program: Program, tmp_path: Path) -> None:
    path = variant("llama-hd80").write(tmp_path / "m.gguf")
    pairs = [(row["type_k"], row["type_v"]) for row in plan(path)["pairs"]]
    assert pairs == [("f16", "f16"), ("fp8_e4m3_token", "fp8_e4m3_token")]
    result = program("plan", path, "-ctk", "q4_0")
    assert result.code == 2
    assert "q4_0 with block size 32 does not divide head_dim 80" in result.err


def test_whose_memory_it_is(
    plan: Any, program: Program, tiny_model: Path, monkeypatch: Any
) -> None:
    module = "localkv.system.machine_memory"
    gpu, machine = f"{module}.gpu_memory", f"{module}.machine_memory"
    monkeypatch.setattr(machine, lambda: Budget(8 * GIB, "here"))
    monkeypatch.setattr(gpu, lambda: None)
    assert plan(tiny_model)["backend"] == "cpu"
    assert plan(tiny_model)["memory"]["n_bytes"] == 8 * GIB - (128 << 20)
    assert plan(tiny_model, "--device", "cuda", "--memory", "1G")["backend"] == "cuda"
    result = program("plan", tiny_model, "--device", "cuda")
    assert (result.code, result.err_lines[1]) == (2, "hint: give it: --memory 24GiB")
    monkeypatch.setattr(gpu, lambda: Budget(16 * GIB, "there"))
    without_cuda = "localkv.system.gpu_files.built_without_cuda"
    monkeypatch.setattr(without_cuda, lambda: True)
    found = plan(tiny_model)
    assert (found["backend"], found["memory"]["source"][:4]) == ("cpu", "here")
    assert found["why_backend"] == "there is a GPU, but this torch was built without CUDA"
    assert f"; backend cpu ({found['why_backend']})\n" in program("plan", tiny_model).out
    assert plan(tiny_model, "--device", "cuda")["backend"] == "cuda"
    monkeypatch.setattr(without_cuda, lambda: False)
    found = plan(tiny_model)
    assert (found["backend"], found["memory"]["n_bytes"]) == ("cuda", 16 * GIB - (512 << 20))
    assert found["weights_mapped"] == 0
    assert plan(tiny_model, "--device", "cpu")["memory"]["source"].startswith("here")


def test_the_table(program: Program, tiny_model: Path) -> None:
    out = program("plan", tiny_model, "--memory", "40MiB", "--device", "cpu", "-t", 1).out
    blocks = out.split("\n\n")
    head, pairs, weights, advice = (block.splitlines() for block in blocks)
    assert head[0].startswith("model    tiny: llama, 2 layers, 1 KV head of 64, trained with 256")
    assert pairs[1].split()[0] == "f16/f16"
    assert all(re.search(r" (yes|slowly|no) +(\d+|none)$", line) for line in pairs[1:])
    assert weights[0] == "The longest context with other types of weights:"
    assert sum("(this one)" in line for line in weights) == 1
    assert advice[0].startswith("recommended: 256 tokens fit in f16/f16")


def test_latents_have_one_row_for_each_type_of_theirs(program: Program) -> None:
    """V is a view of them, so that pairs that differ in its type are the same cache."""
    asked = ("plan", "--synthetic", "deepseek-v2-lite:q4_0", "--memory", "64GiB", "-c", "4096")
    lines = program(*asked).out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("latents "))
    assert "latents  rotated keys" in lines[at]
    assert [line.split()[0] for line in lines[at + 1 : at + 5]] == ["f16", "q8_0", "q6_0", "q4_0"]
    assert lines[at + 5] == ""
    assert lines[-1] == "-c 4096 -ctk f16 -ctv f16"


def test_exit_1_if_nothing_runs(program: Program, tiny_model: Path) -> None:
    """What is asked for fits with no pair of the table, which is printed all the same."""

    def run(*argv: object) -> Result:
        return program("plan", tiny_model, "--device", "cpu", "-t", 1, *argv)

    whole = json.loads(run("-c", 256, "-ctk", "f16", "-ctv", "f16", "--json").out)
    enough = whole["pairs"][0]["total"]
    assert run("-c", 256, "--memory", enough).code == 0
    little = ("--memory", enough)
    result = run("-c", 200000, *little)
    assert result.code == 1
    assert result.out.startswith("model ")
    assert "recommended: " in result.out
    (line,) = (line for line in result.err_lines if line.startswith("error: "))
    assert re.fullmatch(
        r"error: 200000 tokens don't fit: with q4_0/q4_0, the smallest of these pairs, the model "
        r"takes .+ MiB, but .+ MiB is given with --memory",
        line,
    )
    assert json.loads(run("-c", 200000, *little, "--json").out)["n_ctx"] == 200000
    assert run(*little).code == 0  # a shorter context than the trained one would do
    assert "error: no context fits: " in (none := run("--memory", "500K")).err
    assert none.code == 1
    # of pairs that are named, one that fits is enough
    middle = json.loads(run("-c", 20000, "-ctk", "q4_0,f16", "-ctv", "q4_0", "--json").out)["pairs"]
    between = ("-c", 20000, "-ctv", "q4_0", "--memory", sum(p["total"] for p in middle) // 2)
    assert run(*between, "-ctk", "f16,q4_0").code == 0
    assert run(*between, "-ctk", "q4_0").code == 0
    result = run(*between, "-ctk", "f16")
    assert result.code == 1
    assert "error: 20000 tokens don't fit: with f16/q4_0 the model takes " in result.err


def test_weights_that_are_read_anew(program: Program, tmp_path: Path) -> None:
    path = variant("llama", n_vocab=4096).write(tmp_path / "m.gguf", GGMLType.F16)
    facts = json.loads(program("plan", path, "--json", "--device", "cpu").out)
    between = facts["pairs"][0]["total"] - facts["weights_mapped"] // 2
    out = program("plan", path, "--device", "cpu", "--memory", between).out
    assert re.search(r"^f16/f16 .* slowly ", out, re.MULTILINE)
    assert "slowly: there is no room for all mapped weights" in out


def test_a_context_beyond_training(program: Program, tiny_model: Path) -> None:
    result = program("plan", tiny_model, "-c", 512)
    assert result.err.startswith("warning: the context of 512 tokens is longer than the 256 the")


def test_json_has_all_that_the_table_has(plan: Any, tiny_model: Path) -> None:
    found = plan(tiny_model)
    assert set(found) == {
        "model", "backend",
        "why_backend", "memory", "n_ctx", "n_sequences", "n_batch", "weights_mapped",
        "adapters", "weights_allocated", "weights_by_row", "weights_decoded", "scratch", "states",
        "rounded_activations",
        "checkpoints", "pairs", "quants", "recommendation", "warnings",
    }  # fmt: skip
    assert set(found["model"]) == {
        "path", "name", "architecture", "n_layers", "groups", "n_ctx_train",
        "quant", "bits_per_weight",
    }  # fmt: skip
    assert set(found["pairs"][0]) == {
        "type_k", "type_v", "bits_per_value", "bytes_per_token", "cache_k", "cache_v", "total",
        "groups", "fits", "longest_context",
    }  # fmt: skip
    assert set(found["recommendation"]) == {
        "type_k", "type_v", "n_ctx", "quant", "reason", "command",
    }  # fmt: skip


# -- known risks


def with_bias(tmp_path: Path, largest: float) -> Path:
    model = variant("qwen2")
    model.tensors["blk.1.attn_k.bias"][3] = -largest
    return model.write(tmp_path / "m.gguf")


def test_large_biases_of_k(plan: Any, program: Program, tmp_path: Path) -> None:
    path = with_bias(tmp_path, 130.0)
    found = plan(path, "--memory", "1GiB")
    (warning,) = found["warnings"]
    assert warning.startswith("K has biases up to 130 (layer 1): K in fewer bits than q8_0 loses")
    budget = next(r["total"] for r in found["pairs"] if r["type_k"] == "q8_0")
    advice = plan(path, "--memory", budget - 4096)["recommendation"]
    assert advice["type_k"] == "q8_0"  # never fewer bits, whatever the budget

    def warned(type_k: str) -> bool:
        llm = LLM(path, n_ctx=64, cache_type_k=type_k, device="reference")
        return any("K has biases" in line for line in llm.warnings)

    assert [warned(name) for name in ("f16", "q8_0", "q5_1", "q4_0", "fp8_e4m3_token")] == [
        False, False, True, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize(("tensor", "is_large"), [("q", False), ("k", True), ("v", False)])
def test_biases_in_one_tensor(plan: Any, tmp_path: Path, tensor: str, is_large: bool) -> None:
    model = variant("llama-fused-qkv")
    sides = {side: model.tensors[f"blk.1.attn_{side}.bias"] for side in "qkv"}
    sides[tensor][-1] = 130.0
    model.tensors["blk.1.attn_qkv.bias"] = np.concatenate(list(sides.values()))
    warnings = plan(model.write(tmp_path / "m.gguf"))["warnings"]
    assert any("K has biases up to 130 (layer 1)" in line for line in warnings) == is_large


@pytest.mark.parametrize("dtype", [GGMLType.F16, GGMLType.BF16])
def test_biases_of_half_precision(tmp_path: Path, dtype: GGMLType) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    bias = np.array([0.5, -130.0, 2.0], np.float32)
    packed = gguf.quants.quantize(bias, dtype)
    writer.add_tensor("blk.0.attn_k.bias", packed, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (risk,) = kv_risks(open_gguf(tmp_path / "m.gguf"))
    assert risk.reason.startswith("K has biases up to 130 (layer 0)")


def test_small_biases_are_no_risk(plan: Any, tmp_path: Path) -> None:
    assert plan(with_bias(tmp_path, LARGE_BIAS - 1))["warnings"] == []


def test_sinks(program: Program, tmp_path: Path) -> None:
    """An architecture that can't be run: what is known of its cache is said all the same."""
    model = variant("llama")
    model.arch = "unheard-of"
    model.tensors["blk.0.attn_sinks.weight"] = model.tensors["output_norm.weight"][:4]
    result = program("plan", model.write(tmp_path / "m.gguf"))
    assert result.code == 1
    assert result.err_lines[0].startswith("warning: this model has attention sinks")
    assert result.err_lines[1] == "error: architecture 'unheard-of' is not supported"


def test_of_biases_that_were_not_fetched_the_worst_is_assumed(
    plan: Any, hub: FakeHub, tmp_path: Path
) -> None:
    hub.repos["org/qwen"] = {"m-Q8_0.gguf": with_bias(tmp_path, 1.0).read_bytes()}
    (warning,) = plan("-hf", "org/qwen")["warnings"]
    assert warning.startswith("K has biases, which can be very large")


def test_whom_sinks_concern() -> None:
    tensors = {"blk.0.attn_sinks.weight": None}
    (risk,) = kv_risks(SimpleNamespace(tensors=tensors))
    assert not risk.concerns("f16", "bf16")
    assert risk.concerns("f16", "q8_0")
    assert risk.concerns("q8_0", "f16")


# -- what is read


@pytest.mark.slow
def test_no_torch(tiny_model: Path) -> None:
    """Nor anything else that takes long to import."""
    assert loaded_by("plan", tiny_model, "--all", "--memory", "24GiB") == ["numpy"]
    assert loaded_by("plan", "--synthetic", "llama-8b:q4_K", "--memory", "64G") == ["numpy"]
    assert loaded_by("plan", "--help") == []


@pytest.fixture
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_header, "FIRST_BYTES", 1 << 12)


def test_of_a_model_on_the_hub_only_the_header_is_fetched(
    plan: Any, hub: FakeHub, tiny_model: Path, tmp_path: Path, small_requests: None
) -> None:
    hub.repos["org/tiny"] = {"tiny-Q4_K_M.gguf": tiny_model.read_bytes() + bytes(32)}
    found = plan("-hf", "org/tiny", "--memory", "1G")
    local = plan(tiny_model, "--memory", "1G")
    assert found["pairs"] == local["pairs"]
    command = found["recommendation"]["command"]
    assert command == local["recommendation"]["command"].replace(f"-m {tiny_model}", "-hf org/tiny")
    assert sum(request.sent for request in hub.downloads) < tiny_model.stat().st_size / 4
    ranges = [request.range for request in hub.downloads]
    assert ranges[:2] == ["bytes=0-4095", "bytes=4096-8191"]
    assert not list((tmp_path / "hub").rglob("*"))
    hub.ranges = False  # a server that always sends all of it
    assert plan("-hf", "org/tiny", "--memory", "1G")["pairs"] == local["pairs"]


def test_a_model_in_the_cache_is_read_there(
    plan: Any, program: Program, hub: FakeHub, tiny_model: Path
) -> None:
    hub.repos["org/tiny"] = {"tiny-Q4_K_M.gguf": tiny_model.read_bytes()}
    assert program("pull", "org/tiny").code == 0
    hub.requests.clear()
    assert plan("-hf", "org/tiny")["pairs"][0]["type_k"] == "f16"
    assert hub.requests == []


def test_a_header_on_the_hub_that_is_none(
    program: Program, hub: FakeHub, small_requests: None
) -> None:
    hub.repos["org/bad"] = {"bad-Q4_K_M.gguf": b"GGUF\3\0\0\0" + b"\1" * 200}
    result = program("plan", "-hf", "org/bad")
    assert (result.code, result.out) == (1, "")
    assert len(result.err_lines) == 1
    hub.repos["org/bad"] = {"bad-Q4_K_M.gguf": b"GGUF\3\0\0\0"}
    assert "truncated" in program("plan", "-hf", "org/bad").err
    result = program("plan", "-hf", "org/none")
    assert "org/none is not a repository" in result.err


def test_a_connection_that_ends_early(hub: FakeHub, program: Program, tiny_model: Path) -> None:
    hub.repos["org/tiny"] = {"tiny-Q4_K_M.gguf": tiny_model.read_bytes()}
    hub.cuts = [100]
    result = program("plan", "-hf", "org/tiny")
    assert result.code == HubError.exit_code
    assert len(result.err_lines) == 1


# -- the picture


def test_plot(program: Program, tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    result = program("plan", tiny_model, "--memory", "40MiB", "-c", 128, "--plot", path)
    assert result.code == 0, result.err
    picture = path.read_text()
    assert "<svg" in picture
    program("plan", tiny_model, "--memory", "40MiB", "-c", 128, "--plot", path)
    assert path.read_text() == picture, "the same plan, the same bytes"
    result = program("plan", tiny_model, "--plot", tmp_path / "plan.txt")
    assert result.code == 2
    assert "not a kind of picture" in result.err


def test_formats_of_quants_exist() -> None:
    assert all(FORMATS[name].is_weight for name in QUANTS)
