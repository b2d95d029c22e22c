"""States of recurrent layers: what they remember of a sequence, beside its pages.

A state has a constant size and takes in a token after the other; it can't be cut back. A sequence
that is to lose tokens goes on from a *checkpoint*, a copy of all its states at some earlier length,
in the host's memory, or from the start. `CheckpointConfig` limits how many a sequence has, and how
close they are. Where one has to go, it is one whose neighbours are near, given how old it is.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING
from weakref import WeakSet

from localkv.arch.spec import LayerState
from localkv.cache.arrays import Array, Arrays, StateRows
from localkv.cache.pages import NO_SLOT, Checkpoint, Sequence
from localkv.errors import LocalKVError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FLOAT = 4
"""Bytes of a float32."""
LINE_FLOATS = 16
"""Floats of a cache line, which no two layers share."""

NEAR_END = 8
"""Tokens before a prompt's end where there is a checkpoint: the same prompt is continued from
there, as are those that differ in the tokens that open the answer."""
LONG_PROMPT = 64
"""A prompt with at least this many tokens after its last checkpoint is cut for the one near its
end; a shorter one has a checkpoint at its end."""


@dataclass(frozen=True)
class CheckpointConfig:
    """How many checkpoints a sequence has at most, and the least tokens between two of them."""

    most: int = 8
    step: int = 1024


def _padded(n: int) -> int:
    return -(-n // LINE_FLOATS) * LINE_FLOATS


def floats_of(layers: Seq[LayerState]) -> int:
    """Floats of the states of one sequence."""
    return sum(_padded(n) for layer in layers for n in layer.state.n_floats)


def state_bytes(layers: Seq[LayerState], *, n_sequences: int = 1, n_between: int = 0) -> int:
    """Bytes that `RecurrentStates` allocates."""
    return FLOAT * floats_of(layers) * n_sequences * (1 + n_between)


@dataclass(frozen=True)
class _Part:
    """The states of layers of one place, one after the other.

    Attributes:
        data: float32 [places, n].
        first: where they begin among all layers'.
    """

    arrays: Arrays
    data: Array
    first: int

    def rows_of(self, item: LayerState, at: int, n_slots: int) -> StateRows:
        """A layer's, which begin at `at` in `data`."""
        spec, (n_rows, n_memory) = item.state, item.state.n_floats
        memory_at = at + _padded(n_rows)
        rows = self._view(at, n_rows, (spec.n_rows, spec.n_channels))
        memory = self._view(memory_at, n_memory, spec.memory) if n_memory else None
        return StateRows(rows, memory, self.data, at, memory_at, n_slots, self.first)

    def _view(self, at: int, n: int, shape: tuple[int, ...]) -> Array:
        return self.data[:, at : at + n].reshape((len(self.data), *shape))


