"""Folders and safetensors files: what is in them, and headers that lie."""

from __future__ import annotations

import json
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localkv.conversion.checkpoint_files import check_folder, read_json, stored_tensors
from localkv.errors import LocalKVError, ModelFileError, UsageError
from support.checkpoints import write_safetensors


def with_header(folder: Path, header: Any, data: bytes = bytes(64)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def entry(start: int, end: int, shape: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_values_come_as_they_were_written(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    half, brain = random.random((3, 2)).astype("<f2"), np.array([0x3F80, 0xC000], "<u2")
    eight = np.array([[0x38, 0xC0]], np.uint8)
    write_safetensors(
        tmp_path / "model.safetensors",
        {"a": ("F16", half), "b": ("BF16", brain), "c": ("F8_E4M3", eight)},
    )
    found = stored_tensors(tmp_path)
    np.testing.assert_array_equal(found["a"].floats(), half.astype(np.float32))
    np.testing.assert_array_equal(found["a"].floats(slice(1, 2)), half[1:2].astype(np.float32))
    np.testing.assert_array_equal(found["b"].floats(), [1.0, -2.0])
    np.testing.assert_array_equal(found["c"].floats(), [[1.0, -2.0]])


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        ([1], "lists no tensors"),
        ({"a": 3}, "not described"),
        ({"a": entry(0, 16, [4], "F31")}, "unknown type 'F31'"),
        ({"a": entry(0, 16, [-4])}, "no shape"),
        ({"a": entry(0, 16, [2] * 9)}, "no shape"),
        ({"a": entry(0, 16, [True, 4])}, "no shape"),
        ({"a": entry(0, 16, [1 << 61, 1 << 61])}, "don't fit its shape"),
        ({"a": entry(16, 0, [4])}, "don't fit its shape"),
        ({"a": entry(0, 12, [4])}, "don't fit its shape"),
        ({"a": entry(0, 1 << 40, [1 << 38])}, "the file at byte"),
        ({"a": entry(52, 68, [4])}, "the file at byte"),
        ({"a": entry(0, 16, [4]), "b": entry(12, 28, [4])}, "'a' and 'b' overlap"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        stored_tensors(with_header(tmp_path, header))


@given(st.binary(max_size=200))
def test_any_bytes_give_tensors_or_one_line(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.safetensors").write_bytes(data)
        with suppress(LocalKVError):
            stored_tensors(folder)


def test_shards(tmp_path: Path) -> None:
    one = np.zeros(2, np.float32)
    for i in (1, 2):
        write_safetensors(tmp_path / f"model-{i}.safetensors", {f"t{i}": ("F32", one)})
    index = tmp_path / "model.safetensors.index.json"
    files = {"t1": "model-1.safetensors", "t2": "model-2.safetensors"}
    index.write_text(json.dumps({"weight_map": files}))
    assert list(stored_tensors(tmp_path)) == ["t1", "t2"]
    index.write_text(json.dumps({"weight_map": files | {"t3": "model-2.safetensors"}}))
    with pytest.raises(ModelFileError, match="no file has 't3'"):
        stored_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": files | {"t3": "model-3.safetensors"}}))
    with pytest.raises(ModelFileError, match=r"1 file of 3 missing: 'model-3.safetensors'"):
        stored_tensors(tmp_path)
    for path in ("../model-1.safetensors", "/etc/passwd", 3):
        index.write_text(json.dumps({"weight_map": {"t1": path}}))
        with pytest.raises(ModelFileError, match="no list of files"):
            stored_tensors(tmp_path)
    index.unlink()
    write_safetensors(tmp_path / "model-3.safetensors", {"t1": ("F32", one)})
    with pytest.raises(ModelFileError, match="two files have 't1'"):
        stored_tensors(tmp_path)


def test_folders_that_are_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        check_folder(tmp_path / "none")
    with pytest.raises(UsageError, match=r"no config\.json"):
        check_folder(tmp_path)
    with pytest.raises(ModelFileError, match="no weights"):
        stored_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"pytorch_model\.bin.* is a pickle"):
        stored_tensors(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        check_folder(tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelFileError, match="not a JSON object"):
        read_json(tmp_path / "config.json")
