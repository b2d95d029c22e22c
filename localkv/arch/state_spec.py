"""What a recurrent layer remembers of the tokens so far."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StateSpec:
    """The state of one layer and one sequence, in float32.

    Attributes:
        n_rows, n_channels: the last rows that a convolution read, one fewer than it sees.
        memory: heads, rows and columns of the matrix that each head keeps; empty where a layer has
            nothing but a convolution.
    """

    n_rows: int
    n_channels: int
    memory: tuple[int, int, int] | tuple[()] = ()

    @property
    def n_floats(self) -> tuple[int, int]:
        """Of the rows, and of the memory."""
        return self.n_rows * self.n_channels, math.prod(self.memory) if self.memory else 0


@dataclass(frozen=True)
class LayerState:
    """Which layer of a model has which state."""

    layer: int
    state: StateSpec
