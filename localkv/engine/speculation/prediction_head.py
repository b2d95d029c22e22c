"""`PredictionHead`: a block of the model's own file guesses, from the model's hidden states.

Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2). The block reads the hidden
state of a token and the embedding of the token after it, and predicts the one that follows. Its
output has the hidden state's place for the guess after that. So rows of its cache are of tokens
whose hidden states came from the model, until a draft adds the rows of its guesses, which go before
the next draft.

The head is told of hidden states as the model evaluates a text (`HeadText.saw`). Where it does
without drafts for a while it keeps them, and reads them together when it drafts again.

It guesses together for texts that share the model's steps: the first guess of each is in one batch,
then the second of all that go on. So its weights are read once for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import Array
from localkv.cache.kv_cache import KVCache
from localkv.cache.pages import NoPageError, Sequence
from localkv.engine.prefix import SALTED, PrefixCache, Text, marked
from localkv.engine.speculation.config import Speculation
from localkv.engine.speculation.draft_model import (
    FEW_MISSING,
    DraftPace,
    Guess,
    GuessTimes,
    ModelSpeculator,
    confidence_of,
    most_probable,
)
from localkv.engine.speculation.speculator import Prices, Speculator
from localkv.kernels.backend import Guessing
from localkv.kernels.namespace import namespace
from localkv.model import Transformer

MOST_KEPT = 16
"""Texts whose rows are kept for texts that begin like them, at most."""
_WARM_UP_TOKENS = 24
_TIMES = 4
"""Drafts that are timed before a user waits for one."""


class PredictionHead:
    """The block of a model that predicts a further token, with the rows of several texts.

    Args:
        model: which has the block among its weights.
        block: the block, as a model of one layer.
        cache: of the block's rows.
        n_batch: most tokens evaluated at a time.
        prices: of the model's batches.

    Attributes:
        pace: what was measured, in all texts.
        texts: that have rows, those that began last at the end.
    """

    drafts_together = True

    def __init__(
        self, model: Transformer, block: Transformer, cache: KVCache, n_batch: int, prices: Prices
    ) -> None:
        self.model, self.block, self.cache, self.n_batch = model, block, cache, n_batch
        self.pace = DraftPace(prices)
        self._times = dict[int, GuessTimes]()
        self.prefixes = PrefixCache(cache, exact=False, most=MOST_KEPT)
        self.texts = list[HeadText]()
        self._unfinished = False

    @property
    def n_vocab(self) -> int:
        """Tokens that it guesses."""
        return self.model.config.n_vocab

    def times(self, n_texts: int = 1) -> GuessTimes:
        """What guesses for `n_texts` texts together take, one for each."""
        return self._times.setdefault(n_texts, GuessTimes())

    def warm_up(self) -> None:
        """Guess in a turn of the model, and forget it, so that no text waits for what is made
        once."""
        n, config = min(_WARM_UP_TOKENS, self.cache.n_ctx - 8), self.model.config
        if n < 1:
            return
        text = HeadText(self, Text([0] * (n + 1), n + 1))
        zeros = self.model.backend.arrays.zeros(n, config.n_embd)
        text.saw(0, self.model.backend.arrays.floating(zeros))
        asked = [(text, Guessing(4, self.n_vocab, 0.0, (), (1.0,), (0.0,) * 4))]
        self.guesses(asked)
        timed, times = [], self.times()
        for _ in range(_TIMES):  # the first ones took long
            text.text.ids.append(0)
            text.saw(len(text.text.ids) - 2, zeros[:1])
            times.token, started = 0.0, time.perf_counter()
            (found,) = self.guesses(asked)
            seconds, token = time.perf_counter() - started, times.token
            timed.append((token, seconds - token * len(found)))
        times.token, times.overhead = (max(0.0, min(some)) for some in zip(*timed, strict=True))
        text.give_back()

    def close(self) -> None:
        """Let go of the model and the cache; texts may live on, which nobody evaluates."""
        self.texts.clear()
        del self.model, self.block, self.cache, self.prefixes

    def forget(self) -> None:
        """Have no rows of any text."""
        for text in self.texts:
            text.lose()
        self.texts.clear()
        self.prefixes.clear()

    def begin(self, text: HeadText, n_known: int) -> tuple[Sequence, list[int]]:
        """The rows to go on with for a text whose first `n_known` tokens are not evaluated again,
        and the tokens that they are of."""
        for other in [*self.texts]:
            if other.is_over():
                self.texts.remove(other)
                other.keep()
        self.texts.append(text)
        if n_known:
            kept, n = self.prefixes.find(text.text.marked(n_known + 1)[1:])
            if kept is not None:
                self.prefixes.use(kept)
                return self.cache.fork(kept.sequence, n), text.text.ids[1 : n + 1]
        return self.cache.new_sequence(), []

    def run(self, parts: Seq[tuple[Sequence, list[int]]], hidden: Array, *, wants: bool) -> Array:
        """Evaluate tokens at the ends of sequences: [sequences or no rows, n_embd], before the last
        norm.

        Args:
            parts: sequences and their next tokens.
            hidden: [tokens, n_embd], the hidden states of the token before each.
            wants: the outputs of the last tokens are wanted.

        Raises:
            NoPageError: there is no room for them.
        """
        few = wants and all(len(ids) <= FEW_MISSING for _, ids in parts)
        backend = self.model.backend
        batch = self.cache.batch(
            parts, logits="all" if few else "last" if wants else "none", generated=few
        )
        self._unfinished = True
        with backend.arrays.inference():
            x = self.model.joined(batch.token_ids, hidden)
            out = self.block.behind(x, batch, self.cache)
        for sequence, ids in parts:
            sequence.length += len(ids)
        self._unfinished = False
        if not wants:
            return out[:0]
        if len(out) == len(parts):
            return out
        return out[backend.arrays.int64([end - 1 for end in batch.starts[1:]])]

    def next_of(self, x: Array) -> tuple[Array, NDArray[np.float32]]:
        """What follows outputs x [texts, n_embd]: the hidden states for the guesses after these,
        and logits, float32 [texts, n_vocab]."""
        weights, backend = self.block.weights, self.model.backend
        with backend.arrays.inference():
            logits = backend.logits(x, weights.output_norm, weights.output, self.block.config)
            hidden = self.model.as_read(x, weights.output_norm)
        return hidden, backend.arrays.to_numpy(logits)

    def n_missing(self, text: HeadText) -> int:
        """See `Guesser`."""
        return max(1, text.n_ready)

    def lacks_much(self, text: HeadText) -> bool:
        """See `Guesser`."""
        return text.n_ready > FEW_MISSING

    def read(self, text: HeadText) -> float:
        """Evaluate what waits, but the last, from which a draft begins."""
        n, started = text.n_ready - 1, time.perf_counter()
        if n < 1:
            return 0.0
        text.read(n)
        return self.times().read(n, time.perf_counter() - started)

    def draft(
        self, asked: Seq[tuple[HeadText, Guessing]], started: float | None = None
    ) -> tuple[list[list[Guess]], float]:
        """See `Guesser`."""
        started = started or time.perf_counter()
        n_missing, found = max(self.n_missing(text) for text, _ in asked), self.guesses(asked)
        seconds, most = time.perf_counter() - started, max(map(len, found))
        return found, self.times(len(asked)).drafted(n_missing, most, seconds)

    def guesses(self, asked: Seq[tuple[HeadText, Guessing]]) -> list[list[Guess]]:
        """Tokens that may follow each text, which must not lack much of itself."""
        self.recover()
        found: list[list[Guess]] = [[] for _ in asked]
        begins = [text.begins(self.n_batch // len(asked)) for text, _ in asked]
        likely, going = [1.0] * len(asked), [i for i, one in enumerate(begins) if one is not None]
        parts = [one for one in begins if one is not None]
        states = _joined([hidden for _, _, hidden in parts]) if parts else None
        started, is_first = time.perf_counter(), True
        while going:
            assert states is not None
            try:
                x = self.run([(sequence, ids) for sequence, ids, _ in parts], states, wants=True)
            except NoPageError:
                break
            if is_first:
                for i, (_, ids, _) in zip(going, parts, strict=True):
                    asked[i][0].began(ids)
            else:  # before, there may have been more rows
                now = time.perf_counter()
                self.times(len(going)).timed(now - started)
            started, is_first = time.perf_counter(), False
            states, logits = self.next_of(x)
            rows, further = list[int](), list[int]()
            for row, i in enumerate(going):
                text, guessing = asked[i]
                token, probability = text.likeliest(logits[row])
                if probability < guessing.p_min:
                    continue
                found[i].append(Guess(token, confidence_of(probability)))
                likely[i] *= guessing.chance(probability)
                if guessing.goes_on(likely[i], len(found[i])) and text.has_room:
                    rows.append(row)
                    further.append(i)
            if len(rows) < len(going) and rows:
                states = states[self.model.backend.arrays.int64(rows)]
            going = further
            parts = [(asked[i][0].sequence, [found[i][-1].token], states) for i in going]
        return found

    def recover(self) -> None:
        """Start over if the work of a batch before broke off."""
        if self._unfinished:
            self.prefixes.forget()
            self.cache.start_over([])
            for text in self.texts:
                text.lose()
            self.texts.clear()
            self._unfinished = False


def _joined(rows: Seq[Array]) -> Array:
    return rows[0] if len(rows) == 1 else namespace(rows[0]).concatenate(rows, 0)


class HeadText:
    """The rows of one text in a head's cache, and hidden states that it has not read yet.

    Args:
        head: whose cache has the rows.
        text: tokens that the model evaluates; it grows.
        is_over: whether nobody goes on with it.
    """

    def __init__(
        self, head: PredictionHead, text: Text, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        self.head, self.text, self.is_over = head, text, is_over
        self._sequence: Sequence | None = None
        self._ids = list[int]()
        self._next = 0  # the position of the first hidden state that waits
        self._waiting = list[Array]()
        self._n_waiting = 0
        self._has_room = True

    def saw(self, at: int, hidden: Array) -> None:
        """Take note of hidden states [tokens, n_embd] of the text's tokens from position `at` on,
        and of guesses that follow them."""
        self.head.recover()
        if not self._has_room:
            return
        if self._sequence is None:
            self._sequence, self._ids = self.head.begin(self, at)
            self._next, self._waiting, self._n_waiting = at, [], 0
        if at > self._next + self._n_waiting:  # rows of these tokens came from another text
            self.read(self._n_waiting)
            self._next, self._waiting, self._n_waiting = at, [], 0
        elif at < self._next:
            hidden, at = hidden[self._next - at :], self._next
        self._drop(at - self._next)
        if len(hidden):
            self._waiting.append(hidden)
            self._n_waiting += len(hidden)
        while self.n_ready > self.head.n_batch:
            self.read(self.head.n_batch)

    def _drop(self, n: int) -> None:
        """Forget all but the first `n` hidden states that wait."""
        while self._n_waiting > n:
            last = self._waiting.pop()
            self._n_waiting -= len(last)
            if self._n_waiting < n:
                self._waiting.append(last[: n - self._n_waiting])
                self._n_waiting = n

    @property
    def n_rows(self) -> int:
        """Its rows, the rows of guesses included."""
        return 0 if self._sequence is None else self._sequence.length

    @property
    def n_ready(self) -> int:
        """Hidden states that wait whose next tokens are known."""
        return min(self._n_waiting, len(self.text.ids) - 1 - self._next)

    @property
    def sequence(self) -> Sequence:
        """Its rows, which a draft has begun with."""
        assert self._sequence is not None
        return self._sequence

    @property
    def has_room(self) -> bool:
        """Whether a further row fits the context."""
        return self.n_rows < self.head.cache.n_ctx

    def likeliest(self, logits: NDArray[np.float32]) -> tuple[int, float]:
        """The token that the head guesses next, by float32 [n_vocab], and its probability."""
        return most_probable(logits)

    def begins(self, most: int) -> tuple[Sequence, list[int], Array] | None:
        """What a draft begins with, if it can: the rows, at most `most` tokens whose hidden states
        wait, and these."""
        if self.n_ready > max(1, most):
            self.read(self.n_ready - 1)
        n, cache = self.n_ready, self.head.cache
        is_told = self._next + self._n_waiting >= len(self.text.ids) - 1
        if self._sequence is None or n < 1 or not is_told or len(self._ids) + n >= cache.n_ctx:
            return None
        try:
            cache.cut_back(self._sequence, len(self._ids))
            cache.reserve(self._sequence, len(self._ids) + n)
        except NoPageError:
            self.give_back()
            return None
        ids = self.text.ids[self._next + 1 : self._next + 1 + n]
        self._waiting = [_joined(self._waiting)]
        return self._sequence, ids, self._waiting[0][:n]

    def began(self, ids: list[int]) -> None:
        """Tokens were evaluated whose hidden states waited."""
        n = len(ids)
        self._ids += ids
        self._next += n
        self._n_waiting -= n
        self._waiting = [_joined(self._waiting)[n:]] if self._n_waiting else []

    def read(self, n: int) -> None:
        """Evaluate tokens whose hidden states wait, at most `n`."""
        n, head = min(n, self.n_ready), self.head
        if n < 1 or self._sequence is None:
            return
        try:
            head.cache.cut_back(self._sequence, len(self._ids))
            for _ in range(0, n, head.n_batch):
                some = min(n, head.n_batch)
                ids = self.text.ids[self._next + 1 : self._next + 1 + some]
                hidden = _joined(self._waiting)[:some]
                head.run([(self._sequence, ids)], hidden, wants=False)
                self.began(ids)
                n -= some
        except NoPageError:
            self.give_back()

    def keep(self) -> None:
        """Leave the rows to texts that begin like this one."""
        sequence, self._sequence = self._sequence, None
        if sequence is not None:
            head, ids = self.head, marked(self._ids, [False] * len(self._ids))
            head.cache.cut_back(sequence, len(ids))
            head.prefixes.keep(sequence, ids + self.text.salt * SALTED)

    def give_back(self) -> None:
        """Do without rows from now on."""
        self.lose()
        self._has_room = False

    def lose(self) -> None:
        """Have no rows, and begin again with the next token."""
        sequence, self._sequence = self._sequence, None
        self._ids, self._waiting, self._n_waiting = [], [], 0
        if sequence is not None:
            self.head.cache.cut_back(sequence, 0)


def head_speculator(
    config: Speculation, head: PredictionHead, text: Text, is_over: Callable[[], bool]
) -> ModelSpeculator[HeadText]:
    """What drafts for a new text, which tells it of hidden states (`Text.saw`).

    Args:
        is_over: whether nobody goes on with the text.
    """
    rows = HeadText(head, text, is_over)
    text.saw = rows.saw
    copies = Speculator(config, head.pace.prices)
    return ModelSpeculator(config, head, rows, copies=copies, reads_late=True)
