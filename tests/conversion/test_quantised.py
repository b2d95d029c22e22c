"""Checkpoints of codes: blocks that hold them, compared with what the codes mean.

`test_convert.py` compares these meanings with llama.cpp's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from localkv.conversion.convert import Plan, plan_conversion
from localkv.errors import ModelFileError
from localkv.quant_formats import FORMATS
from support.checkpoints import cases, write_checkpoint, write_safetensors
from support.checkpoints import values as given

CASES = cases()
LAYER = "blk.0.ffn_down.weight"


def made(folder: Path, path: Path, outtype: str) -> tuple[Plan, dict[str, gguf.ReaderTensor]]:
    plan = plan_conversion(folder, outtype)
    plan.write(path)
    return plan, {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def values(tensor: gguf.ReaderTensor) -> NDArray[np.float32]:
    """Decoded by gguf-py."""
    return gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "type_name"),
    [
        ("gptq", "Q4_0"),
        ("gptq-8-bits", "Q8_0"),
        ("compressed-int4", "Q4_0"),
        ("compressed-int8", "Q8_0"),
    ],
)
def test_codes_are_kept_exactly(name: str, type_name: str, tmp_path: Path) -> None:
    """Every value is the one that the checkpoint's codes and scales mean, to the last bit."""
    folder = write_checkpoint(tmp_path / "tiny", CASES[name])
    plan, blocks = made(folder, tmp_path / "codes.gguf", "auto")
    _, floats = made(folder, tmp_path / "floats.gguf", "f32")
    kept = [n for n, tensor in blocks.items() if tensor.tensor_type.name == type_name]
    assert len(kept) == 14
    assert plan.notes == [f"14 matrices in {type_name} with the checkpoint's codes"]
    for tensor in blocks:
        if tensor in kept or blocks[tensor].tensor_type.name == "F32":
            np.testing.assert_array_equal(values(blocks[tensor]), values(floats[tensor]))
    file_type = plan.writer.kv_data[0]["general.file_type"].value
    assert file_type == {"Q4_0": 2, "Q8_0": 7}[type_name]


@pytest.mark.parametrize("name", ["gptq-zeros", "gptq-v2"])
def test_zero_points_make_minima(name: str, tmp_path: Path) -> None:
    """Codes are kept in Q4_1; only minima may be rounded, to fp16, and that is counted."""
    folder = write_checkpoint(tmp_path / "tiny", CASES[name])
    plan, blocks = made(folder, tmp_path / "codes.gguf", "auto")
    _, floats = made(folder, tmp_path / "floats.gguf", "f32")
    kept = [n for n, tensor in blocks.items() if tensor.tensor_type.name == "Q4_1"]
    assert len(kept) == 14
    n_groups = n_inexact = 0
    for tensor in kept:
        got = values(blocks[tensor]).reshape(-1, 32)
        want = values(floats[tensor]).reshape(-1, 32)
        rows = np.ascontiguousarray(blocks[tensor].data).reshape(-1, 20)
        step = np.abs(rows[:, :2].copy().view(np.float16).astype(np.float32))
        assert (np.abs(got - want) <= 2**-7 * step).all()
        n_groups += len(got)
        n_inexact += int((got != want).any(-1).sum())
    assert plan.notes[0] == "14 matrices in Q4_1 with the checkpoint's codes"
    assert f"of {n_groups:,}" in plan.notes[1]
    counted = int(plan.notes[1].split(" groups")[0].split()[-1].replace(",", ""))
    # a sum in float32 may round to the same value though the minimum was rounded
    assert n_inexact <= counted <= n_groups
    assert n_inexact > 0.9 * counted


