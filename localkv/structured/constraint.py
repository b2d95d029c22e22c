"""`Constraint`: which tokens a grammar lets one text go on with.

`GrammarTokens` is a vocabulary as llguidance reads it, made once for a model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from threading import Lock, Thread, stack_size
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localkv.errors import UsageError
from localkv.structured.grammar import EVERYWHERE, MOST_SEARCHED, Grammar, Scope
from localkv.structured.grammar_child import MAX_STACK, failure, parser_limits, refusal

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


MOST_MATCHERS, MOST_MATCHED = 16, 1 << 20
"""Grammars whose matchers are kept, and characters of all of them."""

_STARTING = Lock()
"""Held while a thread with a stack size of its own starts: the size is a setting of all threads."""


class GrammarVocabulary(Protocol):
    """A tokenizer as grammars need it; `Tokenizer` is one."""

    n_vocab: int
    bos_id: int | None
    eos_id: int | None
    eog_ids: frozenset[int]

    def token_bytes(self, token: int, special: bool = False) -> bytes: ...

    def is_marker(self, token: int) -> bool: ...

    def encode_within(self, text: str) -> list[int]: ...

    def token_to_id(self, text: str) -> int | None: ...


class _Held(NamedTuple):
    """A matcher, or why there is none, and how many texts hold it."""

    made: LLMatcher | UsageError
    n: int


class GrammarTokens:
    """Makes llguidance's view of a vocabulary when it is asked for first, which takes a second for
    100,000 tokens.

    No text of a grammar is a control token; a grammar in Lark may name one by its id (`<[7]>`).

    Args:
        vocabulary: the model's tokenizer.
    """

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = Lock()
        self._made: LLTokenizer | None = None
        self._matchers: OrderedDict[str, LLMatcher] = OrderedDict()
        self._held = dict[str, _Held]()

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A matcher at a grammar's beginning, to be copied. The last ones are kept.

        A thread of its own makes it, with four times the stack that the grammar was checked with;
        other threads go on.

        Raises:
            UsageError: llguidance refuses the grammar.
        """
        with self._lock:
            if (held := self._held.get(grammar.source)) is not None:
                if isinstance(held.made, UsageError):
                    raise UsageError(held.made.message, held.made.hint)
                return held.made
            kept = self._matchers.get(grammar.source)
            if kept is not None:
                self._matchers.move_to_end(grammar.source)
                return kept
        made = _with_stack(4 * MAX_STACK, lambda: _matcher(self.for_llguidance, grammar))
        with self._lock:
            self._matchers[grammar.source] = made
            while len(self._matchers) > MOST_MATCHERS or (
                len(self._matchers) > 1 and sum(map(len, self._matchers)) > MOST_MATCHED
            ):
                self._matchers.popitem(last=False)
        return made

    def hold(self, grammar: Grammar) -> None:
        """Make a matcher, or find that there is none, and keep the result until `release`, so that
        a text that asks for it need not wait."""
        made: LLMatcher | UsageError
        try:
            made = self.matcher(grammar)
        except UsageError as error:
            made = error
        with self._lock:
            held = self._held.get(grammar.source, _Held(made, 0))
            self._held[grammar.source] = held._replace(n=held.n + 1)

    def release(self, grammar: Grammar) -> None:
        """Forget a matcher, unless another text holds it, too."""
        with self._lock:
            held = self._held.pop(grammar.source, None)
            if held is not None and held.n > 1:
                self._held[grammar.source] = held._replace(n=held.n - 1)

    def has_matcher(self, grammar: Grammar) -> bool:
        """Whether `matcher` takes no time."""
        return grammar.source in self._held or grammar.source in self._matchers

    def begin(self) -> Thread:
        """Make it in a thread of its own, so that nobody waits for it later."""
        thread = Thread(target=self._make, name="localkv-grammar", daemon=True)
        thread.start()
        return thread

    def _make(self) -> None:
        if self.vocabulary.eog_ids:
            _ = self.for_llguidance

    @property
    def for_llguidance(self) -> LLTokenizer:
        """What matchers are made with.

        Raises:
            UsageError: the vocabulary has no token that ends a text.
        """
        with self._lock:
            if self._made is None:
                self._made = _tokenizer(self.vocabulary)
            return self._made


