"""A text as the engine has it: its tokens, and which of them came as a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

GENERATED = 1 << 31
"""Marks a token that was evaluated as a generated one, in an array of marked ids."""
SALTED = 1 << 32
"""What a text's salt is multiplied with there."""


@dataclass(eq=False)
class Text:
    """Tokens that are evaluated one after the other.

    Attributes:
        ids: all of them; the owner of the text adds to them.
        n_prompt: the number of leading tokens that came at once, as a prompt; the others were drawn
            one by one.
        salt: texts of different salts have no rows in common, whatever their tokens are.
    """

    ids: list[int]
    n_prompt: int
    salt: int = 0

    def marked(self, length: int) -> NDArray[np.int64]:
        """The first `length` tokens: int64 [length], `marked`."""
        ids = marked(self.ids[:length], np.arange(length) >= self.n_prompt)
        return ids + self.salt * SALTED if self.salt else ids


def marked(ids: list[int], generated: ArrayLike) -> NDArray[np.int64]:
    """Token ids, and of which kind each is: int64 [len(ids)]."""
    kinds = np.asarray(generated, dtype=np.int64)
    return np.asarray(ids, dtype=np.int64) + kinds * GENERATED


def unmarked(ids: NDArray[np.int64]) -> tuple[list[int], list[bool]]:
    """Token ids, and whether each was generated, of `marked` ones."""
    return (ids % GENERATED).tolist(), (ids >= GENERATED).tolist()


def n_common(ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> int:
    """The number of leading items that two arrays have in common."""
    n = min(len(ours), len(theirs))
    differ = ours[:n] != theirs[:n]
    return int(differ.argmax()) if differ.any() else n
