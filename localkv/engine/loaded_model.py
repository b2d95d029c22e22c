"""`LoadedModel`: a file's tokenizer with an engine that runs its weights."""

from __future__ import annotations

from localkv.arch.spec import ModelSpec
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.engine.prompts import Prompt, Prompts
from localkv.engine.tokenized_model import TokenizedModel


class LoadedModel(TokenizedModel):
    """What all that an `LLM` does begins with.

    Attributes:
        engine: token ids in, token ids out.
        config: the model's sizes.
        cache: the cache's types and context length.
    """

    engine: Engine
    config: ModelSpec
    cache: CacheConfig

    def _many_ids(self, prompts: Prompts, parse_special: bool, what: str) -> list[list[int]]:
        """The tokens of several prompts, each of which can be evaluated."""
        every: list[Prompt] = [*prompts]
        many = [self._ids(one, parse_special) for one in every]
        for number, ids in enumerate(many, 1):
            self.engine.check_prompt(ids, f"{what} {number} of {len(many)}")
        return many