def _matcher(tokens: LLTokenizer, grammar: Grammar) -> LLMatcher:
    from llguidance import LLMatcher

    matcher = LLMatcher(tokens, grammar.source, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise refusal(grammar.what, matcher.get_error())
    return matcher


def _with_stack(n_bytes: int, make: Callable[[], LLMatcher]) -> LLMatcher:
    """What a function returns or raises in a thread that has a stack of this size."""
    made: list[LLMatcher] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)

    with _STARTING:
        before = stack_size(n_bytes)
        try:
            thread = Thread(target=run, name="localkv-matcher", daemon=True)
            thread.start()
        finally:
            stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def _tokenizer(vocabulary: GrammarVocabulary) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    if not vocabulary.eog_ids:
        raise UsageError("the model has no token that ends a text, which grammars need")
    ends = sorted(vocabulary.eog_ids, key=lambda token: (token != vocabulary.eos_id, token))
    wrapper = TokenizerWrapper(_Encoder(vocabulary, ends[0]))
    return LLTokenizer(wrapper, n_vocab=vocabulary.n_vocab, eos_token=ends)


class _Encoder:
    """What llguidance asks of a tokenizer: the bytes of all tokens, and ids of a text."""

    def __init__(self, vocabulary: GrammarVocabulary, eos_id: int) -> None:
        every = range(vocabulary.n_vocab)
        self.eos_token_id = eos_id
        self.bos_token_id = vocabulary.bos_id
        self.special_token_ids = [token for token in every if vocabulary.is_marker(token)]
        self.tokens = [vocabulary.token_bytes(token, special=True) for token in every]
        self._vocabulary = vocabulary

    def __call__(self, data: bytes) -> list[int]:
        """Ids whose bytes are these, or no grammar could have them.

        They are the tokenizer's, unless those stand for something else: SentencePiece takes U+2581
        for a space. Then they are the longest tokens there are.
        """
        ids = self._vocabulary.encode_within(data.decode("utf-8", errors="replace"))
        return ids if b"".join(self.tokens[token] for token in ids) == data else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        ids, at = list[int](), 0
        while at < len(data):
            size = min(len(data) - at, self._longest)
            while size > 1 and data[at : at + size] not in self._plain:
                size -= 1
            token = self._plain.get(data[at : at + size])
            if token is not None:
                ids.append(token)
            at += size
        return ids

    @cached_property
    def _plain(self) -> dict[bytes, int]:
        """The tokens of plain text by their bytes."""
        special = frozenset(self.special_token_ids)
        return {data: i for i, data in enumerate(self.tokens) if data and i not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._plain), default=1)


MOST_SPACES = 2
"""Tokens of line breaks that may come between a mark and the grammar."""


