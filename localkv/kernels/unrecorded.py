"""Decoding from fixed buffers where nothing is recorded and nothing is on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localkv.cache.arrays import Array, Step


class Unrecorded:
    """A `Recorder` whose steps run as they are."""

    def record(self, step: Step, state: Sequence[Array]) -> Step:
        return step


@dataclass(frozen=True)
class Arrived:
    """A `Readback` of a number that is on the host: an array of one item, the reader's own."""

    number: Array

    def value(self) -> int:
        return int(self.number[0])
