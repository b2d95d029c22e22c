"""The places of a model: a backend for each, and how arrays get from one to another.

No operation knows of other places. The model walks from one to the next (`model.py`), and takes
along hidden states and what a batch says of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from localkv.arch.placement import Placement
from localkv.cache.arrays import Array, Arrays, Batch
from localkv.kernels.backend import (
    Backend,
    drawn_by_host,
    nothing_ahead,
    run_no_guesses,
    run_nothing_next,
)
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.system.turns import Turns


@dataclass(frozen=True)
class Places:
    """A model's places.

    Attributes:
        backends: of `placement.devices`, each an instance of its own.
        placement: which part is where.
    """

    backends: tuple[Backend, ...]
    placement: Placement

    @classmethod
    def one(cls, backend: Backend, n_layers: int) -> Places:
        """A model in one place."""
        return cls((backend,), Placement.one(backend.name, n_layers))

    def first(self, n: int) -> Places:
        """The places of a model's first `n` layers."""
        return replace(self, placement=self.placement.first(n))

    @property
    def is_one(self) -> bool:
        """Whether all parts are in one place."""
        return self.placement.is_one

    @property
    def used(self) -> list[Backend]:
        """The backends that have a part."""
        return [self.backends[i] for i in self.placement.used]

    @property
    def embedding(self) -> Backend:
        """Where tokens become hidden states."""
        return self.backends[self.placement.embedding]

    @property
    def output(self) -> Backend:
        """Where hidden states become logits."""
        return self.backends[self.placement.output]

    def of_layer(self, i: int) -> Backend:
        """Where a layer is, without its feed-forward block."""
        return self.backends[self.placement.layers[i]]

    def of_block(self, i: int) -> Backend:
        """Where a layer's feed-forward block is."""
        return self.backends[self.placement.blocks[i]]

    @property
    def records(self) -> bool:
        """Whether a place has launches that can be recorded."""
        return any(backend.records for backend in self.used)

    @cached_property
    def batch_arrays(self) -> Arrays:
        """Where batches are made: with several places on the host."""
        return self.output.arrays if self.is_one else NumpyArrays()

    def layer_arrays(self) -> list[Arrays] | None:
        """Where the rows of each layer are; None if all are where batches are."""
        if self.is_one:
            return None
        return [self.of_layer(i).arrays for i in range(len(self.placement.layers))]

    @cached_property
    def whole(self) -> Backend:
        """What the engine sees: the backend that makes the logits, with one queue of turns.

        What needs a model in one place (recorded steps, chains that run again) it lacks.
        """
        if self.is_one:
            return self.used[0]
        used, hardware = self.used, dict.fromkeys(one.hardware for one in self.used)
        gpus = [one for one in used if one.memory is not None]

        def recover() -> None:
            for backend in used:
                backend.turns.recover()

        return replace(
            self.output,
            name="+".join(self.placement.devices[i] for i in self.placement.used),
            hardware=", ".join(filter(None, hardware)),
            memory=gpus[0].memory if gpus else None,
            run_next=run_nothing_next,
            run_guesses=run_no_guesses,
            late=None,
            compiles=any(one.compiles for one in used),
            compiling_ahead=nothing_ahead,
            compile_together=next((one.compile_together for one in gpus), None),
            records=False,
            draw=drawn_by_host,
            turns=Turns(recover),
        )


def moved(array: Array, source: Backend, target: Backend) -> Array:
    """An array of one place at another, in the type of activations there."""
    if source is target:
        return array
    return target.arrays.floating(target.arrays.arrived(array, source.arrays))


def batch_at(batch: Batch, arrays: Arrays) -> Batch:
    """A batch that was made on the host, where a backend's kernels read it."""
    if isinstance(arrays, NumpyArrays):
        return batch
    segments = tuple(_at(part, arrays) for part in batch.segments)
    found: Batch = replace(_at(batch, arrays), segments=segments)
    return found


def _at(part: Any, arrays: Arrays) -> Any:
    found = {
        name: arrays.from_numpy(value)
        for name, value in vars(part).items()
        if isinstance(value, np.ndarray)
    }
    return replace(part, **found)
