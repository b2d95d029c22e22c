"""`PredictionHead`: a block of the model's own file guesses, from the model's hidden states.

Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2). The block reads the hidden
state of a token and the embedding of the token after it, and predicts the one that follows. Its
output has the hidden state's place for the guess after that. So rows of its cache are of tokens
whose hidden states came from the model, until a draft adds the rows of its guesses, which go before
the next draft.

The head is told of hidden states as the model evaluates a text (`HeadText.saw`). Where it does
without drafts for a while it keeps them, and reads them together when it drafts again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

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
from localkv.engine.speculation.speculator import Prices
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
        times: what guesses take.
        texts: that have rows, those that began last at the end.
    """

    def __init__(
        self, model: Transformer, block: Transformer, cache: KVCache, n_batch: int, prices: Prices
    ) -> None:
        self.model, self.block, self.cache, self.n_batch = model, block, cache, n_batch
        self.pace = DraftPace(prices)
        self.times = GuessTimes()
        self.prefixes = PrefixCache(cache, exact=False, most=MOST_KEPT)
        self.texts = list[HeadText]()
        self._unfinished = False

    @property
    def n_vocab(self) -> int:
        """Tokens that it guesses."""
        return self.model.config.n_vocab

    def warm_up(self) -> None:
        """Guess in a turn of the model, and forget it, so that no text waits for what is made
        once."""
        n, config = min(_WARM_UP_TOKENS, self.cache.n_ctx - 8), self.model.config
        if n < 1:
            return
        text = HeadText(self, Text([0] * (n + 1), n + 1))
        zeros = self.model.backend.arrays.zeros(n, config.n_embd)
        text.saw(0, self.model.backend.arrays.floating(zeros))
        guessing = Guessing(4, self.n_vocab, 0.0, (), (1.0,), (0.0,) * 4)
        text.guesses(guessing)
        timed = []
        for _ in range(_TIMES):  # the first ones took long
            text.text.ids.append(0)
            text.saw(len(text.text.ids) - 2, zeros[:1])
            self.times.token, started = 0.0, time.perf_counter()
            found = text.guesses(guessing)
            seconds, token = time.perf_counter() - started, self.times.token
            timed.append((token, seconds - token * len(found)))
        self.times.token, self.times.overhead = (
            max(0.0, min(some)) for some in zip(*timed, strict=True)
        )
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

    def run(self, sequence: Sequence, ids: list[int], hidden: Array, *, wants: bool) -> Array:
        """Evaluate tokens at the end of a sequence: [1 or no rows, n_embd], before the last norm.

        Args:
            hidden: [tokens, n_embd], the hidden states of the token before each.
            wants: the last token's output is wanted.

        Raises:
            NoPageError: there is no room for them.
        """
        few = len(ids) <= FEW_MISSING and wants
        backend = self.model.backend
        batch = self.cache.batch(
            [(sequence, ids)], logits="all" if few else "last" if wants else "none", generated=few
        )
        self._unfinished = True
        with backend.arrays.inference():
            x = self.model.joined(batch.token_ids, hidden)
            out = self.block.behind(x, batch, self.cache)
        sequence.length += len(ids)
        self._unfinished = False
        return out[-1:] if wants else out[:0]

    def next_of(self, x: Array) -> tuple[Array, int, float]:
        """What follows an output x [1, n_embd]: the hidden state for the guess after this one, the
        most probable token, and its probability."""
        weights, backend = self.block.weights, self.model.backend
        with backend.arrays.inference():
            logits = backend.logits(x, weights.output_norm, weights.output, self.block.config)
            hidden = self.model.as_read(x, weights.output_norm)
        return hidden, *most_probable(backend.arrays.to_numpy(logits)[-1])

    def recover(self) -> None:
        """Start over if the work of a batch before broke off."""
        if self._unfinished:
            self.prefixes.forget()
            self.cache.start_over([])
            for text in self.texts:
                text.lose()
            self.texts.clear()
            self._unfinished = False