def test_columns_in_the_order_of_activations_are_decoded(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", CASES["gptq-order"])
    plan, blocks = made(folder, tmp_path / "codes.gguf", "auto")
    assert blocks[LAYER].tensor_type.name == "BF16"
    (note,) = plan.notes
    assert note == (
        "14 matrices decoded to floats: columns are in the order of activations (desc_act)"
    )


@pytest.mark.parametrize("name", ["fp8", "compressed-fp8"])
def test_small_floats_become_larger_ones(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", CASES[name])
    _, eight = made(folder, tmp_path / "q8.gguf", "q8_0")
    _, floats = made(folder, tmp_path / "floats.gguf", "f32")
    assert eight[LAYER].tensor_type.name == "Q8_0"
    got, want = values(eight[LAYER]), values(floats[LAYER])
    assert np.abs(got - want).max() <= np.abs(want).max() / 250


def test_blocks_of_small_floats_may_be_cut_off(tmp_path: Path) -> None:
    """A matrix of 96 x 64 in blocks of 40 x 40: three and two of them."""
    folder = write_checkpoint(tmp_path / "tiny", CASES["fp8"])
    tensors = {}
    for name, (dtype, shape) in CASES["fp8"]["tensors"].items():
        array = given(name, dtype, shape)
        if name.endswith("_scale_inv"):
            sizes = CASES["fp8"]["tensors"][name.removesuffix("_scale_inv")][1]
            array = given(name, dtype, [-(-size // 40) for size in sizes])
        tensors[name] = (dtype, array)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    write_safetensors(folder / "model.safetensors", tensors)
    settings = {"quant_method": "fp8", "weight_block_size": [40, 40]}
    config = CASES["fp8"]["config"] | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    _, floats = made(folder, tmp_path / "floats.gguf", "f32")
    name = "model.layers.0.mlp.down_proj.weight"
    codes, scales = tensors[name][1], tensors[f"{name}_scale_inv"][1]
    exact = np.repeat(np.repeat(scales, 40, 0)[: codes.shape[0]], 40, 1)[:, : codes.shape[1]]
    fp8 = FORMATS["fp8_e4m3"].codec.decode((codes[..., None],)).reshape(codes.shape)
    np.testing.assert_array_equal(values(floats[LAYER]), fp8 * exact)


def awq_words(codes: NDArray[np.int64]) -> NDArray[np.int32]:
    """AutoAWQ's words: of eight columns the nibbles stand in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def with_awq(folder: Path, zero: Callable[..., NDArray[np.int64]]) -> dict[str, Any]:
    """The checkpoint's files with random AWQ matrices; returns their values by name."""
    random, tensors, want = np.random.default_rng(1), {}, {}
    case = CASES["llama"]
    for name, (dtype, (n_out, *rest)) in case["tensors"].items():
        base = name.removesuffix(".weight")
        if not rest or ".layers." not in name:
            size = (n_out, *rest)
            tensors[name] = ("F32", random.standard_normal(size).astype(np.float32))
            continue
        n_in = rest[0]
        codes = random.integers(16, size=(n_in, n_out))
        zeros = zero(random, (n_in // 32, n_out))
        scales = (random.random((n_in // 32, n_out)) / 100 + 0.001).astype(np.float16)
        tensors[f"{base}.qweight"] = ("I32", awq_words(codes))
        tensors[f"{base}.qzeros"] = ("I32", awq_words(zeros))
        tensors[f"{base}.scales"] = ("F16", scales)
        differences = (codes - np.repeat(zeros, 32, 0)).astype(np.float32)
        want[name] = (differences * np.repeat(scales.astype(np.float32), 32, 0)).T
        assert dtype == "BF16"
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    write_safetensors(folder / "model.safetensors", tensors)
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    config = case["config"] | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return want


@pytest.mark.parametrize("alike", [True, False])
def test_awq(alike: bool, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", CASES["llama"])

    def zero(random: np.random.Generator, size: tuple[int, int]) -> NDArray[np.int64]:
        return np.full(size, 8) if alike else random.integers(16, size=size)

    want = with_awq(folder, zero)
    _, floats = made(folder, tmp_path / "floats.gguf", "f32")
    name = "model.layers.0.mlp.down_proj.weight"
    np.testing.assert_array_equal(values(floats[LAYER]), want[name])
    _, blocks = made(folder, tmp_path / "codes.gguf", "auto")
    assert blocks[LAYER].tensor_type.name == ("Q4_0" if alike else "Q4_1")
    if alike:
        np.testing.assert_array_equal(values(blocks[LAYER]), want[name])


def test_codes_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", CASES["gptq"])

    def error(**settings: Any) -> str:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= settings
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelFileError) as caught:
            plan_conversion(folder)
        return caught.value.message

    assert "codes of 3 bits" in error(bits=3)
    assert "codes don't fit" in error(bits=2) or "has shape" in error(bits=2)
    assert "quantised by 'exl2' are not supported" in error(quant_method="exl2")
    missing = {n: t for n, t in CASES["gptq"]["tensors"].items() if not n.endswith("scales")}
    case = CASES["gptq"] | {"tensors": missing}
    with pytest.raises(ModelFileError, match=r"missing tensor .*scales"):
        plan_conversion(write_checkpoint(tmp_path / "part", case))
