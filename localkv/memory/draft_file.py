"""`DraftFile`: a model's file that is to draft for another model, before it is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from localkv.arch.spec import ModelSpec
from localkv.cache.cache_checks import check_cache
from localkv.cache.profile import wants_scales
from localkv.config import CacheConfig
from localkv.errors import UsageError
from localkv.loader.gguf_file import GGUFFile, open_gguf
from localkv.loader.model_header import ModelHeader, shared_tokens
from localkv.loader.weights import checked_spec
from localkv.memory.plan import DraftMemory, ModelMemory


@dataclass(frozen=True)
class DraftFile:
    """The file of a draft model, and how the model is used.

    Attributes:
        config: its sizes.
        n_shared: tokens that both models have.
        cache: the types of its own cache.
    """

    gguf: GGUFFile
    config: ModelSpec
    n_shared: int
    cache: CacheConfig

    @classmethod
    def of(
        cls, path: str | os.PathLike[str], model: ModelHeader, type_k: str, type_v: str
    ) -> DraftFile:
        """Open a file.

        Raises:
            ModelFileError: it can't be used.
            UsageError: its tokens are not `model`'s, or it can't have such types of K and V.
        """
        gguf = open_gguf(path)
        n_shared = shared_tokens(model, gguf)
        config = checked_spec(gguf)
        cache = _checked_cache("the draft model", config, type_k, type_v)
        return cls(gguf, config, n_shared, cache)

    def n_ctx(self, n_ctx: int) -> int:
        """Tokens of the draft's context if the large model's context has `n_ctx`."""
        return min(n_ctx, self.config.n_ctx_train)

    def memory(self, model: ModelMemory) -> DraftMemory:
        """What it takes beside a model."""
        tensors = tuple(self.gguf.tensors.values())
        own = replace(
            model,
            tensors=tensors,
            config=self.config,
            changed=frozenset(),
            draft=None,
            activations="auto",
            n_between=0,
        )
        return DraftMemory(own, self.cache)


def head_memory(model: ModelMemory, type_k: str, type_v: str, n_sequences: int) -> DraftMemory:
    """What the block of a model that predicts a further token takes beside its weights.

    Args:
        type_k, type_v: of its own cache.
        n_sequences: texts at the same time.

    Raises:
        UsageError: it can't have such types of K and V.
    """
    config = model.config.predictor
    cache = _checked_cache("the block that predicts", config, type_k, type_v)
    own = replace(
        model,
        tensors=(),
        config=config,
        changed=frozenset(),
        draft=None,
        activations="auto",
        n_between=0,
    )
    return DraftMemory(own, replace(cache, n_sequences=n_sequences))


def _checked_cache(what: str, config: ModelSpec, type_k: str, type_v: str) -> CacheConfig:
    """The cache of what drafts.

    Raises:
        UsageError: it can't have such types of K and V.
    """
    cache = CacheConfig(type_k, type_v)
    try:
        check_cache(cache, config.groups)
    except UsageError as error:
        raise UsageError(f"{what}: {error.message}", hint=error.hint) from error
    if scaled := wants_scales(cache.types):
        raise UsageError(
            f"{what}: cache type {scaled[0]} needs scales, which there are for the model alone",
            hint="use another type (-ctkd, -ctvd)",
        )
    return cache
