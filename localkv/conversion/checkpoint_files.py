"""The files of a checkpoint: its configuration, and tensors in safetensors files, shards included.

A checkpoint comes from the internet: no length, count or offset in a header is used before it has
been compared with the file. Tensors are views of mapped files. Pickled weights are refused, since
to read one is to run what is in it.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from localkv.errors import ModelFileError, UsageError, byte_size, counted, printable, quoted
from localkv.loader.gguf_file import MappedFile, map_file
from localkv.loader.gguf_header import MAX_TENSORS
from localkv.quant_formats import FORMATS

MOST_JSON, MOST_HEADER = 1 << 28, 100 << 20
"""Most bytes of a JSON file (a tokenizer's may have 30 MB), and of a safetensors header."""
MOST_AXES = 8

DTYPES = {
    "F64": ("<f8", 8),
    "F32": ("<f4", 4),
    "F16": ("<f2", 2),
    "BF16": ("<u2", 2),
    "F8_E4M3": ("u1", 1),
    "F8_E5M2": ("u1", 1),
    "F8_E8M0": ("u1", 1),
    "I64": ("<i8", 8),
    "U64": ("<u8", 8),
    "I32": ("<i4", 4),
    "U32": ("<u4", 4),
    "I16": ("<i2", 2),
    "U16": ("<u2", 2),
    "I8": ("i1", 1),
    "U8": ("u1", 1),
    "BOOL": ("u1", 1),
}
"""NumPy's types for safetensors' types, some of which are numbers of their bits, and bytes."""
FLOATS = {"BF16": "bf16", "F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2"}
"""Formats that decode types that NumPy lacks."""


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        name: as in its file.
        dtype: safetensors' name of its type.
        shape: row-major.
        file: that holds it.
        offset: of its first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: MappedFile
    offset: int

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]

    @property
    def raw(self) -> NDArray[Any]:
        """Its values as they lie in the file, bits where NumPy has no such type: [*shape]."""
        data = np.frombuffer(
            self.file.data, DTYPES[self.dtype][0], math.prod(self.shape), self.offset
        )
        return data.reshape(self.shape)

    def floats(self, index: slice | NDArray[np.intp] = slice(None)) -> NDArray[np.float32]:
        """Values of items of the first axis, as float32."""
        raw = self.raw[index] if self.shape else self.raw
        if (name := FLOATS.get(self.dtype)) is None:
            return raw.astype(np.float32)
        planes = np.ascontiguousarray(raw).view(np.uint8).reshape(*raw.shape, -1)
        return np.asarray(FORMATS[name].codec.decode((planes,))).reshape(raw.shape)


def read_json(path: Path, *, needed: bool = True) -> dict[str, Any]:
    """A JSON file that holds an object; an empty one if it isn't there and needn't be.

    Raises:
        ModelFileError: it can't be read, is too large, or is no JSON object.
    """
    if not needed and not path.exists():
        return {}
    values = _json(path)
    if not isinstance(values, dict):
        raise ModelFileError(f"{printable(path)}: not a JSON object")
    return values


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """A JSON file that holds a list of objects; raises as `read_json`."""
    values = _json(path)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ModelFileError(f"{printable(path)}: not a list of JSON objects")
    return values


def _json(path: Path) -> Any:
    name = printable(path)
    try:
        if path.stat().st_size > MOST_JSON:
            raise ModelFileError(f"{name}: more than {byte_size(MOST_JSON)}")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(f"{name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{name}: not JSON: {error}") from None


