"""`LoadedModel`: a file's tokenizer with an engine that runs its weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from localkv.arch.spec import ModelSpec
from localkv.cache.layout import pairs_of
from localkv.config import CacheConfig
from localkv.engine.api.prompts import Prompt
from localkv.engine.api.tokenized_model import TokenizedModel
from localkv.engine.engine import Engine
from localkv.errors import ModelClosedError
from localkv.kernels.backend import Backend
from localkv.kernels.method import in_words
from localkv.option_types import check_types

Logits: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float32]]
"""[tokens, n_vocab]"""

_HELD = ("engine", "batch", "backend", "gguf", "tokenizer", "grammar_tokens", "chat_template")
"""Attributes of a model that end with `close`."""


class LoadedModel(TokenizedModel):
    """What all that an `LLM` does begins with.

    Attributes:
        engine: token ids in, token ids out.
        config: the model's sizes.
        cache: the cache's types and context length.
        backend: where the weights are.
        draft: a smaller model that guesses for this one; it is closed with it.
    """

    engine: Engine
    config: ModelSpec
    cache: CacheConfig
    backend: Backend
    draft: LoadedModel | None = None
    _kernels: dict[str, str]

    def logits(self, ids: Sequence[int]) -> Logits:
        """Logits of every position, through the cache: float32 [len(ids), n_vocab]."""
        check_types(LoadedModel.logits, locals())
        logits: Logits = self.backend.arrays.to_numpy(self.engine.logits(ids))
        return logits

    @property
    def kernels(self) -> dict[str, str]:
        """The implementation of each operation, in a few words, as it is by now: of a model on a
        CPU some weights are laid out while the first tokens are evaluated."""
        with suppress(ModelClosedError, AttributeError):  # a closed one's stay
            pairs = pairs_of(self.cache, self.config.groups)
            self._kernels = in_words(self.engine.model.uses(pairs))
        return self._kernels

    def close(self) -> None:
        """Free the weights, their mapping and the cache, once calls of other threads have ended.

        Whoever calls it again, or a stream of it, gets a `LocalKVError`; what `__init__` found out
        (`config`, `memory`, `warnings`) stays. To close it twice does nothing.
        """
        if self.draft is not None:
            self.draft.close()
        if "engine" in self.__dict__:
            with suppress(ModelClosedError):  # another thread was faster
                self.engine.close()
        for name in _HELD:
            self.__dict__.pop(name, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _HELD:
                raise ModelClosedError
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _many_ids(
        self, prompts: Iterable[Prompt], parse_special: bool, what: str
    ) -> list[list[int]]:
        """The tokens of several prompts, each of which can be evaluated."""
        many = [self._ids(one, parse_special) for one in prompts]
        for number, ids in enumerate(many, 1):
            self.engine.check_prompt(ids, f"{what} {number} of {len(many)}")
        return many
