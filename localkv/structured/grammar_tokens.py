"""`GrammarTokens`: a vocabulary as llguidance reads it, made once for a model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from threading import Lock, Thread, stack_size
from typing import TYPE_CHECKING, NamedTuple, Protocol

from localkv.errors import UsageError
from localkv.structured.grammar import Grammar
from localkv.structured.grammar_child import MAX_STACK, parser_limits
from localkv.structured.refusals import refusal

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