class RecurrentStates:
    """The states of all recurrent layers and sequences.

    Args:
        layers: the layers of the model that have states.
        arrays: where they live, of each of these layers.
        n_sequences: how many are held at the same time.
        n_between: generated tokens of a batch, but its last, after which states are kept until the
            sequence's next batch. So guesses that turn out wrong are taken back at no cost: the
            states after the last right one become the sequence's.
        make_room: called when there are as many checkpoints as all of these have at most; whether
            a sequence that was only kept to be forked has given some back.
    """

    def __init__(
        self,
        layers: Seq[LayerState],
        *,
        arrays: Callable[[int], Arrays],
        n_sequences: int,
        config: CheckpointConfig,
        n_between: int = 0,
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self._make_room = make_room
        self._checkpoints = WeakSet[Checkpoint]()
        self.specs = tuple(layers)
        self.config = config
        self.n_slots = n_sequences
        self.n_between = n_between
        self.layers = dict[int, StateRows]()
        self.n_floats = floats_of(layers)
        n_places = n_sequences * (1 + n_between)
        self._places = [
            [slot, *range(n_sequences + slot * n_between, n_sequences + (slot + 1) * n_between)]
            for slot in range(n_sequences)
        ]
        self.parts = list[_Part]()
        at = 0
        for own, run in groupby(layers, key=lambda item: arrays(item.layer)):
            group = list(run)
            part = _Part(own, own.zeros(n_places, floats_of(group)), at)
            self.parts.append(part)
            for item in group:
                self.layers[item.layer] = part.rows_of(item, at - part.first, n_sequences)
                at += floats_of([item])

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def n_bytes(self) -> int:
        return sum(int(part.data.nbytes) for part in self.parts)

    @property
    def n_checkpoints(self) -> int:
        """Checkpoints of all sequences; one that several of them share counts once."""
        return len(self._checkpoints)

    def free_slot(self, taken: Seq[Sequence]) -> int:
        """A place for a sequence.

        Raises:
            LocalKVError: there is none.
        """
        if not self.parts:
            return 0
        used = {sequence.slot for sequence in taken}
        for slot in range(self.n_slots):
            if slot not in used:
                return slot
        raise LocalKVError(f"the cache holds {self.n_slots} sequences, and all are in use")

    def has_place(self, sequence: Sequence) -> bool:
        """Whether a sequence has states, not only checkpoints."""
        return bool(self.parts) and sequence.slot != NO_SLOT

    def copy(self, sequence: Sequence, other: Sequence) -> None:
        """Give another sequence the states of one, and its checkpoints."""
        other.n_stepped, other.between = sequence.n_stepped, -1
        if self.has_place(sequence):
            for part in self.parts:
                part.data[self.place(other)] = part.data[self.place(sequence)]

    def place(self, sequence: Sequence) -> int:
        """Where the states of a sequence are, of all places."""
        return self._places[sequence.slot][0] if self.layers else sequence.slot

    def places(self, sequence: Sequence) -> list[int]:
        """Where the states of a sequence are, and then those after its guesses, in order."""
        return self._places[sequence.slot] if self.layers else [sequence.slot]

    def give_back(self, sequence: Sequence) -> None:
        """Leave a sequence its checkpoints alone."""
        if self.parts:
            sequence.slot, sequence.n_stepped, sequence.between = NO_SLOT, -1, -1

    def after(self, sequence: Sequence, n_tokens: int, *, generated: bool) -> list[int]:
        """The places of the states after each of a sequence's next tokens."""
        if not self._keeps_between(n_tokens, generated=generated):
            return [self.place(sequence)] * n_tokens
        last, *between = self._places[sequence.slot]
        return [*between[: n_tokens - 1], last]

    def _keeps_between(self, n_tokens: int, *, generated: bool) -> bool:
        return generated and 1 < n_tokens <= self.n_between + 1

    def step(
        self, sequence: Sequence, position: int, length: int, *, generated: bool = True
    ) -> None:
        """The tokens from `position` to `length` are about to be evaluated: the states are those
        before them now, and count as those after them.

        Raises:
            LocalKVError: the states are not those before them.
        """
        if not self.parts:
            return
        keeps = self._keeps_between(length - position, generated=generated)
        sequence.between = position if keeps else -1
        if position == 0:
            for part in self.parts:
                part.data[self.place(sequence)] = 0.0
        elif sequence.n_stepped != position:
            raise LocalKVError(
                f"states after {sequence.n_stepped} tokens can't go on after {position}"
            )
        sequence.n_stepped = length

    def copied(self, sequence: Sequence) -> NDArray[np.float32]:
        """A copy of all states of a sequence, on the host: float32 [n_floats]."""
        import numpy as np

        place = self.place(sequence)
        return np.concatenate([part.arrays.to_numpy(part.data[place]) for part in self.parts])

    def boundary(self, sequence: Sequence, end: int, n_prompt: int) -> int:
        """Where the next batch of a prompt should end to leave a checkpoint, at most at `end`."""
        if not self.parts or not self.config.most:
            return end
        at, stops = sequence.length, [self._last(sequence) + self.config.step]
        if n_prompt - self._last(sequence) >= LONG_PROMPT:
            stops.append(n_prompt - NEAR_END)
        return min([stop for stop in stops if at < stop < end], default=end)

    def is_due(self, sequence: Sequence) -> bool:
        """Whether its last checkpoint is that long ago."""
        if not self.parts:
            return False
        return sequence.length >= self._last(sequence) + self.config.step

    def is_near(self, sequence: Sequence) -> bool:
        """Whether its last checkpoint is as good as one where it is now."""
        last = self._last(sequence)
        return last > 0 and sequence.length - last <= NEAR_END

    def _last(self, sequence: Sequence) -> int:
        return max((item.length for item in sequence.kept if not item.is_mark), default=0)

    def keep(self, sequence: Sequence) -> None:
        """Make a checkpoint of the states as they are."""
        if not self.parts or not self.config.most or sequence.n_stepped != sequence.length:
            return
        kept = sequence.kept
        if kept and kept[-1].length == sequence.length:
            return
        if len(kept) >= self.config.most:
            del kept[_dispensable([item.length for item in kept], sequence.length)]
        while self.n_checkpoints >= self.config.most * self.n_slots and self._make_room():
            pass
        data = self.copied(sequence)
        kept.append(Checkpoint(sequence.length, data))
        self._checkpoints.add(kept[-1])

    def mark(self, sequence: Sequence, n_tokens: int) -> None:
        """Make a checkpoint that counts for nothing else, until `unmark`, unless the states after
        each of the next generated tokens are kept."""
        if not self.parts:
            return
        self.unmark(sequence)
        if self._keeps_between(n_tokens, generated=True):
            return
        if not (sequence.kept and sequence.kept[-1].length == sequence.length):
            data = self.copied(sequence)
            sequence.kept.append(Checkpoint(sequence.length, data, is_mark=True))

    def unmark(self, sequence: Sequence) -> None:
        """Forget that checkpoint."""
        sequence.kept = [item for item in sequence.kept if not item.is_mark]

    def reachable(self, sequence: Sequence, length: int) -> int:
        """The largest length up to `length` whose states are known."""
        if not self.parts or sequence.n_stepped == length:
            return length
        if 0 <= sequence.between < length < sequence.n_stepped:
            return length
        return max((item.length for item in sequence.kept if item.length <= length), default=0)

    def cut(self, sequence: Sequence, length: int) -> None:
        """Go back to a length that is `reachable`."""
        if not self.parts:
            return
        while sequence.kept and sequence.kept[-1].length > length:
            sequence.kept.pop()
        if sequence.n_stepped != length and length:
            if 0 <= sequence.between < length < sequence.n_stepped:
                places, right = self._places[sequence.slot], length - sequence.between
                places[0], places[right] = places[right], places[0]
            else:
                found = sequence.kept[-1]
                assert found.length == length
                for part in self.parts:
                    own = found.data[part.first : part.first + part.data.shape[1]]
                    part.data[self.place(sequence)] = part.arrays.from_numpy(own)
            sequence.between = -1
        sequence.n_stepped = length


def _dispensable(lengths: Seq[int], end: int) -> int:
    """The checkpoint that leaves the smallest gap, measured by how long ago it is."""
    after = [*lengths[1:], end]
    before = [0, *lengths[:-1]]
    gaps = [
        (later - earlier) / (end - at + 1)
        for earlier, at, later in zip(before, lengths, after, strict=True)
    ]
    return gaps.index(min(gaps))
