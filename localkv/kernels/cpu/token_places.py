"""Where the layers of a few generated tokens work: chains, and memory that stays between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import LayerCache
from localkv.kernels.backend import MovedBatch, TokenBatch, TokenInputs
from localkv.kernels.bounds import BoundsError, check_slots
from localkv.kernels.cpu.addresses import Floats, address
from localkv.kernels.cpu.runtime.chain import Chain, Scratch, Where
from localkv.kernels.cpu.store.group_store import check_groups

Call = Callable[[TokenBatch], None]
"""What is done between chains, in these places."""
Int64s = NDArray[np.int64]


class TokenPlaces:
    """The places of a program.

    Args:
        scratch: of chains.
        given: the tokens'; of its inputs only sizes matter.

    Attributes:
        n_tokens, n_sequences: of the batch.
        stages: chains, and what is called between them, in order.
        rows: three of [n_tokens, n_embd], of which one has a layer's input, one its output.
        entries: [1, n_embd] of each token, where the first layer's input is.
        embedded: as `TokenBatch` has it.
        states: of recurrent layers, float32 [slots, n].
    """

    def __init__(self, scratch: Scratch, given: TokenBatch, n_embd: int) -> None:
        self.scratch, self.given = scratch, given
        self.n_tokens, self.n_sequences = given.batch.starts[-1], len(given.batch.generated)
        self.stages = list[Chain | Call]()
        self.chain: Chain | None = None
        self.rows = [np.zeros((self.n_tokens, n_embd), np.float32) for _ in range(3)]
        self.embedded = None if given.embedded is None else np.empty_like(given.embedded)
        self.start_table = np.array(given.batch.starts, np.int32)
        self.slots, self.no_rows = np.zeros(self.n_sequences, np.int64), np.zeros(1, np.int64)
        self.states: NDArray[np.float32] | None = None
        self._buffers = dict[tuple[str, tuple[int, ...]], Floats]()
        self._pools = dict[int, tuple[Int64s, Int64s, int]]()
        self._groups = dict[int, tuple[Int64s, tuple[int, int]]]()
        self._inputs = [_copied(one) for one in given.inputs]
        self.entries = [self.rows[0][i : i + 1] for i in range(self.n_tokens)]
        self._rotation_places = [
            [(one["cos"][i].data, one["sin"][i].data) for i in range(self.n_tokens)]
            if "cos" in one
            else []
            for one in self._inputs
        ]

    def steps(self) -> Chain:
        """The chain to which steps are added."""
        if self.chain is None:
            self.chain = Chain(self.scratch)
            self.stages.append(self.chain)
        return self.chain

    def call(self, work: Call) -> None:
        """Do this behind the steps that were added, and before those that follow."""
        self.chain = None
        self.stages.append(work)

    def buffer(self, name: str, *shape: int) -> Floats:
        """Memory for what layers need one after the other."""
        if (name, shape) not in self._buffers:
            self._buffers[name, shape] = np.zeros(shape, np.float32)
        return self._buffers[name, shape]

    def free_row(self, *taken: Floats) -> Floats:
        """One of the rows that is none of these."""
        return next(row for row in self.rows if all(row is not x for x in taken))

    def inputs(self, positions: int) -> dict[str, Where]:
        """Places of what a kind of layers is given of a token, by the names of chains."""
        return dict(self._inputs[positions])

    def stored(self, cache: LayerCache) -> dict[str, int | Where]:
        """Where the tokens' rows go in the segments that they are stored in, by the names of
        chains."""
        found = dict[str, int | Where]()
        for i, rows in enumerate(cache.rows_of(self.given.batch)):
            part, n_rows = cache.part + i, len(rows.slots)
            if rows.groups is not None:
                if part not in self._groups:
                    pages = len(cache.segments[i].k[0]), len(cache.segments[-1].k[0])
                    self._groups[part] = np.full((self.n_tokens, 2), -1, np.int64), pages
                found |= {f"n_groups{i}": self.n_tokens, f"groups{i}": self._groups[part][0]}
                continue
            if n_rows and part not in self._pools:
                tokens, slots = np.zeros((2, n_rows), np.int64)
                self._pools[part] = tokens, slots, len(cache.segments[i].k[0])
            tokens, slots, _ = self._pools[part] if n_rows else (self.no_rows, self.no_rows, 0)
            found |= {f"rows{i}": n_rows, f"tokens{i}": tokens, f"slots{i}": slots}
        return found

    def fill_next(self, moved: MovedBatch, more: Sequence[int]) -> None:
        """As `fill`, but for x.

        Views of memory, and items one by one: to copy arrays NumPy reads more of its own code and
        data, none of which is in a cache here.

        Args:
            more: how far each token is behind the one before.
        """
        for places, rotations in zip(self._rotation_places, moved.rotations, strict=True):
            if rotations is not None:
                for position, place in zip(moved.positions, places, strict=True):
                    rotations.put(position, *place)
        for pool, (tokens, slots, _) in self._pools.items():
            before = moved.before.segments[pool].slots
            for i in range(len(slots)):
                slots[i] = int(before[i]) + more[tokens[i]]

    def fill(self, x: Floats, given: TokenBatch) -> None:
        """Write what differs from batch to batch.

        Raises:
            BoundsError: the tokens are not of the caches that this was made for.
        """
        batch = given.batch
        for places, one in zip(self._inputs, given.inputs, strict=True):
            for name, values in _arrays(one).items():
                places[name][:] = values
        for pool, (tokens, slots, n_pages) in self._pools.items():
            rows = batch.segments[pool]
            check_slots(rows, self.n_tokens, n_pages)
            tokens[:], slots[:] = rows.tokens, rows.slots
        for part, (group, n_pages_of) in self._groups.items():
            groups = batch.segments[part].groups
            assert groups is not None
            check_groups(groups, *n_pages_of)
            group.fill(-1)
            group[: len(groups)] = groups
        if self.states is not None:
            self.slots[:] = batch.slots
            if not 0 <= int(self.slots.min()) <= int(self.slots.max()) < len(self.states):
                raise BoundsError(f"{len(self.states)} states of sequences, and slots {self.slots}")
        if given.embedded is not None:
            self.fill_embedded(given.embedded)
        self.rows[0][:] = x

    def growing(self) -> list[int]:
        """Addresses of the items that are one more for a token behind this one, in the page."""
        return [address(slots) for _, slots, _ in self._pools.values()]

    def turns(self, moved: MovedBatch, n: int) -> list[tuple[int, int, int]] | None:
        """Of each table of the rotations of one token: where it is, where there are the same
        values and those of the `n` - 1 tokens behind, and how many floats a token has. None if
        tokens differ in other places, too."""
        if self._groups or self.states is not None or self.embedded is not None:
            return None
        found = list[tuple[int, int, int]]()
        for one, rotations in zip(self._inputs, moved.rotations, strict=True):
            if rotations is not None:
                table = rotations.following(moved.positions[0], n)
                for name, rows in (("cos", table.cos), ("sin", table.sin)):
                    found.append((address(one[name]), address(rows), rows.shape[1]))
        return found

    def fill_embedded(self, embedded: Floats) -> None:
        """Write what layers read of each token."""
        assert self.embedded is not None
        self.embedded[:] = embedded


def _arrays(inputs: TokenInputs) -> dict[str, Floats]:
    """Those of tokens, by the names of chains."""
    found = dict[str, Floats]()
    if inputs.rope is not None:
        found |= {"cos": inputs.rope.cos, "sin": inputs.rope.sin}
    if inputs.q_scale is not None:
        found["q_scale"] = inputs.q_scale
    return found


def _copied(inputs: TokenInputs) -> dict[str, Floats]:
    return {name: np.array(x, np.float32) for name, x in _arrays(inputs).items()}
