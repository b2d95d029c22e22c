"""`EmbeddingModel`: a model that makes vectors of texts."""

from __future__ import annotations

from typing import Literal, cast, overload

import numpy as np

from localkv.engine.api.loaded_model import LoadedModel
from localkv.engine.api.prompts import Text, Texts, are_many
from localkv.engine.embedding import (
    Pooling,
    Vectors,
    check_pooling,
    normalised,
    pooling_of_file,
)
from localkv.option_types import check_types


class EmbeddingModel(LoadedModel):
    """Texts in, embeddings out."""

    @overload
    def embed(
        self,
        texts: Text | Texts,
        *,
        pooling: Literal["mean", "last"] | None = None,
        normalize: bool = True,
        parse_special: bool = False,
    ) -> Vectors: ...

    @overload
    def embed(
        self,
        texts: Text | Texts,
        *,
        pooling: Literal["none"],
        normalize: bool = True,
        parse_special: bool = False,
    ) -> list[Vectors]: ...

    def embed(
        self,
        texts: Text | Texts,
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        parse_special: bool = False,
    ) -> Vectors | list[Vectors]:
        """Embeddings: hidden states of the tokens after the last norm, pooled.

        They go through the cache, so its types matter. What it held is forgotten.

        Args:
            texts: one text or a list of them, each a string or token ids.
            pooling: "mean" of the tokens, the "last" one, or "none", which keeps every token's.
                None takes the one that the model was trained for, or "mean".
            normalize: make each vector's Euclidean norm 1.
            parse_special: control tokens written in the texts count as such.

        Returns:
            float32 [texts, n_embd]; with "none" a list with [tokens, n_embd] for each text.

        Raises:
            ContextOverflowError: a text is longer than the context; none was evaluated.
            UsageError: there is no such pooling.
        """
        check_types(EmbeddingModel.embed, {**locals(), "texts": ""})  # those by `_ids`
        if pooling is None:
            key = f"{self.config.architecture}.pooling_type"
            pooling = pooling_of_file(self.gguf.metadata.integer(key, None))
        check_pooling(pooling)
        if are_many(texts):
            many = self._many_ids(texts, parse_special, "text")
        elif texts == []:
            many = []
        else:
            many = [self._ids(cast("Text", texts), parse_special)]
        vectors = [self.engine.embedding(ids, pooling) for ids in many]
        if normalize:
            vectors = [normalised(vector) for vector in vectors]
        if pooling == "none":
            return cast("list[Vectors]", vectors)
        return np.array(vectors, np.float32).reshape(len(many), self.config.n_embd)
