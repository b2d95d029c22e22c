"""The facts about a model before its tensors are read, wherever its file is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from localkv.loader.gguf_header import TensorInfo
from localkv.loader.metadata import Metadata


class ModelHeader(Protocol):
    """A `GGUFFile`, or the header alone of a file that is elsewhere."""

    @property
    def path(self) -> Path:
        """The file, or its name."""
        ...

    @property
    def metadata(self) -> Metadata:
        """Keys and values of the first part."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Of all parts, by name."""
        ...
