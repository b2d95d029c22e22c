"""Bytes of weights, of the KV cache and of scratch, from a file's header and the settings.

Arithmetic only: nothing is loaded and torch is not imported, so a plan can be made, and refused,
before anything is allocated.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from localkv.arch.spec import PER_LAYER_ROWS
from localkv.cache.layout import (
    PAGE_TOKENS,
    GroupLayout,
    group_bytes,
    group_layouts,
    types_in,
)
from localkv.cache.recurrent_state import NEAR_END, state_bytes
from localkv.config import CacheConfig
from localkv.kernels.footprint import Matrix
from localkv.memory.footprints import FOOTPRINTS
from localkv.memory.scratch import repack_bytes, scratch_bytes
from localkv.memory.split_tensors import split_by, split_bytes
from localkv.memory.weight_bytes import by_row_bytes, looked_up_bytes, weight_bytes

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec
    from localkv.loader.gguf_header import TensorInfo


CHECKPOINT_TOKENS = NEAR_END
"""Of a context for each checkpoint of its states, at least."""
MOST_PAGES = 1 << 22
"""Of the longest context that is looked for: a billion tokens. If all layers have windows, any
context fits that a page more does."""


@dataclass(frozen=True)
class GroupShare:
    """The part of a cache that a group of layers has.

    Attributes:
        layers, window: the group's: how many, and how far back they see, or 0.
        type_k, type_v: how its rows are stored.
        n_rows: tokens whose rows a sequence has room for.
        cache_k, cache_v: bytes for all sequences.
    """

    layers: int
    window: int
    type_k: str
    type_v: str
    n_rows: int
    cache_k: int
    cache_v: int

    @classmethod
    def of(cls, layout: GroupLayout, cache: CacheConfig, n_batch: int) -> GroupShare:
        group, n_ctx = layout.group, cache.n_ctx
        return cls(
            len(group.layers),
            group.reach,
            *types_in(cache, group),
            layout.n_rows(n_ctx, n_batch),
            *group_bytes(
                layout,
                n_ctx=n_ctx,
                n_batch=n_batch,
                n_sequences=cache.n_sequences,
                n_tokens=cache.n_tokens,
            ),
        )


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a model with one cache takes on one backend.

    Attributes:
        weights_mapped: tensors that are read as they lie in the mapped file. The system keeps them
            in memory as long as there is room, and reads them again from the file.
        weights_allocated: tensors that were copied when they were loaded: laid out anew, or vectors
            of another type than float32.
        cache_k, cache_v: the bytes that `KVCache` allocates for K and for V.
        scratch: upper bound of the memory of a batch besides (`scratch_bytes`), and of pages that
            change their types (`repack_bytes`).
        groups: what each group of layers has of the cache.
        weights_by_row: tensors of which the host reads rows of tokens only, in the mapped file
            (`PER_LAYER_ROWS`): they need not be in any memory, so they are in no sum.
        states: of recurrent layers, for all sequences.
        checkpoints: copies of them in the host's memory, when there are as many as there can be.
        draft: all of a model that drafts for this one, if there is one.
    """

    weights_mapped: int
    weights_allocated: int
    cache_k: int
    cache_v: int
    scratch: int
    groups: tuple[GroupShare, ...] = ()
    weights_by_row: int = 0
    states: int = 0
    checkpoints: int = 0
    draft: MemoryPlan | None = None

    @property
    def weights(self) -> int:
        return self.weights_mapped + self.weights_allocated

    @property
    def total(self) -> int:
        draft = 0 if self.draft is None else self.draft.total
        own = self.weights + self.cache_k + self.cache_v + self.scratch + self.states_in_all
        return own + draft

    @property
    def states_in_all(self) -> int:
        """Bytes of states, and of their checkpoints."""
        return self.states + self.checkpoints

    @property
    def resident(self) -> int:
        """Bytes that always have to be in memory: all but mapped weights."""
        mapped = 0 if self.draft is None else self.draft.weights_mapped
        return self.total - self.weights_mapped - mapped


