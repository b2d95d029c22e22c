"""DRY: a penalty on repeating sequences of tokens, and the breakers it stops at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from localkv.sampling.candidates import Candidates, Ints, find

if TYPE_CHECKING:
    from localkv.sampling.params import SamplingParams
    from localkv.sampling.state import SamplerState

Breakers = Mapping[int, set[tuple[int, ...]]]
"""DRY's sequence breakers: a token that one begins with -> the tokens that then complete it, none
where the token holds the whole breaker."""


def dry_breakers(
    breakers: Sequence[str],
    texts: Sequence[str],
    tokenize: Callable[[str], Sequence[int]] | None = None,
) -> Breakers:
    """The token sequences in which a sequence breaker can turn up.

    Either one token holds the breaker, or a token ends with its beginning and the rest follows, as
    the tokenizer cuts it. As in llama.cpp a breaker is cut to 40 bytes and the rest to 20 tokens.

    Args:
        breakers: texts.
        texts: of all tokens, by id.
        tokenize: cuts the rest of a breaker; None takes the longest token that fits, each time.
    """
    tokenize = tokenize or _longest_match(texts)
    found: dict[int, set[tuple[int, ...]]] = {}
    for text in breakers:
        breaker = text.encode()[:40].decode(errors="ignore")
        if not breaker:
            continue
        cuts = {breaker[:i]: tokenize(breaker[i:]) for i in range(1, len(breaker))}
        tails = {beginning: tuple(rest)[:20] for beginning, rest in cuts.items() if rest}
        for token, word in enumerate(texts):
            if breaker in word:
                found.setdefault(token, set()).add(())
            elif word.endswith(tuple(tails)):
                ends = {tail for beginning, tail in tails.items() if word.endswith(beginning)}
                found.setdefault(token, set()).update(ends)
    return found


def _longest_match(texts: Sequence[str]) -> Callable[[str], list[int]]:
    ids = {word: token for token, word in reversed(list(enumerate(texts))) if word}

    def tokenize(text: str) -> list[int]:
        tokens = []
        while text:
            fits = [n for n in range(len(text), 0, -1) if text[:n] in ids]
            if not fits:
                return []
            tokens.append(ids[text[: fits[0]]])
            text = text[fits[0] :]
        return tokens

    return tokenize


def heads_of(breakers: Breakers) -> npt.NDArray[np.bool_]:
    """Whether a breaker begins in a token, bool [largest of them + 2]; the last one is False."""
    heads = np.zeros(max(breakers, default=-1) + 2, np.bool_)
    heads[list(breakers)] = True
    return heads


def _tokens_since_breaker(recent: Ints, breakers: Breakers, heads: npt.NDArray[np.bool_]) -> int:
    """How many of the last tokens come after the last sequence breaker; all, if there is none."""
    n = len(recent)
    if not breakers:
        return n
    at = np.flatnonzero(heads[np.minimum(recent, len(heads) - 1)])
    for head in reversed(at.tolist()):
        since = n - 1 - int(head)
        after = recent[n - since :]
        tails = breakers[int(recent[n - 1 - since])]
        fits = [len(tail) for tail in tails if tuple(after[: len(tail)]) == tail]
        if fits:
            return since - max(fits)
    return n


def repeats(recent: Ints, most: int, before: Ints | None = None) -> Ints:
    """How many tokens, up to and with each but the last, equal the last ones: int64 [n - 1].

    Args:
        recent: tokens of the text.
        most: longer runs count as so many.
        before: the same for the text without its last token, which makes it one comparison; it may
            go back further.
    """
    n = len(recent)
    lengths = np.zeros(n - 1, np.int64)
    if before is not None:
        lengths[1:] = before[len(before) - (n - 2) :]
        lengths = np.minimum(lengths + 1, np.minimum(np.arange(1, n), most))
        return np.where(recent[:-1] == recent[-1], lengths, 0)
    ends = np.arange(n - 1)
    for length in range(1, most + 1):
        ends = ends[ends >= length - 1]
        ends = ends[recent[ends - (length - 1)] == recent[n - length]]
        if not len(ends):
            break
        lengths[ends] = length
    return lengths


def dry(candidates: Candidates, params: SamplingParams, state: SamplerState) -> Candidates:
    """Lowers the logits of tokens that would go on with a sequence that was there before.

    "Don't repeat yourself" (p-e-w, text-generation-webui #5677). A token is worth
    `multiplier * base ** (length - allowed_length)` off, `length` being the longest run of last
    tokens (not across a sequence breaker) that the token followed earlier; nothing where it is
    shorter than `allowed_length`, or where the token holds a breaker. llama.cpp bounds the exponent
    so that the power stays finite in float32.
    """
    base, allowed_length = params.dry_base, params.dry_allowed_length
    recent, breakers = state.recent(params.dry_penalty_last_n), state.breakers
    n = len(recent)
    limit = _tokens_since_breaker(recent, breakers, state.breaker_heads)
    if n <= allowed_length or limit < allowed_length:
        return candidates
    max_exponent = int(88.7228391 / math.log(base)) if base > 1.000001 else n
    lengths = state.repeats(params.dry_penalty_last_n, allowed_length + max_exponent)
    lengths = np.minimum(lengths, limit)
    again = lengths >= allowed_length
    tokens, inverse = np.unique(recent[1:][again], return_inverse=True)
    longest = np.zeros(len(tokens), np.int64)
    np.maximum.at(longest, inverse, lengths[again])
    breaks = np.array([() in breakers.get(token, ()) for token in tokens.tolist()], np.bool_)
    penalty = params.dry_multiplier * np.power(base, longest - allowed_length)
    penalty = np.where(breaks, 0.0, penalty)
    at, found = find(candidates.ids, tokens)
    candidates.logits[at] -= penalty[found]
    return candidates
