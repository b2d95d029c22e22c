"""PLaMo 2's and 3's tokenizer: of all ways to cut a text into tokens, the one of the best score.

That is a unigram model (T. Kudo, https://arxiv.org/abs/1804.10959), found from the end of the text
to its start. As in the models' own program and llama.cpp (`llm_tokenizer_plamo2` in
`src/llama-vocab.cpp`), scores are whole numbers, of equal ways the one with the longer token
counts, and a character without a token becomes the tokens of its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from localkv.errors import ModelFileError
from localkv.loader.token_types import BYTE_TEXTS, TokenType
from localkv.loader.vocabulary import Vocabulary

_SCALE = 1e4
_UNKNOWN = -10_000_000
"""Score of a character without a token."""
_LEAST = -20_000_000
"""A token with a score that is not above it is never taken."""

_MOST_CHARS = 1 << 28
"""Characters of all beginnings of all tokens together; real vocabularies have some five million."""

_REACHABLE = frozenset((TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED))


def plamo_encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """A function from text to ids. It yields no control token for any text.

    A byte order mark at the start is left out, as in llama.cpp.

    Raises:
        ModelFileError: there is no token for some byte, or tokens are too long.
    """
    missing = next((text for text in BYTE_TEXTS if text not in vocabulary.ids), None)
    if missing is not None:
        raise ModelFileError(f"the tokenizer is malformed: it has no token {missing}")
    bytes_of = [vocabulary.ids[text] for text in BYTE_TEXTS]
    tokens = _scored(vocabulary)
    if sum(len(text) ** 2 for text in tokens) > 2 * _MOST_CHARS:
        longest = max(map(len, tokens))
        raise ModelFileError(f"the tokenizer has too long tokens, of up to {longest} characters")
    beginnings = {text[:end] for text in tokens for end in range(1, len(text) + 1)}

    def encode(text: str) -> list[int]:
        text = text.removeprefix("\ufeff")
        costs = [0] * (len(text) + 1)
        ends = [0] * len(text)
        ids = [-1] * len(text)
        for start in range(len(text) - 1, -1, -1):
            least, ends[start] = costs[start + 1] - _UNKNOWN, start + 1
            end = start + 1
            while end <= len(text) and (piece := text[start:end]) in beginnings:
                if (found := tokens.get(piece)) is not None:
                    score, token = found
                    if (cost := costs[end] - score) <= least:
                        least, ends[start], ids[start] = cost, end, token
                end += 1
            costs[start] = least
        found_ids, start = [], 0
        while start < len(text):
            if ids[start] >= 0:
                found_ids.append(ids[start])
            else:
                found_ids += [bytes_of[byte] for byte in text[start].encode()]
            start = ends[start]
        return found_ids

    return encode


def _scored(vocabulary: Vocabulary) -> dict[str, tuple[int, int]]:
    """Score and id of each token that a text can be cut into."""
    scored = {}
    for token, text in enumerate(vocabulary.tokens):
        score = vocabulary.scores[token] * _SCALE
        whole = math.floor(score + 0.5) if score > 0 else math.ceil(score - 0.5)
        if vocabulary.types[token] in _REACHABLE and whole > _LEAST:
            scored[text] = whole, token
    return scored