@dataclass(frozen=True)
class DraftMemory:
    """The memory of a model that drafts, with the cache that it will have.

    Attributes:
        memory: of the model.
        cache: its types; it is as long as that of the large model, as far as it can be.
    """

    memory: ModelMemory
    cache: CacheConfig

    def plan(self, n_ctx: int) -> MemoryPlan:
        """The bytes beside a context of so many tokens."""
        n_ctx = min(n_ctx, self.memory.config.n_ctx_train)
        return self.memory.plan(replace(self.cache, n_ctx=n_ctx))


@dataclass(frozen=True)
class ModelMemory:
    """The memory of a model with any cache.

    Attributes:
        tensors: those that the model uses, or all of a file.
        config: its sizes.
        backend: the name of the backend, not "auto".
        n_batch: most tokens evaluated at a time.
        n_threads: threads of the CPU's kernels.
        is_file: weights are mapped; those of a model that is made in memory, or read into it, are
            not.
        changed: names of tensors that are copied, as smoothing changes them.
        draft: a smaller model that drafts for this one.
    """

    tensors: tuple[TensorInfo, ...]
    config: ModelSpec
    backend: str
    n_batch: int
    n_threads: int
    is_file: bool = True
    changed: frozenset[str] = frozenset()
    draft: DraftMemory | None = None

    @cached_property
    def weights(self) -> tuple[int, int]:
        """Bytes of weights that stay in the file, and of those that are copied.

        A tensor that is read by row counts only where it is made in, or read into, the memory that
        is counted.
        """
        whole = [tensor for tensor in self.tensors if split_by(tensor, self.config) is None]
        mapped, allocated = weight_bytes(whole, self.backend, self.changed)
        allocated += split_bytes(self.tensors, self.config, self.backend)
        if self.is_file:
            return mapped, allocated
        by_row = by_row_bytes(self.tensors) if FOOTPRINTS[self.backend].is_of_host() else 0
        return 0, mapped + allocated + by_row + looked_up_bytes(self.tensors, self.backend)

    @cached_property
    def _matrices(self) -> frozenset[Matrix]:
        """Its matrices, or stacks of them: each format and shape once."""
        return frozenset(
            Matrix(tensor.format, tensor.shape)
            for tensor in self.tensors
            if len(tensor.shape) > 1 and tensor.name != PER_LAYER_ROWS
        )

    def plan(self, cache: CacheConfig) -> MemoryPlan:
        """The bytes with one cache.

        Raises:
            UsageError: the model can't have this cache.
        """
        config = self.config
        layouts = group_layouts(cache, config.groups)
        groups = tuple(GroupShare.of(layout, cache, self.n_batch) for layout in layouts)
        scratch = scratch_bytes(
            config,
            n_ctx=cache.n_ctx,
            n_batch=self.n_batch,
            n_threads=self.n_threads,
            footprint=FOOTPRINTS[self.backend],
            matrices=self._matrices,
        )
        scratch += repack_bytes(layouts)
        k, v = (sum(getattr(group, side) for group in groups) for side in ("cache_k", "cache_v"))
        by_row = by_row_bytes(self.tensors) if self.is_file else 0
        states = self._state_bytes(cache)
        draft = None if self.draft is None else self.draft.plan(cache.n_ctx)
        return MemoryPlan(*self.weights, k, v, scratch, groups, by_row, *states, draft)

    def _state_bytes(self, cache: CacheConfig) -> tuple[int, int]:
        """Of states, and of their checkpoints, where these are in the same memory."""
        n_bytes = state_bytes(self.config.states, n_sequences=cache.n_sequences)
        most = min(cache.ctx_checkpoints, cache.n_ctx // CHECKPOINT_TOKENS)
        return n_bytes, 0 if self.backend == "cuda" else most * n_bytes

    def longest_context(
        self, cache: CacheConfig, n_bytes: int, *, only_resident: bool = False
    ) -> int:
        """Tokens of the longest context, in whole pages, that fits in `n_bytes`; 0 for none.

        Args:
            cache: its types and sequences; its context does not matter.
            only_resident: mapped weights need not fit.
        """

        def too_long(n_pages: int) -> bool:
            plan = self.plan(replace(cache, n_ctx=n_pages * PAGE_TOKENS))
            return (plan.resident if only_resident else plan.total) > n_bytes

        most = 1
        while most < MOST_PAGES and not too_long(most):
            most *= 2
        return PAGE_TOKENS * bisect_left(range(1, most + 1), True, key=too_long)
