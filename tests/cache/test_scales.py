"""Scales by head: measuring them, their file, and what is said when they do not fit."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType
from hypothesis import given
from hypothesis import strategies as st

from localkv import LLM
from localkv.cache.layout import SegmentSpec
from localkv.cache.profile import SCALES_KIND, check_scales, read_kv_scales, write_kv_scales
from localkv.config import CacheConfig, KVScales
from localkv.engine.engine import Engine
from localkv.errors import LocalKVError, UsageError
from localkv.kernels.backend import Backend
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import read_pages, reference_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.quality.ranges import calibrate
from localkv.quant_formats import KV_FORMATS, TOKEN_FORMATS
from support.cache_types import BY_HEAD, BY_ROW, scales_of
from support.forward import IDS, new_cache, nmse, run
from support.paths import MODELS
from support.program import Program
from support.quick import quick
from support.random_model import RandomModel
from support.tiny_model import HEAD_DIM, N_KV_HEADS, N_LAYERS

F16 = MODELS / "tales-4M-F16.gguf"
TEXT = "The fox said hello to the owl, and the owl said hello to the fox. " * 8
SCALES = KVScales("llama", "m", 2, 2, 64, 0, 0, 9, ((1.0, 2.0), (0.0, 4.5)), ((1.0, 0.25),) * 2)
PLAIN = {"q8_t": "q8_0", "q4_t": "q4_1"}
"""What integers with scales of rows are compared with: those with scales of blocks."""
CHUNKS = [IDS[:60], (IDS * 3)[20:290], IDS[:1]]


# -- measuring


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scales")
    return RandomModel().write(folder / "model.gguf", GGMLType.F32)


@functools.cache
def expected(path: Path, kv_rotation: str) -> np.ndarray:
    """[chunks, 2, n_layers, n_kv_heads]: the largest magnitudes of the rows of K and V so far."""
    model, _ = load_model(path, reference_backend())
    found = []
    for chunk in CHUNKS:
        engine = Engine(model, CacheConfig("f32", "f32", n_ctx=300, kv_rotation=kv_rotation))
        engine.logits(chunk)
        pages = torch.tensor(engine.sequence.pages[0])
        segments = [layer.segments[0] for layer in engine.cache.layers]
        for planes in (*(s.k for s in segments), *(s.v for s in segments)):
            rows = read_pages(TOKEN_FORMATS["f32"], planes, pages, len(chunk), torch.float32)
            found.append(rows.abs().amax((1, 2)))
    table = torch.stack(found).view(len(CHUNKS), 2, model.config.n_layers, -1)
    return np.maximum.accumulate(table.numpy())


@pytest.mark.parametrize("kv_rotation", ["auto", "on"])
@pytest.mark.parametrize("backend", [reference_backend(), cpu_backend()], ids=lambda b: b.name)
def test_the_largest_values_as_they_are_to_be_packed(
    backend: Backend, kv_rotation: str, path: Path
) -> None:
    model, _ = load_model(path, backend)
    steps = list(calibrate(model, CHUNKS, n_ctx=300, kv_rotation=kv_rotation, n_batch=64))
    for scales, (k, v) in zip(steps, expected(path, kv_rotation), strict=True):
        np.testing.assert_allclose(scales.absmax_k, k, rtol=1e-4)
        np.testing.assert_allclose(scales.absmax_v, v, rtol=1e-4)
    assert [scales.n_tokens for scales in steps] == [60, 330, 331]
    rotation = 64 if kv_rotation == "on" else 0
    assert (steps[0].rotation_k, steps[0].rotation_v) == (rotation, rotation)
    assert (steps[0].architecture, steps[0].n_layers, steps[0].n_kv_heads) == ("llama", 2, 2)


def test_rows_that_were_never_stored_do_not_count(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load_model(path, cpu_backend())
    (scales,) = calibrate(model, [IDS[:20]], n_ctx=300)
    pages = NumpyArrays.bytes

    def poisoned(self: NumpyArrays, shape: tuple[int, ...]) -> np.ndarray:
        memory = pages(self, shape)
        memory[:] = 0xFF  # NaN
        return memory

    monkeypatch.setattr(NumpyArrays, "bytes", poisoned)
    (again,) = calibrate(model, [IDS[:20]], n_ctx=300)
    assert again == scales


def test_what_is_not_finite_can_not_be_measured(tmp_path: Path) -> None:
    random_model = RandomModel()
    random_model.tensors["blk.1.attn_v.weight"][3, 5] = np.inf
    model, _ = load_model(
        random_model.write(tmp_path / "m.gguf", GGMLType.F32), reference_backend()
    )
    with pytest.raises(LocalKVError, match="K or V of the model is not finite"):
        list(calibrate(model, [IDS[:9]], n_ctx=16))


@pytest.mark.parametrize("backend", [reference_backend(), cpu_backend()], ids=lambda b: b.name)
def test_heads_of_any_size_cost_what_ordinary_ones_do(backend: Backend, tmp_path: Path) -> None:
    """One head's K is 10,000 times as large and its queries as small, another's V likewise.

    The exact logits are the model's as it was; so is the error with scales, by head or row.
    """
    random_model = RandomModel()
    plain, _ = load_model(random_model.write(tmp_path / "a.gguf", GGMLType.F32), backend)
    d, group = random_model.head_dim, random_model.n_heads // random_model.n_kv_heads
    for layer in range(random_model.n_layers):
        weights = {
            name: random_model.tensors[f"blk.{layer}.attn_{name}.weight"]
            for name in ("q", "k", "v", "output")
        }
        weights["k"][:d] *= 1e4
        weights["q"][: d * group] /= 1e4
        weights["v"][d:] *= 1e-5
        weights["output"][:, d * group :] *= 1e5
    model, _ = load_model(random_model.write(tmp_path / "b.gguf", GGMLType.F32), backend)
    ids = IDS[:50]
    want = run(plain, new_cache(plain, SegmentSpec("f32", "f32")), ids)
    assert nmse(run(model, new_cache(model, SegmentSpec("f32", "f32")), ids), want) < 1e-9
    (scales,) = calibrate(model, [ids], n_ctx=128)

    @functools.cache
    def error(name: str, of_model: Transformer, kv_scales: KVScales | None = None) -> float:
        cache = new_cache(of_model, SegmentSpec(name, name), kv_scales=kv_scales)
        return nmse(run(of_model, cache, ids, chunk=40), want)

    assert error("fp8_e4m3", model) > 0.1
    for name in (*BY_HEAD, *BY_ROW):
        usual = error(PLAIN.get(name, name.rsplit("_", 1)[0]), plain)
        assert error(name, model, scales) < 2 * usual


# -- the file


def test_a_file_comes_back(tmp_path: Path) -> None:
    write_kv_scales(tmp_path / "s.json", SCALES)
    assert read_kv_scales(tmp_path / "s.json") == SCALES
    assert json.loads((tmp_path / "s.json").read_text())["version"] == 1
    with pytest.raises(UsageError, match=r"s\.json/x: Not a directory"):
        write_kv_scales(tmp_path / "s.json" / "x", SCALES)


def broken(**changes: Any) -> str:
    facts = {"kind": SCALES_KIND, "version": 1, **vars(SCALES), **changes}
    return json.dumps({key: value for key, value in facts.items() if value is not ...})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a JSON file"),
        ("{", "not a JSON file"),
        ("\udc80", "not a JSON file"),
        ("[" * 100_000, "not a JSON file"),
        ("[1]", "not a file of KV scales"),
        ('{"kind": "other"}', "not a file of KV scales"),
        (broken(version=2), "version 2 is not supported, 1 is"),
        (broken(version=...), "version None is not supported"),
        (broken(n_layers=-1), "n_layers is not a count"),
        (broken(head_dim="64"), "head_dim is not a count"),
        (broken(n_kv_heads=True), "n_kv_heads is not a count"),
        (broken(rotation_k=...), "rotation_k is not a count"),
        (broken(architecture=3), "architecture is not a text"),
        (broken(absmax_k=...), "absmax_k is not a table of 2 layers x 2 KV heads"),
        (broken(absmax_v=[[1, 2]]), "absmax_v is not a table of 2 layers x 2 KV heads"),
        (broken(absmax_v=[[1, 2], [3]]), "absmax_v is not a table of 2 layers x 2 KV heads"),
        (broken(absmax_v=[[1, 2], 3]), "absmax_v is not a table of 2 layers x 2 KV heads"),
        (broken(absmax_k=[[1, 2], [3, float("nan")]]), "absmax_k of layer 1, head 1 is nan"),
        (broken(absmax_k=[[1, 2], [float("inf"), 1]]), "absmax_k of layer 1, head 0 is inf"),
        (broken(absmax_k=[[1, -2.5], [3, 4]]), "absmax_k of layer 0, head 1 is -2.5"),
        (broken(absmax_k=[[1, 1e39], [3, 4]]), "absmax_k of layer 0, head 1 is 1e\\+39"),
        (broken(absmax_k=[[1, 10**400], [3, 4]]), "absmax_k of layer 0, head 1 is 1"),
        (broken(absmax_k=[[1, None], [3, 4]]), "absmax_k of layer 0, head 1 is None"),
        (broken(absmax_k=[[1, True], [3, 4]]), "absmax_k of layer 0, head 1 is True"),
    ],
)
def test_files_that_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=message) as error:
        read_kv_scales(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    assert str(path) in str(error.value)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json: No such file or directory"):
        read_kv_scales(tmp_path / "none.json")
    with pytest.raises(UsageError, match="Is a directory"):
        read_kv_scales(tmp_path)


@given(
    at=st.integers(0, 10_000), change=st.sampled_from([b"", b"0", b"-", b"]", b'"', b"\xff", b"e9"])
)
def test_a_damaged_file_is_read_or_refused(
    at: int, change: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    data = broken().encode()
    at %= len(data)
    path.write_bytes(data[:at] + change + data[at + 1 :])
    try:
        scales = read_kv_scales(path)
    except UsageError:
        return
    assert np.isfinite([scales.absmax_k, scales.absmax_v]).all()
    assert np.shape(scales.absmax_k) == (scales.n_layers, scales.n_kv_heads)


# -- what fits


def test_scales_of_another_model_or_rotation(path: Path) -> None:
    model, _ = load_model(path, reference_backend())
    good = scales_of(model.config)
    for type_k, type_v in (("fp8_e4m3_head", "f16"), ("f16", "fp8_e5m2_head")):
        cache = CacheConfig(type_k, type_v, n_ctx=64, kv_scales=good)
        Engine(model, cache)
        for name, value in (("architecture", "qwen2"), ("n_layers", 3), ("head_dim", 32)):
            other = replace(cache, kv_scales=replace(good, **{name: value}))
            with pytest.raises(
                UsageError, match=f"of another model: its {name} is {value!r}, this"
            ):
                Engine(model, other)
        with pytest.raises(UsageError, match="needs a file of scales"):
            Engine(model, replace(cache, kv_scales=None))
        with pytest.raises(UsageError, match="not rotated, but it is to be rotated by 64"):
            check_scales(replace(cache, kv_rotation="on"), model.config)
        rotated = replace(good, rotation_k=64, rotation_v=64)
        with pytest.raises(UsageError, match="rotated by 64, but it is to be not rotated"):
            check_scales(replace(cache, kv_scales=rotated), model.config)
        check_scales(replace(cache, kv_scales=rotated, kv_rotation="on"), model.config)


def test_layers_that_differ_can_not_share_a_table(path: Path) -> None:
    """Other heads in one layer, or one that reads another's K and V."""
    model, _ = load_model(path, reference_backend())
    cache = CacheConfig("fp8_e4m3_head", kv_scales=scales_of(model.config))
    first, *others = model.config.layers
    for changes in ({"n_kv_heads": 1}, {"kv_from": 1}):
        layer = replace(first, mixer=replace(first.attention, **changes))
        config = replace(model.config, layers=(layer, *others))
        with pytest.raises(UsageError, match="layers all have K and V, of alike heads"):
            check_scales(cache, config)
        with pytest.raises(UsageError, match="layers all have K and V, of alike heads"):
            next(calibrate(Transformer(config, model.weights, model.backend), [IDS[:9]], n_ctx=16))


