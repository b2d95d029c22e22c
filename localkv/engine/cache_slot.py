"""One sequence of the cache, which several texts may use in turn.

A caller that continues a text passes it (`Text`). If the slot has served another text since, it
goes on with the rows that are kept of this one, or of any that began like it (`PrefixCache`). The
missing ones are evaluated again, each in its own kind: as a prompt's token, or as a generated one,
for which a backend may have other kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from threading import Event
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import Array, Batch, Wanted
from localkv.cache.kv_cache import KVCache
from localkv.engine.prefix import SALTED, PrefixCache, Saw, Text, marked, unmarked
from localkv.engine.recorded import DecodeLoop, NextTokens
from localkv.errors import ModelClosedError
from localkv.kernels.backend import Guessed, Guessing
from localkv.kernels.device_memory import Room, naming_what_fails
from localkv.model import Transformer
from localkv.system.threads import chosen_threads
from localkv.system.turns import Turns

if TYPE_CHECKING:
    from localkv.engine.disk_cache import DiskCache

T = TypeVar("T")

MOST_KEPT = 256
"""Texts that are kept at most, if they leave each other room."""
MOST_RECURRENT = 4
"""Texts that are kept at most where the layers' states are copied to the host's memory."""

CLOSE_SECONDS = 30.0
"""Seconds that writing to the disk may take at most where the model is closed."""


class Reuse(NamedTuple):
    """What a text found in the slot.

    Attributes:
        n_reused: leading tokens whose rows it goes on with.
        n_lost: further ones that were the same, but whose rows layers with a window, or a tail, had
            given back, or after which no state of recurrent layers was kept.
    """

    n_reused: int
    n_lost: int


class CacheSlot:
    """A sequence, and the tokens of its rows.

    Everything but `turn` is to be called in a turn.

    Args:
        model: weights on a backend, whose `turns` are ours.
        cache: has room for the sequence.
        n_batch: most prompt tokens evaluated at a time.
        exact: reuse rows only for tokens of the same kind: rows of a prompt for a prompt, and rows
            of generated tokens for generated ones.
        check_source: called before a batch is evaluated; raises if the weights are no longer those
            that were loaded.

    Attributes:
        ids: the tokens whose rows the cache holds.
        generated: whether each was evaluated as a generated one.
        threads: for one token and for several.
        loop: decodes from fixed buffers, where the backend records.
        prefixes: texts that the slot has served before.
        disk: keeps texts that leave the cache, if there is a folder for them.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        n_batch: int,
        *,
        exact: bool,
        check_source: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.exact = exact
        self.check_source = check_source
        self.cache = cache
        self.n_batch = n_batch
        self.loop = DecodeLoop(model, cache) if model.backend.records else None
        self.sequence = cache.new_sequence()
        self.prefixes = PrefixCache(cache, exact, MOST_RECURRENT if cache.states else MOST_KEPT)
        self.disk: DiskCache | None = None
        self.ids: list[int] = []
        self.generated: list[bool] = []
        self._salt = 0
        self._text: Text | None = None
        self._next = NextTokens(model, cache)
        self._unfinished = False
        self.threads = chosen_threads()
        self._turns: Turns | None = model.backend.turns  # None once it is closed

    @property
    def is_busy(self) -> bool:
        """Whether a thread has its turn, or waits for one."""
        return self._turns is not None and self._turns.are_taken

    @property
    def is_wanted(self) -> bool:
        """Whether other threads wait for the one whose turn it is."""
        return self._turns is not None and self._turns.are_wanted

    def turn(self, work: Callable[[], T], cancel: Event | None = None) -> T:
        """Do `work` when no other thread runs the model; see `Turns.run`.

        Raises:
            LocalKVError: it was closed.
        """
        turns = self._turns
        if turns is None:
            raise ModelClosedError
        return turns.run(work, cancel, self)

    def close(self) -> None:
        """Let go of the model and the cache, once the turns of other threads have ended."""

        def let_go() -> None:
            self._turns = None
            if self.disk is not None:
                self.leave()
                self.disk.save_all(self.prefixes.texts, CLOSE_SECONDS)
                self.disk.close(CLOSE_SECONDS)
            del (
                self.disk,
                self.model,
                self.cache,
                self.loop,
                self.prefixes,
                self.check_source,
                self._next,
            )

        self.turn(let_go)

    def keep_on_disk(self, disk: DiskCache) -> None:
        """Write texts that leave the cache to a disk, and go on with what is found there."""
        self.disk, self.prefixes.leaving = disk, disk.leave

    def save_some(self) -> bool:
        """Have a text written that is kept, and not on the disk yet; whether there may be others.
        They come in the order in which they would leave the cache."""
        if self.disk is None:
            return False
        return self.disk.save_some(self.prefixes.texts)

    def begin_turn(self) -> None:
        """Start over if the work of a turn before broke off."""
        if self._turns is None:
            raise ModelClosedError
        self.use_threads(1)
        if self._unfinished:
            self._start_over()
        self._unfinished = True

    def end_turn(self) -> None:
        """Note that the work of a turn was done to its end."""
        self._unfinished = False

    def use_threads(self, n_tokens: int) -> None:
        """Let operations run on as many threads as are chosen for this number of tokens."""
        self.model.backend.arrays.use_threads(self.threads.of(n_tokens))

    def _start_over(self) -> None:
        """Forget all rows, also of requests: work that broke off may have left anything."""
        self._hold_none()
        self.prefixes.forget()
        self.cache.start_over([self.sequence])

    def forget(self) -> None:
        """Forget all tokens, and all texts that are kept."""
        self.truncate(0)
        self.prefixes.clear()

    def truncate(self, length: int) -> int:
        """Forget the tokens from position `length` on, and as many before it as the cache must;
        returns how many are left."""
        self._text = None
        if length >= self.sequence.length and self._next.hold(self.sequence):
            return self.sequence.length
        length = self.cache.cut_back(self.sequence, length, exactly=self.exact)
        del self.ids[length:], self.generated[length:]
        if not length:  # what others evaluate now is not the former text's
            self._salt, self.sequence.scales = 0, self.cache.scales
        return length

    def checkpoint(self) -> None:
        """Expect `truncate` to come back to where the tokens end now."""
        self.cache.checkpoint(self.sequence)

    def evaluate(
        self,
        ids: Sequence[int],
        logits: Wanted = "last",
        *,
        generated: bool = False,
        saw: Saw | None = None,
    ) -> Array:
        """Run `ids`, in one batch, after those that are held: float32 [rows, n_vocab], as wanted.

        Args:
            saw: as `Text` has it; where no step is recorded.

        Raises:
            LocalKVError: they do not fit the context.
        """
        if len(ids) > 1:
            self.check_source()
        out = None
        if self.loop is not None and len(ids) == 1:
            with self.scratch_of(1):
                out = self.loop.logits([self.sequence], ids)
        elif generated and (logits == "all" or len(ids) == 1):
            self.use_threads(len(ids))
            out = self._next.logits([(self.sequence, ids)])
            if out is not None and saw is not None:
                saw(self.sequence.length, self.model.last_hidden())
        if out is None:
            out = self.forward(self.model, ids, logits, generated=generated, saw=saw)
        self._hold(ids, generated=generated)
        return out

    def guess(self, ids: Sequence[int], guessing: Guessing) -> Guessed | None:
        """Evaluate generated tokens and the most probable ones after them, at once.

        Returns:
            what was guessed; None, with nothing evaluated, where they have to be run one by one.
        """
        self.use_threads(1)
        found = self._next.guesses(self.sequence, ids, guessing)
        if found is not None:
            self._hold([*ids, *found.tokens][: found.n_evaluated], generated=True)
        return found

    @property
    def mixes_kinds(self) -> bool:
        """Whether a batch may have tokens of a prompt and generated ones of the same text: where
        layers see others through their rows only, and no step is recorded."""
        return self.loop is None and not self.cache.states and self.cache.ladder is None

    def read_logits(
        self, ids: Sequence[int], read: Callable[[Array], T], n_rows: int, *, n_prompt: int
    ) -> list[T]:
        """Evaluate `ids`: what `read` makes of the logits, of at most `n_rows` tokens at a time.

        Args:
            n_prompt: leading tokens that are a prompt's. If others follow (`mixes_kinds`), these
                tokens have the logits of their last one only.
        """
        generated, is_mixed = n_prompt == 0, 0 < n_prompt < len(ids)
        if len(ids) <= n_rows and not is_mixed:
            return [read(self.evaluate(ids, "all", generated=generated))]
        self.check_source()
        self.use_threads(len(ids))
        if is_mixed:
            batch = self._mixed_batch(ids, n_prompt)
        else:
            batch = self.cache.batch([(self.sequence, ids)], logits="all", generated=generated)
        with self.scratch_of(len(ids)), self.model.backend.arrays.inference():
            found = [read(part) for part in self.model.logit_blocks(batch, self.cache, n_rows)]
        self._hold(ids[:n_prompt], generated=False)
        self._hold(ids[n_prompt:], generated=True)
        return found

    def _mixed_batch(self, ids: Sequence[int], n_prompt: int) -> Batch:
        """Tokens of a prompt, and generated ones after them, with the logits of these and of the
        prompt's last."""
        self.cache.reserve(self.sequence, self.sequence.length + len(ids))
        parts = (self.sequence, ids[:n_prompt]), (self.sequence.ahead(n_prompt), ids[n_prompt:])
        return self.cache.batch(parts, logits=("last", "all"), generated=(False, True))

    def hidden(self, ids: Sequence[int], rows: Literal["last", "all"]) -> Array:
        """Run a prompt's `ids`, in one batch, after those that are held.

        Returns:
            [1 or len(ids), n_embd], normed hidden states.

        Raises:
            LocalKVError: they do not fit the context.
        """
        self.check_source()
        self.use_threads(len(ids))
        batch = self.cache.batch([(self.sequence, ids)], logits=rows)
        with self.scratch_of(len(ids)), self.model.backend.arrays.inference():
            out = self.model.hidden(batch, self.cache)
        self._hold(ids, generated=False)
        return out

    def encode(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Run whole texts through an encoder, in one batch; the cache has no part in it.

        Returns:
            [tokens of all texts, n_embd], normed hidden states.
        """
        self.check_source()
        n_tokens = sum(map(len, texts))
        self.use_threads(n_tokens)
        with self.scratch_of(n_tokens), self.model.backend.arrays.inference():
            states = self.model.backend.arrays.to_numpy(self.model.encode(texts))
        return states.astype(np.float32, copy=False)

    def _hold(self, ids: Sequence[int], *, generated: bool) -> None:
        """Count tokens whose rows are in the cache now."""
        self.sequence.length += len(ids)
        self.ids.extend(ids)
        self.generated.extend([generated] * len(ids))
        if self.cache.states.is_due(self.sequence):
            self.cache.states.keep(self.sequence)

    def forward(
        self,
        model: Transformer,
        ids: Sequence[int],
        logits: Wanted,
        *,
        generated: bool,
        saw: Saw | None = None,
    ) -> Array:
        """Run `model` on `ids` after the tokens that are held; these do not include them yet."""
        self.use_threads(len(ids))
        batch = self.cache.batch([(self.sequence, ids)], logits=logits, generated=generated)
        with self.scratch_of(len(ids)), model.backend.arrays.inference():
            if saw is None:
                out = model.forward(batch, self.cache)
            else:
                out, hidden = model.forward_with_hidden(batch, self.cache)
                saw(self.sequence.length, hidden)
        if generated and len(batch.logit_rows) == len(ids):
            self._next.note([self.sequence], batch)
        return out

    def leave(self) -> None:
        """Keep the tokens that are held as a text, and hold none."""
        if self.ids or self.cache.states.has_place(self.sequence):
            self._put_away()
            self.sequence = self.cache.new_sequence(stepped=False)
            self._hold_none()

    def _hold_none(self) -> None:
        self.ids, self.generated, self._salt, self._text = [], [], 0, None

    def _put_away(self) -> None:
        self.cache.states.keep(self.sequence)
        self.prefixes.keep(self.sequence, self._marked())

    def _marked(self) -> NDArray[np.int64]:
        return marked(self.ids, self.generated) + self._salt * SALTED

    def take(self, text: Text, *, reuses: bool = True) -> Reuse:
        """Make the slot a text's, with its tokens that are held, fewer than all.

        Args:
            reuses: tokens that are held are taken; else none.
        """
        n_lost = 0
        if self._text is not text:
            if reuses:
                n_lost = self._find(text) - self.sequence.length
            else:
                self._put_away()
                self.sequence = self.cache.new_sequence()
                self._hold_none()
            self._salt, self._text = text.salt, text
            self.sequence.scales = self.cache.scales if text.scales is None else text.scales
        return Reuse(self.sequence.length, n_lost)

    def _find(self, text: Text) -> int:
        """Go on with the rows that the cache has of a text's beginning.

        The row of the text's last token is not reused: the token has to be evaluated.

        Returns:
            how many leading tokens were the same, whether or not their rows are still there.
        """
        cache, exact = self.cache, self.exact
        theirs = text.marked(len(text.ids) - 1)
        if self.disk is not None:
            self._read_back(self.disk, text, theirs)
        ours = self._marked()
        n_same = self.prefixes.n_common(ours, theirs)
        n_ours = cache.reachable(self.sequence, n_same, exactly=exact)
        kept, n_kept = self.prefixes.find(theirs)
        source, found, length = self.sequence, ours, n_ours
        if kept is not None and n_kept > n_ours:
            self.prefixes.use(kept)
            source, found, length = kept.sequence, kept.ids, n_kept
        if source is not self.sequence or length < len(ours):
            self._put_away()
            self.sequence = cache.fork(source, length, exactly=exact)
            self.ids, self.generated = unmarked(found[:length])
        return max(n_same, length)

    def _read_back(self, disk: DiskCache, text: Text, theirs: NDArray[np.int64]) -> None:
        """Keep a text of the disk that begins more like this one than what is in the cache."""
        disk.know(text.salt, text.origin)
        n_same = self.prefixes.n_common(self._marked(), theirs)
        n_ours = self.cache.reachable(self.sequence, n_same, exactly=self.exact)
        found = disk.find(theirs, max(n_ours, self.prefixes.find(theirs)[1]))
        if found is not None:
            self.leave()  # the text may need all pages
            disk.reading(self.prefixes, theirs, found).go_on(math.inf)

    def is_taken_by(self, text: Text) -> bool:
        """Whether nothing has been evaluated for others since `take`."""
        return self._text is text

    def logits(self, text: Text) -> Array | None:
        """Evaluate the missing tokens of the text that took the slot: the last token's logits.

        Returns:
            float32 [1, n_vocab], valid until the next call; None if no token is missing.
        """
        out = None
        while self.sequence.length < len(text.ids):
            out = self.advance(text, self.piece(text, self.n_batch))
        return out

    def piece(self, text: Text, n_tokens: int) -> int:
        """How many of the next `n_tokens` missing tokens of a text are evaluated together.

        They are all of one kind: a prompt's or generated ones. A piece of a prompt may end early,
        where recurrent layers leave a checkpoint. A decode loop takes generated tokens one by one.
        """
        at = self.sequence.length
        if at >= text.n_prompt:
            return min(n_tokens if self.loop is None else 1, len(text.ids) - at)
        end = min(at + n_tokens, text.n_prompt)
        return self.cache.states.boundary(self.sequence, end, text.n_prompt) - at

    def advance(self, text: Text, n_tokens: int, drafts: Sequence[int] = ()) -> Array:
        """Evaluate the next missing tokens of the text that took the slot, a `piece` of it.

        Args:
            drafts: tokens that may follow the last one; `retract` takes back those that don't.

        Returns:
            float32 [1, n_vocab], the logits of the text's last token, if the piece reaches it. With
            drafts [1 + len(drafts), n_vocab]: the drafts' logits follow. Valid until the next call.
        """
        ids, n_prompt, states, saw = text.ids, text.n_prompt, self.cache.states, text.saw
        at = self.sequence.length
        end = at + n_tokens
        if drafts:
            states.mark(self.sequence, n_tokens + len(drafts))
            every = [*ids[at:], *drafts]
            return self.evaluate(every, "all", generated=True, saw=saw)[n_tokens - 1 :]
        wanted: Wanted = "last" if end == len(ids) else "none"
        if at >= n_prompt:
            return self.evaluate(ids[at:end], wanted, generated=True, saw=saw)
        out = self.evaluate(ids[at:end], wanted, saw=saw)
        if end == n_prompt:
            self.cache.checkpoint(self.sequence, exactly=False)
        elif end < min(at + self.n_batch, n_prompt):
            states.keep(self.sequence)
        return out

    def retract(self, text: Text, length: int) -> None:
        """Take back the drafts of a text from position `length` on.

        What can't be cut there is cut further back, and missing when the text goes on.
        """
        if self._text is not text:
            return  # they are not in the way: they are compared with the text when it comes back
        if length < self.sequence.length:
            length = self.cache.cut_back(self.sequence, length, exactly=True)
            del self.ids[length:], self.generated[length:]
        self.cache.states.unmark(self.sequence)

    def following(self, text: Text, tokens: Iterator[int]) -> int:
        """The next token of the loop's `tokens`, which stores the row of the text's last."""
        with self.scratch_of(1):
            token = next(tokens)
        self._hold(text.ids[-1:], generated=True)
        return token

    def scratch_of(self, n_tokens: int) -> AbstractContextManager[None]:
        """Name the allocation that fails if the GPU has no room to run these tokens."""

        def hint(room: Room) -> str:
            if n_tokens == 1:
                return "use a smaller context (-c), or smaller types of K and V (-ctk, -ctv)"
            return "use a smaller batch (-b) or a smaller context (-c)"

        what = (
            f"the scratch of a batch of {n_tokens} tokens" if n_tokens > 1 else "a step's scratch"
        )
        return naming_what_fails(what, self.model.backend.memory, hint)