class HeadText:
    """The rows of one text in a head's cache, and hidden states that it has not read yet.

    Args:
        head: whose cache has the rows.
        text: tokens that the model evaluates; it grows.
        is_over: whether nobody goes on with it.

    Attributes:
        pace, times, n_vocab: the head's.
    """

    def __init__(
        self, head: PredictionHead, text: Text, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        self.head, self.text, self.is_over = head, text, is_over
        self.pace, self.times, self.n_vocab = head.pace, head.times, head.n_vocab
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
            self._read(self._n_waiting)
            self._next, self._waiting, self._n_waiting = at, [], 0
        elif at < self._next:
            hidden, at = hidden[self._next - at :], self._next
        self._drop(at - self._next)
        if len(hidden):
            self._waiting.append(hidden)
            self._n_waiting += len(hidden)
        while self._n_ready > self.head.n_batch:
            self._read(self.head.n_batch)

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
    def _n_ready(self) -> int:
        """Hidden states that wait whose next tokens are known."""
        return min(self._n_waiting, len(self.text.ids) - 1 - self._next)

    def n_missing(self, text: Text) -> int:
        """See `Guesser`."""
        return max(1, self._n_ready)

    def lacks_much(self, text: Text) -> bool:
        """See `Guesser`."""
        return self._n_ready > FEW_MISSING

    def read(self, text: Text) -> float:
        """Evaluate what waits, but the last, from which a draft begins."""
        n, started = self._n_ready - 1, time.perf_counter()
        if n < 1:
            return 0.0
        self._read(n)
        return self.times.read(n, time.perf_counter() - started)

    def _read(self, n: int, *, wants: bool = False) -> Array | None:
        """Evaluate tokens whose hidden states wait: the last one's output, if it is wanted and
        there was room."""
        n, out = min(n, self._n_ready), None
        if n < 1 or self._sequence is None:
            return None
        every = self._waiting
        hidden = every[0] if len(every) == 1 else namespace(every[0]).concatenate(every, 0)
        head = self.head
        try:
            head.cache.cut_back(self._sequence, len(self._ids))
            for start in range(0, n, head.n_batch):
                end = min(n, start + head.n_batch)
                first = self._next + 1
                ids = self.text.ids[first + start : first + end]
                is_last = wants and end == n
                out = head.run(self._sequence, ids, hidden[start:end], wants=is_last)
                self._ids += ids
        except NoPageError:
            self.give_back()
            return None
        self._next += n
        self._n_waiting -= n
        self._waiting = [hidden[n:]] if self._n_waiting else []
        return out

    def draft(
        self, text: Text, guessing: Guessing, started: float | None = None
    ) -> tuple[list[Guess], float]:
        """See `Guesser`."""
        started, n_missing = started or time.perf_counter(), self.n_missing(text)
        found = self.guesses(guessing) if self.pace.prices.one else []  # what a step takes, first
        return found, self.times.drafted(n_missing, len(found), time.perf_counter() - started)

    def guesses(self, guessing: Guessing) -> list[Guess]:
        """Tokens that may follow the text."""
        head, found, likely = self.head, list[Guess](), 1.0
        room = head.cache.n_ctx - len(self._ids) - self._n_ready
        if room < 1 or self._next + self._n_waiting < len(self.text.ids) - 1:
            return []
        started = time.perf_counter()
        x = self._read(self._n_ready, wants=True)
        while x is not None:
            assert self._sequence is not None
            hidden, token, probability = head.next_of(x)
            if probability < guessing.p_min:
                break
            found.append(Guess(token, confidence_of(probability)))
            likely *= guessing.chance(probability)
            if not guessing.goes_on(likely, len(found)) or len(found) >= room:
                break
            try:
                x = head.run(self._sequence, [token], hidden, wants=True)
            except NoPageError:
                break
            now = time.perf_counter()
            if len(found) > 1:  # before, there may have been more rows
                self.times.timed(now - started)
            started = now
        return found

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
) -> ModelSpeculator:
    """What drafts for a new text, which tells it of hidden states (`Text.saw`).

    Args:
        is_over: whether nobody goes on with the text.
    """
    rows = HeadText(head, text, is_over)
    text.saw = rows.saw
    return ModelSpeculator(config, rows)