def test_llm_takes_a_file_or_what_was_in_it(path: Path, tmp_path: Path) -> None:
    (scales,) = calibrate(LLM(path).engine.model, [IDS[:40]], n_ctx=64)
    write_kv_scales(tmp_path / "s.json", scales)
    types = {"cache_type_k": "fp8_e4m3_head", "cache_type_v": "fp8_e5m2_head", "n_ctx": 64}
    from_file = LLM(path, kv_scales=str(tmp_path / "s.json"), **types)
    assert from_file.cache.kv_scales == scales
    given = LLM(path, kv_scales=scales, **types)
    assert np.array_equal(from_file.logits(IDS[:40]), given.logits(IDS[:40]))
    segment = given.engine.cache.layers[1].segments[0]
    assert segment.scale_k.tolist() == pytest.approx([x / 448 for x in scales.absmax_k[1]])
    assert segment.scale_v.tolist() == pytest.approx([x / 57344 for x in scales.absmax_v[1]])
    with pytest.raises(UsageError, match="no cache type chosen uses scales"):
        LLM(path, kv_scales=scales)
    with pytest.raises(UsageError, match="fp8_e5m2_head needs a file of scales"):
        LLM(path, cache_type_v="fp8_e5m2_head")


@pytest.mark.parametrize("name", quick((*BY_HEAD, *BY_ROW), (BY_HEAD[0], BY_ROW[0])))
def test_the_shipped_model(name: str) -> None:
    """Its predictions hardly change, and it takes the bytes that it should."""
    exact = LLM(F16, n_ctx=256)
    ids = exact.tokenize("Once upon a time there was a kind rabbit named Leo. " * 8)
    scales = None
    if name in BY_HEAD:
        (scales,) = calibrate(exact.engine.model, [ids], n_ctx=256)
    llm = LLM(F16, n_ctx=256, cache_type_k=name, cache_type_v=name, kv_scales=scales)
    assert nmse(llm.logits(ids), exact.logits(ids)) < 0.02
    n_bytes = 256 * 5 * 2 * TOKEN_FORMATS[name].row_bytes(64)
    assert (llm.engine.cache.n_bytes("k"), llm.engine.cache.n_bytes("v")) == (n_bytes, n_bytes)
    assert llm.complete("Once upon a time", max_tokens=8, temperature=0).text.startswith(" there")


