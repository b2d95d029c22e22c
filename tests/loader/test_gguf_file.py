"""`open_gguf` on well-formed files: what was written is what is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType
from gguf import GGUFValueType as ValueType

from localkv.errors import ModelFileError
from localkv.loader.gguf_file import Metadata, TensorInfo, open_gguf
from localkv.quant_formats import FORMATS, WEIGHT_FORMATS
from support.gguf_bytes import ARRAY, BOOL, F32, I32, STRING, Tensor, gguf_bytes
from support.paths import ROOT

SCALARS = {
    "u8": (255, ValueType.UINT8),
    "i8": (-128, ValueType.INT8),
    "u16": (65535, ValueType.UINT16),
    "i16": (-32768, ValueType.INT16),
    "u32": (2**32 - 1, ValueType.UINT32),
    "i32": (-(2**31), ValueType.INT32),
    "u64": (2**64 - 1, ValueType.UINT64),
    "i64": (-(2**63), ValueType.INT64),
    "f32": (1.5e-45, ValueType.FLOAT32),
    "f64": (0.1, ValueType.FLOAT64),
    "true": (True, ValueType.BOOL),
    "false": (False, ValueType.BOOL),
    "string": ("naïve 😀\n", ValueType.STRING),
    "ключ.鍵": ("\x00", ValueType.STRING),
}


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def weights(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("version", [2, 3])
def test_every_type_of_value(tmp_path: Path, version: int) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    expected: dict[str, object] = {"general.architecture": "llama"}
    for key, (value, value_type) in SCALARS.items():
        writer.add_key_value(key, value, value_type)
        writer.add_key_value(f"{key}.array", [value] * 3, ValueType.ARRAY, value_type)
        expected |= {key: value, f"{key}.array": [value] * 3}
    nested = [[[1, 2], [3]], [[4]]]
    writer.add_key_value("nested", nested, ValueType.ARRAY)
    expected["nested"] = nested
    finish(writer)
    if version == 2:  # the same layout
        data = bytearray(path.read_bytes())
        data[4] = 2
        path.write_bytes(data)

    opened = open_gguf(path)

    assert opened.version == version
    assert opened.alignment == 32
    expected["f32"] = float(np.float32(1.5e-45))
    expected["f32.array"] = [expected["f32"]] * 3
    assert dict(opened.metadata) == expected
    assert list(opened.metadata) == list(expected)
    for key, value in expected.items():
        assert type(opened.metadata[key]) is type(value)
        if isinstance(value, list):
            assert {type(item) for item in opened.metadata[key]} == {type(value[0])}
    assert len(opened.metadata) == len(expected)
    assert "u8" in opened.metadata
    assert "u9" not in opened.metadata
    assert str(len(expected)) in repr(opened.metadata)


def test_values_that_the_writer_refuses(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    file = gguf_bytes(
        [
            ("empty.strings", ARRAY, (STRING, [])),
            ("empty.numbers", ARRAY, (F32, [])),
            ("empty.bools", ARRAY, (BOOL, [])),
            ("empty.nested", ARRAY, (ARRAY, [])),
            ("nested", ARRAY, (ARRAY, [(STRING, ["a", ""]), (I32, []), (BOOL, [1, 0])])),
            ("", STRING, ""),
            ("tokens", ARRAY, (STRING, [b"\xf0\x9f", b"\xff", "é"])),
            (b"odd \xff", STRING, b"\xc3"),
        ]
    )
    path.write_bytes(file.data)
    metadata = open_gguf(path).metadata
    for kind in ("strings", "numbers", "bools", "nested"):
        assert metadata[f"empty.{kind}"] == []
    # an empty array has no type that could be wrong
    assert metadata.strings("empty.numbers") == []
    assert metadata.integers("empty.strings") == []
    assert metadata["nested"] == [["a", ""], [], [True, False]]
    assert metadata[""] == ""
    assert metadata.strings("tokens") == ["�", "�", "é"]
    assert metadata["odd �"] == "�"


def test_getters() -> None:
    metadata = Metadata(
        {
            "name": "x",
            "count": 3,
            "eps": 1e-5,
            "flag": True,
            "words": ["a", "b"],
            "ids": [1, 2],
            "scores": [0.5, 1.0],
            "flags": [True],
        },
        source="model.gguf",
    )
    assert metadata.string("name") == "x"
    assert metadata.integer("count") == 3
    assert metadata.number("eps") == 1e-5
    assert metadata.number("count") == 3.0
    assert type(metadata.number("count")) is float
    assert metadata.boolean("flag") is True
    assert metadata.strings("words") == ["a", "b"]
    assert metadata.integers("ids") == [1, 2]
    assert metadata.numbers("scores") == [0.5, 1.0]
    assert list(map(type, metadata.numbers("ids"))) == [float, float]


@pytest.mark.parametrize(
    "getter", ["string", "integer", "number", "boolean", "strings", "integers", "numbers"]
)
def test_getters_defaults(getter: str) -> None:
    get = getattr(Metadata({}, source="model.gguf"), getter)
    for default in (None, 0, "x", [1]):
        assert get("llama.block_count", default) is default
        assert get("llama.block_count", default=default) is default
    with pytest.raises(ModelFileError) as error:
        get("llama.block_count")
    assert str(error.value) == "model.gguf: missing key 'llama.block_count'"


@pytest.mark.parametrize(
    ("getter", "value", "message"),
    [
        ("integer", "32", "is a string, expected an integer"),
        ("integer", True, "is a boolean, expected an integer"),
        ("integer", 1.0, "is a number, expected an integer"),
        ("number", False, "is a boolean, expected a number"),
        ("boolean", 1, "is an integer, expected a boolean"),
        ("string", ["a"], "is an array of strings, expected a string"),
        ("strings", "a", "is a string, expected an array of strings"),
        ("strings", [1], "is an array of integers, expected an array of strings"),
        ("integers", [True], "is an array of booleans, expected an array of integers"),
        ("integers", [1.0], "is an array of numbers, expected an array of integers"),
        ("numbers", [[1]], "is an array of arrays, expected an array of numbers"),
        ("numbers", [], None),
    ],
)
def test_getters_of_the_wrong_type(getter: str, value: object, message: str | None) -> None:
    get = getattr(Metadata({"llama.block_count": value}, source="model.gguf"), getter)
    if message is None:
        assert get("llama.block_count") == value
        return
    for default in ((), (None,)):
        with pytest.raises(ModelFileError) as error:
            get("llama.block_count", *default)
        assert str(error.value) == f"model.gguf: key 'llama.block_count' {message}"


def test_tensors_of_every_format(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    rng = np.random.default_rng(0)
    written: dict[str, tuple[tuple[int, ...], np.ndarray]] = {}
    for fmt in WEIGHT_FORMATS.values():
        for lead in ((), (3,), (2, 3), (2, 1, 3)):
            name = f"{fmt.name}.{len(lead) + 1}"
            shape = (*lead, 2 * fmt.block_size)
            rows = rng.integers(0, 256, (*lead, fmt.row_bytes(shape[-1])), np.uint8)
            writer.add_tensor(name, rows, raw_dtype=GGMLType(fmt.ggml_type))
            written[name] = (shape, rows)
    finish(writer)

    opened = open_gguf(str(path))

    assert list(opened.tensors) == list(written)
    assert opened.n_bytes == sum(rows.nbytes for _, rows in written.values())
    assert opened.file_bytes == path.stat().st_size
    assert opened.path == path
    assert opened.parts == (path,)
    assert f"{len(written)} tensors" in repr(opened)
    for name, (shape, rows) in written.items():
        tensor = opened.tensors[name]
        assert tensor.shape == shape
        assert tensor.format is FORMATS[name.split(".")[0]]
        assert tensor.n_bytes == rows.nbytes
        assert tensor.part == 0
        data = opened.data(name)
        assert data.dtype == np.uint8
        np.testing.assert_array_equal(data, rows)


def test_data_is_a_read_only_view_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", weights(0, 4, 8))
    finish(writer)
    opened = open_gguf(path)
    info = opened.tensors["x"]
    assert info == TensorInfo("x", (4, 8), FORMATS["f32"], 128, info.offset, 0)
    data = opened.data("x")
    assert not data.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        data[0, 0] = 1
    with open(path, "r+b") as file:  # what is written to the file is seen in the view
        file.seek(info.offset)
        file.write(b"\x2a\x2b")
    assert data[0, :2].tolist() == [0x2A, 0x2B]
    assert opened.data("x").ctypes.data == data.ctypes.data
    del opened  # a view outlives the file object
    assert data[0, 0] == 0x2A


def test_unknown_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    finish(gguf.GGUFWriter(path, "llama"))
    with pytest.raises(ModelFileError, match=r"model\.gguf: missing tensor 'output\.weight'"):
        open_gguf(path).data("output.weight")


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    written = {f"t{n}": weights(n, n) for n in (1, 2, 31)}
    for name, values in written.items():
        writer.add_tensor(name, values)
    finish(writer)
    opened = open_gguf(path)
    assert opened.alignment == alignment
    for name, values in written.items():
        assert opened.tensors[name].offset % alignment == 0
        assert opened.data(name).tobytes() == values.tobytes()


def test_tensors_in_any_order_and_with_gaps(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    payload = bytes(range(256))
    tensors = [
        Tensor("b", (32,), 0, payload[128:], offset=128),
        Tensor("a", (16,), 0, payload[:128], offset=0),  # and a hole up to b
    ]
    file = gguf_bytes([], tensors)
    path.write_bytes(file.data[:-256] + payload)
    opened = open_gguf(path)
    assert list(opened.tensors) == ["b", "a"]
    assert opened.data("b").tobytes() == payload[128:]
    assert opened.data("a").tobytes() == payload[:64]


def test_no_tensors_and_no_keys(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.write_bytes(gguf_bytes([]).data)
    opened = open_gguf(path)
    assert (opened.n_bytes, opened.file_bytes) == (0, 24)
    assert dict(opened.tensors) == {}
    assert dict(opened.metadata) == {}


def split_model(folder: Path) -> tuple[list[Path], dict[str, np.ndarray]]:
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=2)
    writer.add_uint32("llama.block_count", 5)
    written = {f"t{i}": weights(i, 2, 8 + i) for i in range(5)}
    for name, values in written.items():
        writer.add_tensor(name, values)
    finish(writer)
    return [folder / f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)], written


@pytest.mark.parametrize("opened_part", [0, 1, 2])
def test_split_model_opens_from_any_part(tmp_path: Path, opened_part: int) -> None:
    paths, written = split_model(tmp_path)
    opened = open_gguf(paths[opened_part])
    assert opened.path == paths[opened_part]
    assert opened.parts == tuple(paths)
    assert opened.metadata.integer("llama.block_count") == 5
    assert opened.metadata.integer("split.no") == 0
    assert [tensor.part for tensor in opened.tensors.values()] == [0, 0, 1, 1, 2]
    assert list(opened.tensors) == list(written)
    for name, values in written.items():
        assert opened.data(name).tobytes() == values.tobytes()
    assert opened.file_bytes == sum(path.stat().st_size for path in paths)
    assert opened.n_bytes == sum(values.nbytes for values in written.values())


def test_split_model_without_a_part(tmp_path: Path) -> None:
    paths, _ = split_model(tmp_path)
    paths[1].unlink()
    message = "1 of 3 parts of the model are missing: model-00002-of-00003.gguf"
    with pytest.raises(ModelFileError, match=message):
        open_gguf(paths[0])


def test_split_model_under_another_name(tmp_path: Path) -> None:
    paths, _ = split_model(tmp_path)
    renamed = paths[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelFileError, match=r"one of 3 parts.*-00001-of-00003\.gguf"):
        open_gguf(renamed)


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        (0, "split.no", 1, r"model-00001-of-00003\.gguf: split\.no is not 0"),
        (2, "split.no", 1, r"model-00003-of-00003\.gguf: split\.no is not 2"),
        (2, "split.count", 4, r"model-00003-of-00003\.gguf: split\.count is not 3"),
        (2, "split.count", 0, r"model-00003-of-00003\.gguf: split\.count is not 3"),
        (0, "split.tensors.count", 6, r"split\.tensors\.count is 6, the parts hold 5"),
        (0, "split.count", 65535, r"one of 65535 parts of a split model"),
    ],
)
def test_parts_that_do_not_belong_together(
    tmp_path: Path, part: int, key: str, value: int, message: str
) -> None:
    paths, _ = split_model(tmp_path)
    data = bytearray(paths[part].read_bytes())
    at = data.index(key.encode()) + len(key) + 4  # behind the type; 16 bits are enough for all
    data[at : at + 2] = value.to_bytes(2, "little")
    paths[part].write_bytes(data)
    with pytest.raises(ModelFileError, match=message):
        open_gguf(paths[0])


def test_tensor_in_two_parts(tmp_path: Path) -> None:
    paths, _ = split_model(tmp_path)
    data = paths[1].read_bytes()
    assert data.count(b"\x02\x00\x00\x00\x00\x00\x00\x00t2") == 1
    paths[1].write_bytes(data.replace(b"\x00t2", b"\x00t1"))
    with pytest.raises(ModelFileError, match=r"00002.*tensor 't1' is in another part too"):
        open_gguf(paths[0])


def test_opening_does_not_import_torch(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes([], [Tensor("x", (32,), 8, bytes(34))]).data)
    code = (
        "import sys; from localkv.loader.gguf_file import open_gguf;"
        f"open_gguf({str(path)!r}).data('x'); assert not {{'torch', 'gguf'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_conformance_models_against_gguf_py(conformance: Path) -> None:
    paths = sorted([*conformance.glob("archs/*.gguf"), *conformance.glob("weights/*.gguf")])
    assert len(paths) > 20
    for path in paths:
        opened, reader = open_gguf(path), gguf.GGUFReader(path)
        expected = {
            key: field.contents()
            for key, field in reader.fields.items()
            if not key.startswith("GGUF.")
        }
        assert dict(opened.metadata) == expected
        assert list(opened.tensors) == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            info = opened.tensors[tensor.name]
            assert info.shape == tuple(tensor.shape.tolist()[::-1])
            assert info.format.ggml_type == tensor.tensor_type
            assert info.offset == tensor.data_offset
            assert opened.data(tensor.name).tobytes() == tensor.data.tobytes()


def test_conformance_tokenizer(conformance: Path) -> None:
    metadata = open_gguf(conformance / "tokenizers" / "ggml-vocab-llama-bpe.gguf").metadata
    tokens = metadata.strings("tokenizer.ggml.tokens")
    assert len(tokens) == 128256
    assert tokens[:3] == ["!", '"', "#"]
    assert tokens[128000] == "<|begin_of_text|>"
    assert metadata.strings("tokenizer.ggml.merges")[:2] == ["Ġ Ġ", "Ġ ĠĠĠ"]
    assert set(metadata.integers("tokenizer.ggml.token_type")) == {1, 3}
