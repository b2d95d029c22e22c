"""Tensors that are read into memory where the file is not to be mapped."""

from __future__ import annotations

import io
import mmap
import os
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from localkv.errors import ModelFileError, printable
from localkv.loader.gguf_header import TensorInfo
from localkv.loader.mapped_file import MappedFile


@dataclass
class FileCopies:
    """The tensors that were read, each in memory of its own, whose pages can be given back."""

    _memory: dict[str, mmap.mmap] = field(default_factory=dict)

    def read(self, file: MappedFile, tensor: TensorInfo) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor: uint8 [n].

        Raises:
            ModelFileError: they can't be read, or the file is no longer the one that was opened.
        """
        if hasattr(mmap, "MAP_PRIVATE"):
            # pages of shared memory would stay when they are given back
            memory = mmap.mmap(-1, tensor.n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            memory = mmap.mmap(-1, tensor.n_bytes)
        self._memory[tensor.name] = memory
        try:
            with open(file.path, "rb", buffering=0) as source:
                file.check_is_same(os.fstat(source.fileno()))
                source.seek(tensor.offset)
                _fill(memory, source)
        except OSError as error:
            name = printable(file.path)
            raise ModelFileError(f"{name}: cannot be read: {error.strerror or error}") from None
        return np.frombuffer(memory, np.uint8)

    def release(self, name: str) -> None:
        """Give back the memory of a tensor that was laid out anew; views of it read as zeros."""
        memory = self._memory.pop(name, None)
        if memory is not None and hasattr(mmap, "MADV_DONTNEED"):
            memory.madvise(mmap.MADV_DONTNEED)


def _fill(memory: mmap.mmap, source: io.FileIO) -> None:
    with memoryview(memory) as whole:
        done = 0
        while done < len(whole):
            n = source.readinto(whole[done:])
            if not n:
                raise OSError("it ended early")
            done += n