# -- the commands


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_calibrate_and_use(
    program: Program, tiny_model: Path, text_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "scales.json"
    argv = ("perplexity", "-m", tiny_model, "-f", text_file, "-c", 32)
    result = program(*argv, "--calibrate-kv", path)
    assert (result.code, result.err) == (0, "")
    scales = read_kv_scales(path)
    k, v = np.max(scales.absmax_k), np.max(scales.absmax_v)
    shape = f"{N_LAYERS} layers of {N_KV_HEADS} KV head"
    n_tokens = scales.n_tokens
    assert result.out == (
        f"{path}: K up to {k:.4g}, V up to {v:.4g}, in {shape}, over {n_tokens} tokens\n"
    )
    assert n_tokens % 32 == 0
    assert (scales.head_dim, scales.rotation_k) == (HEAD_DIM, 0)

    types = ("-ctk", "fp8_e4m3_head", "-ctv", "fp8_e5m2_head")
    facts = json.loads(program(*argv, *types, "--kv-scales", path, "--json", "--kl-divergence").out)
    assert 0 < facts["results"][0]["divergence"]["kld"]["value"] < 0.05
    sweep = program(*argv, "--sweep", "pure", "--kv-scales", path, "--json", "--chunks", 1)
    assert {row["type_k"] for row in json.loads(sweep.out)["results"]} == set(KV_FORMATS)
    bits = {row["type_k"]: row["bits_per_value"] for row in json.loads(sweep.out)["results"]}
    assert (bits["fp8_e4m3_head"], bits["fp8_e4m3_token"]) == (8, 8 + 16 / HEAD_DIM)
    rotated = program(*argv, "--calibrate-kv", path, "--kv-rotation", "on", "--json")
    facts = json.loads(rotated.out)
    assert facts["kv_scales"]["path"] == str(path)
    assert facts["kv_scales"]["rotation_k"] == 64
    assert facts["text"]["n_chunks"] * 32 == facts["kv_scales"]["n_tokens"]
    result = program(*argv, *types, "--kv-scales", path)
    assert (result.code, result.out) == (2, "")
    assert result.err_lines[0].startswith("error: the KV scales were measured with K rotated by 64")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["-ctk", "fp8_e4m3_head"], "error: cache type fp8_e4m3_head needs a file of scales"),
        (["-ctv", "fp8_e5m2_head"], "error: cache type fp8_e5m2_head needs a file of scales"),
        (["--kv-scales", "no.json"], "error: no cache type chosen uses scales (--kv-scales)"),
        (
            ["-ctk", "fp8_e4m3_head", "--kv-scales", "no.json"],
            "error: the KV scales no.json: No such file or directory",
        ),
        (["--sweep", "f16/fp8_e4m3_head"], "error: cache type fp8_e4m3_head needs a file"),
        (["--sweep", "f16/f16", "--kv-scales", "no.json"], "error: no cache type chosen uses"),
        (["--sweep", "all", "--kv-scales", "no.json"], "error: the KV scales no.json: No such"),
        (["--calibrate-kv", "no/s.json"], "error: no is not a folder"),
        (["--calibrate-kv", "s.json", "-ctk", "f16"], "error: --calibrate-kv measures with an f32"),
        (["--calibrate-kv", "s.json", "--kv-scales", "x"], "error: --calibrate-kv measures with"),
        (["--calibrate-kv", "s.json", "--sweep", "pure"], "error: --calibrate-kv measures nothing"),
        (["--calibrate-kv", "s.json", "--kl-divergence"], "error: --calibrate-kv measures nothing"),
    ],
)
def test_errors_before_the_model_is_loaded(
    program: Program, text_file: Path, tmp_path: Path, options: list[str], line: str
) -> None:
    model = tmp_path / "model.gguf"
    model.touch()  # which could not be loaded
    result = program("perplexity", "-m", model, "-f", text_file, *options)
    assert (result.code, result.out) == (2, "")
    assert result.err_lines[0].startswith(line)
    assert len(result.err_lines) <= 2
    if "needs a file" in line:
        assert result.err_lines[1] == (
            "hint: localkv perplexity -m MODEL -f TEXT --calibrate-kv FILE makes one; "
            "--kv-profile has them, too, from localkv calibrate -m MODEL"
        )


def test_missing_scales_are_said_before_model_is_imported(tiny_model: Path) -> None:
    program = """
import sys
from localkv.cli import run
code = run(["complete", "-m", sys.argv[1], "-p", "x", "-ctk", "fp8_e4m3_head"])
print(code, "torch" in sys.modules)
"""
    command = [sys.executable, "-c", program, str(tiny_model)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]


def test_scales_of_another_shape_are_one_line(
    program: Program, tiny_model: Path, tmp_path: Path
) -> None:
    write_kv_scales(tmp_path / "s.json", SCALES)
    argv = ("complete", "-m", tiny_model, "-p", "x", "-ctk", "fp8_e4m3_head")
    result = program(*argv, "--kv-scales", tmp_path / "s.json")
    assert (result.code, result.out) == (2, "")
    assert result.err_lines[0] == (
        "error: the KV scales are of another model: its n_kv_heads is 2, this one's 1"
    )
