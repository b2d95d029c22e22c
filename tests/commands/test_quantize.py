"""`localkv quantize`."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from localkv.loader.gguf_file import open_gguf
from support.paths import MODELS
from support.program import Program
from support.quantize_models import importance, write_importance

TALES = MODELS / "tales-4M-F16.gguf"


def test_a_file_is_made_and_what_is_in_it_is_said(program: Program, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    result = program("quantize", TALES, out, "q4_0", "2")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].split() == ["TYPE", "TENSORS", "SIZE"]
    assert lines[-2].startswith("after: 2.")
    assert lines[-1] == str(out)
    assert open_gguf(out).tensors["blk.0.attn_q.weight"].format.name == "q4_0"


def test_without_a_name_the_file_is_beside_the_model(program: Program, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.symlink_to(TALES)
    assert program("quantize", model, "F32").code == 0
    assert (tmp_path / "ggml-model-F32.gguf").exists()


def test_a_dry_run_writes_nothing(program: Program, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    result = program("quantize", "--dry-run", TALES, out, "IQ4_XS")
    assert result.code == 0
    assert not out.exists()
    found = [line.split() for line in result.out.splitlines()]
    assert ["blk.0.attn_q.weight", "256", "x", "256", "f16", "->", "iq4_xs"] in [
        words[:7] for words in found
    ]


def test_json(program: Program) -> None:
    words = ("--tensor-type", "attn_v=q8_0", "--dry-run", "--json")
    facts = json.loads(program("quantize", *words, TALES, "Q4_K_M").out)
    types = {item["name"]: item["type_after"] for item in facts["tensors"]}
    assert types["blk.0.attn_v.weight"] == "q8_0"
    assert facts["bytes_after"] == sum(item["bytes_after"] for item in facts["tensors"])


def test_a_report_has_the_errors_of_all_tensors(program: Program, tmp_path: Path) -> None:
    out, report, matrix = (tmp_path / name for name in ("out.gguf", "report.json", "i.dat"))
    write_importance(matrix, {"blk.0.attn_q.weight": 256})
    words = ("--pure", "--imatrix", matrix, "--report", report, TALES, out, "Q4_0")
    assert program("quantize", *words).code == 0
    found = {item["name"]: item for item in json.loads(report.read_text())["tensors"]}
    tensors = {x.name: x for x in gguf.GGUFReader(out).tensors}
    before = {x.name: x for x in gguf.GGUFReader(TALES).tensors}
    assert found.keys() == tensors.keys()
    for name, item in found.items():
        new, old = (
            gguf.quants.dequantize(x.data, x.tensor_type) for x in (tensors[name], before[name])
        )
        squares = np.square(new.astype(float) - old)
        assert item["rmse"] == pytest.approx(np.sqrt(squares.mean()), rel=1e-6)
        if name != "blk.0.attn_q.weight":
            assert item["weighted_rmse"] is None
            continue
        weights = np.broadcast_to(importance(256, 0), squares.shape)
        expected = np.sqrt(np.average(squares, weights=weights))
        assert item["weighted_rmse"] == pytest.approx(expected, rel=1e-6)
    refused = program("quantize", "--dry-run", "--report", report, TALES, "Q4_0")
    assert (refused.code, "--dry-run makes none" in refused.err_lines[0]) == (2, True)


def test_a_list_of_types_in_a_file(program: Program, tmp_path: Path) -> None:
    listed = tmp_path / "types.txt"
    listed.write_text("attn_q=Q5_0\nFFN_UP=q5_1 ")
    words = ("--tensor-type-file", listed, "--dry-run", "--json")
    facts = json.loads(program("quantize", *words, TALES, "Q4_0").out)
    types = {item["name"]: item["type_after"] for item in facts["tensors"]}
    assert (types["blk.0.attn_q.weight"], types["blk.0.ffn_up.weight"]) == ("q5_0", "q5_1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "a model and a type are needed"),
        (["Q4_K_N"], "is not a type of files; did you mean Q4_K_"),
        (["out.gguf", "Q4_5"], "'Q4_5' is not a type of files"),
        (["Q4_0", "2", "3"], "'2' is one word too many"),
        (["Q4_0", "two"], "'two' is one word too many"),
        (["--tensor-type", "attn", "Q4_0"], "--tensor-type: 'attn' is not PATTERN=TYPE"),
        (["--tensor-type", "a(=q8_0", "Q4_0"], "'a(' is not a regular expression"),
        (["--tensor-type", "a=q8", "Q4_0"], "--tensor-type: 'q8' is not a type of weights"),
        (["--output-tensor-type", "q9", "Q4_0"], "--output-tensor-type: 'q9' is not a type"),
        (["--tensor-type", "a=q8_0", "F16"], "--tensor-type has no effect on a file of type F16"),
        (["--include-weights", "a", "Q4_0"], "choose from --imatrix FILE"),
        (["--prune-layers", "1,x", "Q4_0"], "--prune-layers: '1,x' is not a list of layers"),
        (["--prune-layers", "9", "Q4_0"], "there is no layer 9: the model has 5"),
        (["--smooth", "0.5", "Q4_0"], "--smooth needs the sizes of activations"),
        (["--smooth", "0.5", "COPY"], "COPY leaves all as they are"),
        (["--smooth", "1.5", "Q4_0"], "--smooth"),
        (["--imatrix", "none.dat", "Q4_0"], "none.dat: no such file"),
        (["--report", "none/r.json", "Q4_0"], "none/r.json can't be written"),
        (["--report", str(TALES), "Q4_0"], "is a model of this command"),
        (["Q2_K_S"], "needs an importance matrix"),
        (["IQ1_S"], "iq1_s, the type of tensor 'blk.0.attn_k.weight', needs an importance matrix"),
        (["IQ1_M"], "iq1_m, the type of tensor 'blk.0.attn_k.weight', needs an importance matrix"),
        (["--token-embedding-type", "iq1_s", "Q4_0"], "needs an importance matrix"),
        (["nowhere/out.gguf", "Q4_0"], "nowhere/out.gguf can't be written"),
    ],
)
def test_what_is_refused(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    options = words[
        : next((i for i in range(0, len(words), 2) if words[i][:2] != "--"), len(words))
    ]
    rest = words[len(options) :]
    result = program("quantize", *options, *([TALES] if words else []), *rest)
    assert result.code in (1, 2)
    assert said in result.err_lines[0]
    assert list(tmp_path.iterdir()) == []


def test_the_model_is_not_its_own_goal(program: Program, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(TALES.read_bytes())
    result = program("quantize", model, model, "Q4_0")
    assert (result.code, result.err_lines[0]) == (2, f"error: {model} is the model itself")
