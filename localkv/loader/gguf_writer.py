"""Writes a GGUF file, with gguf-py's writer for the header and one tensor after the other.

The file takes its name once all of it is on the disk: neither a full disk nor Ctrl-C leaves a part
of it. A tensor is made when its turn comes, in pieces, so that nothing holds a whole model.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from localkv.errors import ModelFileError, UsageError, byte_size, printable
from localkv.quant_formats import QuantFormat
from localkv.system.files import check_place, written_whole

if TYPE_CHECKING:
    from io import BufferedWriter

    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter
    from numpy.typing import NDArray

ALIGNMENT = 32
"""Each tensor begins at a multiple of as many bytes, as where a file says nothing of it."""


@dataclass(frozen=True)
class NewTensor:
    """A tensor that is to be written.

    Attributes:
        name: as in the file.
        shape: row-major, ggml's `ne` reversed: the last axis runs along a row.
        format: how a row is packed.
        pieces: makes its bytes, uint8 of any shape, in order.
    """

    name: str
    shape: tuple[int, ...]
    format: QuantFormat
    pieces: Callable[[], Iterable[NDArray[np.uint8]]]

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows, without padding."""
        return math.prod(self.shape[:-1]) * self.format.row_bytes(self.shape[-1])


def check_room(path: Path, tensors: Sequence[NewTensor]) -> None:
    """Find out whether a file can be written, before anything of it is made.

    Raises:
        UsageError: the place can't be written to, or the disk has too little room.
    """
    try:
        check_place(path)
    except OSError as error:
        raise UsageError(f"{printable(path)}: {error.strerror}") from error
    n_bytes = sum(tensor.n_bytes for tensor in tensors)
    free = shutil.disk_usage(Path(os.path.realpath(path)).parent).free
    if n_bytes > free:
        raise UsageError(
            f"{printable(path)} takes {byte_size(n_bytes)}, but the disk has {byte_size(free)} left"
        )


def describe(writer: GGUFWriter, tensors: Sequence[NewTensor]) -> None:
    """Put names, shapes and types of tensors into a writer's header."""
    import numpy as np

    for tensor in tensors:
        kind = cast("GGMLQuantizationType", tensor.format.ggml_type)  # gguf-py may not know it
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, raw_dtype=kind
        )


def write_gguf(
    path: Path,
    writer: GGUFWriter,
    tensors: Sequence[NewTensor],
    on_bytes: Callable[[NewTensor, int], None] = lambda tensor, n_bytes: None,
) -> None:
    """Write a file.

    Args:
        path: its name; a file that has it is replaced in the end.
        writer: gguf-py's, with all keys, and with the tensors if `describe` was called.
        tensors: in the file's order.
        on_bytes: called with a tensor and the bytes of it that were written.

    Raises:
        UsageError: there is no room for it (`check_room`).
        ModelFileError: a tensor came out in another size.
        OSError: it can't be written.
    """
    from gguf.gguf_writer import WriterState

    check_room(path, tensors)
    if not any(writer.tensors):
        describe(writer, tensors)
    with written_whole(path) as file:
        writer.fout = [cast("BufferedWriter", file)]  # which is open already
        writer.state = WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        file.write(bytes(-file.tell() % ALIGNMENT))
        for tensor in tensors:
            n_written = 0
            for piece in tensor.pieces():
                n_written += file.write(piece.data if piece.flags.c_contiguous else piece.tobytes())
                on_bytes(tensor, n_written)
            if n_written != tensor.n_bytes:
                raise ModelFileError(
                    f"tensor {tensor.name!r} has {n_written} bytes, expected {tensor.n_bytes}"
                )
            file.write(bytes(-n_written % ALIGNMENT))