class Constraint:
    """Keeps one text to a grammar. Each text has its own.

    Before a token is drawn, `masked` takes those from the logits that the grammar does not allow.
    Each token that becomes part of the text goes to `accept`, and to nothing else: what was
    accepted is never taken back. Guessed tokens are cut to the ones that may come (`n_valid`), and
    accepted one by one as they turn out right. A request that gave its rows to others keeps its
    constraint, as it keeps its sampler. A token that ends the text is allowed where the grammar may
    end. Where it can't go on the text `is_over`, and no such token needs to be drawn.

    Args:
        tokens: of the model.
        grammar: what it keeps to.
        scope: where in the text.
        n_logits: how many there are; a model may have more than its vocabulary has tokens.
        banned: tokens that are never drawn (`logit_bias` of -inf), ends of the text perhaps.

    Attributes:
        is_over: the grammar has ended, and nothing can follow.

    Raises:
        UsageError: llguidance refuses the grammar.
    """

    def __init__(
        self,
        tokens: GrammarTokens,
        grammar: Grammar,
        *,
        n_logits: int,
        scope: Scope = EVERYWHERE,
        banned: Collection[int] = (),
    ) -> None:
        self.is_over = False
        self._tokens = tokens
        self._grammar = grammar
        self._scope = scope
        self._bits = np.zeros(-(-tokens.vocabulary.n_vocab // 32), np.int32)
        self._n_logits = n_logits
        self._banned = np.array(sorted(banned), np.int64)
        self._fresh = tokens.matcher(grammar)
        self._awaited = [one for one in (scope.before, scope.mark) if one is not None]
        self._text = b""
        self._matcher: LLMatcher | None = None
        self._may_open = bool(scope.openings)
        self._n_skipped = MOST_SPACES
        if not self._awaited:
            self._begin(b"")

    @property
    def holds(self) -> bool:
        """Whether the grammar says what comes next; else the text is free."""
        return self._matcher is not None

    def masked(
        self, logits: NDArray[np.float32], others: Collection[int] = ()
    ) -> NDArray[np.float32]:
        """The logits, -inf where the grammar does not allow the token.

        Args:
            logits: float32 [n_logits], left as they are.
            others: tokens that may be drawn as well, and are not accepted.

        Raises:
            UsageError: no token is left.
            LocalKVError: the grammar takes too much.
        """
        if self._matcher is None or not np.isfinite(logits.max()):
            return logits  # without a finite maximum nothing can be drawn: the sampler says so
        allowed = self.allowed(others)
        if not allowed.any():
            raise UsageError(
                "the grammar allows no token here that may be drawn",
                hint="logit_bias or ignore_eos bans those that it needs",
            )
        return np.where(allowed, logits, np.float32(-np.inf))

    def allowed(self, others: Collection[int] = ()) -> NDArray[np.bool_]:
        """The tokens that may come next, with `others`: bool [n_logits]."""
        allowed = np.ones(self._n_logits, np.bool_)
        if self._matcher is not None:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._check(self._matcher)
            n = min(self._n_logits, self._tokens.vocabulary.n_vocab)
            bits = np.unpackbits(self._bits.view(np.uint8), count=n, bitorder="little")
            allowed[:n] = bits.view(np.bool_)
            allowed[n:] = False
            if self._may_open:
                allowed[[*self._scope.openings]] = True
            if self._n_skipped < MOST_SPACES:
                allowed[self._spaces()] = True
            allowed[[*others]] = True
        allowed[self._banned] = False
        return allowed

    def n_valid(self, guesses: Sequence[int]) -> int:
        """How many of some guessed tokens may come, one after the other."""
        if self._matcher is None:
            return len(guesses)
        return int(self._matcher.validate_tokens(list(guesses)))

    def accept(self, token: int) -> None:
        """Take note of the text's next token, drawn or forced.

        Raises:
            LocalKVError: the grammar does not allow it.
        """
        matcher, may_open, n_skipped = self._matcher, self._may_open, self._n_skipped
        self._may_open, self._n_skipped = False, MOST_SPACES
        if may_open and token in self._scope.openings:
            self._matcher = None
            self._awaited.insert(0, self._scope.openings[token])
        elif matcher is None:
            self._look_for_mark(token)
        elif (
            n_skipped < MOST_SPACES
            and token in self._spaces()
            and not matcher.validate_tokens([token])
        ):
            self._n_skipped = n_skipped + 1
        else:
            if not matcher.consume_token(token):
                raise failure(matcher.get_error())
            self._end_if_stopped()

    def _look_for_mark(self, token: int) -> None:
        self._text += self._tokens.vocabulary.token_bytes(token, special=True)
        while self._awaited:
            found = self._awaited[0].search(self._text)
            if found is None:
                self._text = self._text[-MOST_SEARCHED:]
                return
            self._text = self._text[found.end() :]
            del self._awaited[0]
        rest, self._text = self._text, b""
        if self._scope.skips_space and self._scope.mark is None:
            rest, self._n_skipped = rest.lstrip(), 0
        self._begin(rest)

    def _begin(self, rest: bytes) -> None:
        """Let the grammar hold, from `rest` on, which the text has already."""
        self._matcher = self._fresh.deep_copy()
        if not rest:
            return
        ids = self._tokens.for_llguidance.tokenize_bytes(rest)
        self._n_skipped = MOST_SPACES
        if self._matcher.validate_tokens(ids) == len(ids):
            self._matcher.consume_tokens(ids)
            self._end_if_stopped()
        elif self._scope.mark is not None:
            self._set_free(rest)
        else:
            raise failure(f"the text goes on with {rest!r}")

    def _end_if_stopped(self) -> None:
        assert self._matcher is not None
        self._check(self._matcher)
        if not self._matcher.is_stopped():
            return
        if self._scope.mark is not None:
            self._set_free(b"")
        else:
            self.is_over = True

    def _set_free(self, text: bytes) -> None:
        """Wait for the next mark; the end of `text` may already hold its beginning."""
        assert self._scope.mark is not None
        self._matcher, self._text = None, text[-MOST_SEARCHED:]
        self._awaited = [self._scope.mark]

    def _check(self, matcher: LLMatcher) -> None:
        if matcher.is_error():
            raise failure(matcher.get_error())

    def _spaces(self) -> list[int]:
        """Tokens of line breaks that models write after their reasoning."""
        ids = (self._tokens.vocabulary.encode_within(text) for text in ("\n", "\n\n"))
        return [one[0] for one in ids if len(one) == 1]