def check_folder(folder: Path) -> None:
    """Refuse what is no folder with a checkpoint.

    Raises:
        UsageError: it isn't.
    """
    name = printable(folder)
    if folder.is_file():
        hint = "name the folder that holds it, with config.json and the tokenizer's files"
        raise UsageError(f"{name} is a file, not a checkpoint's folder", hint)
    if not folder.is_dir():
        raise UsageError(f"{name}: no such folder")
    if not (folder / "config.json").is_file():
        hint = "a checkpoint of transformers has one beside its weights"
        raise UsageError(f"{name} has no config.json", hint)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint by name, in the order of the files.

    Raises:
        ModelFileError: there are none, a file is missing or malformed, or a tensor is missing or
            there twice.
    """
    index_path = folder / "model.safetensors.index.json"
    listed: Mapping[str, Any] = {}
    if index_path.is_file():
        listed = read_json(index_path).get("weight_map") or {}
        if not isinstance(listed, dict) or not all(map(_is_file_name, listed.values())):
            raise ModelFileError(f"{printable(index_path)}: weight_map is no list of files")
        names = sorted(set(listed.values()))
    else:
        names = sorted(path.name for path in folder.glob("model*.safetensors"))
    if not names:
        raise _no_weights(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelFileError(
            f"{printable(folder)}: {counted(len(missing), 'file')} of {len(names)} missing: "
            f"{_some(missing)}"
        )
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        for tensor in _tensors_of(folder / name):
            if tensor.name in tensors:
                raise ModelFileError(f"{printable(folder)}: two files have {quoted(tensor.name)}")
            tensors[tensor.name] = tensor
            if len(tensors) > MAX_TENSORS:
                raise ModelFileError(f"{printable(folder)}: more than {MAX_TENSORS} tensors")
    if lost := [name for name in listed if name not in tensors]:
        raise ModelFileError(f"{printable(index_path)}: no file has {_some(lost)}")
    return tensors


def release_pages(files: Sequence[MappedFile]) -> None:
    """Give back the memory of mapped files, whose views stay valid and read them again."""
    for file in files:
        if hasattr(mmap, "MADV_DONTNEED"):
            file.data.madvise(mmap.MADV_DONTNEED)


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and value == Path(value).name and value.endswith(".safetensors")


def _some(names: list[str]) -> str:
    return ", ".join(map(quoted, names[:3])) + (", ..." if len(names) > 3 else "")


def _no_weights(folder: Path) -> ModelFileError:
    name = printable(folder)
    pickled = sorted(path.name for ext in ("bin", "pt", "pth") for path in folder.glob(f"*.{ext}"))
    if pickled:
        return ModelFileError(
            f"{name}: {quoted(pickled[0])} is a pickle, which runs what is in it when it is read",
            hint="save the model as safetensors, by a program and in a place that you trust",
        )
    if any(folder.glob("consolidated*.safetensors")):
        return ModelFileError(
            f"{name} holds a checkpoint in Mistral's own format (consolidated.safetensors)",
            hint="the same model in transformers' format has model.safetensors",
        )
    return ModelFileError(f"{name} has no weights: no model*.safetensors")


def _tensors_of(path: Path) -> Iterable[StoredTensor]:
    """The tensors of one file, which its header lists.

    Raises:
        ModelFileError: the header is malformed.
    """
    name, file = printable(path), map_file(path)
    n_file = len(file.data)
    n_header = int.from_bytes(file.data[:8], "little")
    if n_file < 8 or n_header > min(MOST_HEADER, n_file - 8):
        raise ModelFileError(f"{name}: not a safetensors file, or one that was cut off")
    try:
        header = json.loads(file.data[8 : 8 + n_header])
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{name}: its header is no JSON: {error}") from None
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise ModelFileError(f"{name}: its header lists no tensors, or too many")
    header.pop("__metadata__", None)
    found = [_stored(name, key, entry, file, 8 + n_header) for key, entry in header.items()]
    end, before = 8 + n_header, ""
    for tensor in sorted(found, key=lambda tensor: (tensor.offset, tensor.n_bytes)):
        if tensor.offset < end:
            raise ModelFileError(f"{name}: tensors {before} and {quoted(tensor.name)} overlap")
        end, before = tensor.offset + tensor.n_bytes, quoted(tensor.name)
    return found


def _stored(where: str, name: str, entry: Any, file: MappedFile, data_start: int) -> StoredTensor:
    """An entry of a header."""

    def bad(what: str) -> ModelFileError:
        return ModelFileError(f"{where}: tensor {quoted(name)} {what}")

    if not isinstance(entry, dict):
        raise bad("is not described")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if dtype not in DTYPES:
        raise bad(f"is of the unknown type {quoted(str(dtype))}")
    if not _are_counts(shape) or len(shape) > MOST_AXES:
        raise bad("has no shape")
    if not _are_counts(span) or len(span) != 2:
        raise bad("has no offsets")
    start, end = span
    if end - start != math.prod(shape) * DTYPES[dtype][1]:
        raise bad(f"has {end - start} bytes, which don't fit its shape")
    if data_start + end > len(file.data):
        raise bad(f"ends at byte {data_start + end}, the file at byte {len(file.data)}")
    return StoredTensor(name, dtype, tuple(shape), file, data_start + start)


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 62 for value in values
    )
