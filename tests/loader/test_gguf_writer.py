"""Files written tensor by tensor: what they hold, and what is left when writing ends early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from numpy.typing import NDArray

from localkv.errors import ModelFileError, UsageError
from localkv.loader.gguf_file import open_gguf
from localkv.loader.gguf_writer import NewTensor, write_gguf
from localkv.quant_formats import FORMATS


def tensor(name: str, type_name: str, shape: tuple[int, ...], seed: int) -> NewTensor:
    """Random bytes, in pieces of a row."""
    fmt = FORMATS[type_name]
    size = (int(np.prod(shape[:-1])), fmt.row_bytes(shape[-1]))
    rows = np.random.default_rng(seed).integers(256, size=size, dtype=np.uint8)
    return NewTensor(name, shape, fmt, lambda: iter(rows))


TENSORS = [
    tensor("a.weight", "q4_0", (3, 32), 1),
    tensor("b.bias", "f32", (5,), 2),
    tensor("c.weight", "q2_0", (2, 1, 64), 3),
    tensor("d.weight", "bf16", (1, 7), 4),
]


def keys() -> GGUFWriter:
    writer = GGUFWriter(None, "llama")
    writer.add_uint32("llama.block_count", 2)
    return writer


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    path, told = tmp_path / "new.gguf", []
    write_gguf(path, keys(), TENSORS, lambda tensor, n_bytes: told.append((tensor.name, n_bytes)))
    file = open_gguf(path)
    assert file.metadata.integer("llama.block_count") == 2
    assert list(file.tensors) == [one.name for one in TENSORS]
    for one in TENSORS:
        assert file.tensors[one.name].shape == one.shape
        assert file.tensors[one.name].format is one.format
        assert file.data(one.name).tobytes() == b"".join(row.tobytes() for row in one.pieces())
        assert (one.name, one.n_bytes) in told


def broken() -> Iterator[NDArray[np.uint8]]:
    yield np.zeros(18, np.uint8)
    raise KeyboardInterrupt


@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelFileError])
def test_what_ends_early_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(b"before")
    pieces = broken if error is KeyboardInterrupt else lambda: iter([np.zeros(18, np.uint8)])
    with pytest.raises(error):
        write_gguf(path, keys(), [NewTensor("a", (2, 32), FORMATS["q4_0"], pieces)])
    assert [file.name for file in tmp_path.iterdir()] == ["new.gguf"]
    assert path.read_bytes() == b"before"


def test_a_full_disk_is_found_before(tmp_path: Path) -> None:
    huge = NewTensor("a", (1 << 30, 1 << 20), FORMATS["f32"], broken)
    with pytest.raises(UsageError, match=r"takes .* but the disk has"):
        write_gguf(tmp_path / "new.gguf", keys(), [huge])
    with pytest.raises(UsageError, match="No such file"):
        write_gguf(tmp_path / "none" / "new.gguf", keys(), TENSORS)
