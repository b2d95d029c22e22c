"""The header of a model on Hugging Face: the first bytes of its files, and nothing more of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from localkv.errors import HubError, byte_size
from localkv.loader.gguf_file import PartHeader, join_tensors, read_header
from localkv.loader.gguf_header import TensorInfo, TruncatedError
from localkv.loader.hub.client import open_file
from localkv.loader.hub.find import HubModel
from localkv.loader.hub.reference import RepoFile
from localkv.loader.metadata import Metadata

FIRST_BYTES = 1 << 20
"""Bytes of the first request; each further one doubles the part that is there."""


MAX_BYTES = 128 << 20
"""The most bytes of a header that are asked for; the largest vocabularies take a tenth of it."""


@dataclass(frozen=True)
class RemoteHeader:
    """A `ModelHeader`.

    Attributes:
        path: the name of the first file in the repository.
        metadata: keys and values of the first part.
        tensors: of all parts, by name.
    """

    path: Path
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]


def remote_header(model: HubModel) -> RemoteHeader:
    """Ask for the headers of a model's files.

    Raises:
        HubError: the hub refuses, or can't be reached.
        ModelFileError: a header is malformed, or of a kind that is not supported.
    """
    parts = [_part_header(model, file) for file in model.model.files]
    return RemoteHeader(parts[0].path, parts[0].metadata, join_tensors(parts))


def _part_header(model: HubModel, file: RepoFile) -> PartHeader:
    data, path = b"", Path(file.path)
    while True:
        data += _bytes(model, file, len(data), max(FIRST_BYTES, len(data)))
        try:
            return read_header(data, path, file.n_bytes)
        except TruncatedError:
            if len(data) >= file.n_bytes:
                raise
        if len(data) >= MAX_BYTES:
            raise HubError(f"the header of {file.path} takes more than {byte_size(MAX_BYTES)}")


def _bytes(model: HubModel, file: RepoFile, start: int, n_bytes: int) -> bytes:
    """`n_bytes` of a file from `start` on, or all that follow."""
    data, end = bytearray(), min(start + n_bytes, file.n_bytes)
    if end == start:
        return b""
    with open_file(model.reference, model.commit, file, start, end) as (begins_there, pieces):
        at = start if begins_there else 0
        for piece in pieces:
            data += piece[max(0, start - at) :]
            at += len(piece)
            if at >= end:
                break
    if at < end:
        raise HubError(f"the connection ended within the header of {file.path}")
    return bytes(data[: end - start])
