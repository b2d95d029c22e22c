"""`Constraint`: which tokens a grammar lets one text go on with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from localkv.errors import UsageError
from localkv.structured.grammar import Grammar
from localkv.structured.grammar_tokens import GrammarTokens
from localkv.structured.refusals import failure
from localkv.structured.scope import EVERYWHERE, MOST_SEARCHED, Scope

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_SPACES = 2
"""Tokens of line breaks that may come between a mark and the grammar."""


class Constraint:
    """Keeps one text to a grammar. Each text has its own.

    Before a token is drawn, `masked` takes those from the logits that the grammar does not allow.
    Each token that becomes part of the text goes to `accept`, and to nothing else: what was
    accepted is never taken back. Guessed tokens are cut to those that may come (`n_valid`), and
    accepted one by one as they turn out right; a request that gave its rows to others keeps its
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
        """Which tokens may come next, with `others`: bool [n_logits]."""
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
        """Wait for the next mark, the beginning of which may be at a text's end."""
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
