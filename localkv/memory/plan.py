"""Bytes of weights, of the KV cache and of scratch, from a file's header and the settings.

Arithmetic only: nothing is loaded and torch is not imported, so a plan can be made, and refused,
before anything is allocated.

Weights are counted as the backends keep them, by each backend's footprint. `attn_kv_b` of older
files becomes the two stacks that newer files hold (`loader/weights.py`), in memory of their own,
and nothing of the tensor is read again. The size of the same model's file in another type of
weights follows by arithmetic.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from localkv.arch.placement import Placement, unit_of
from localkv.arch.spec import (
    PER_LAYER_ROWS,
    AttentionSpec,
    DeltaNetSpec,
    EncoderAttentionSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    Mixer,
    ModelSpec,
    MoeSpec,
    ShortConvSpec,
)
from localkv.cache.layout import PAGE_TOKENS, GroupLayout, group_bytes, group_layouts, types_in
from localkv.cache.recurrent_state import NEAR_END, state_bytes
from localkv.config import CacheConfig
from localkv.kernels.footprint import ALLOCATOR, FLOAT, MOST_LOGITS, Footprint, HeadSizes, Matrix
from localkv.loader.quantised_format import bits, is_quantised, quantised_format
from localkv.quant_formats import FORMATS, WEIGHT_FORMATS, QuantFormat

if TYPE_CHECKING:
    from localkv.loader.gguf_header import TensorInfo


def footprint_of(backend: str) -> Footprint:
    """The footprint of a backend, by the backend's name."""
    if backend == "cpu":
        from localkv.kernels.cpu import footprint as cpu_footprint

        return cpu_footprint
    if backend == "cuda":
        from localkv.kernels.gpu import footprint as gpu_footprint

        return gpu_footprint
    from localkv.kernels import footprint

    return footprint


_SPLIT = re.compile(r"blk\.(\d+)\.attn_kv_b\.weight")
FLOATS = ("f32", "f16", "bf16")
"""Types that are transposed as they are; others become F16."""


def split_by(tensor: TensorInfo, config: ModelSpec) -> LatentAttentionSpec | None:
    """The layer's attention, if its sizes split this tensor into parts; None for other tensors."""
    match = _SPLIT.fullmatch(tensor.name)
    if match is None or int(match[1]) >= config.n_layers:
        return None
    mixer = config.layers[int(match[1])].mixer
    return mixer if isinstance(mixer, LatentAttentionSpec) else None


def split_bytes(tensors: Iterable[TensorInfo], config: ModelSpec, backend: str) -> int:
    """Bytes of all that is made of tensors: rows, where they are the machine's, and their layout
    for products."""
    footprint, total = footprint_of(backend), 0
    for tensor in tensors:
        spec = split_by(tensor, config)
        if spec is None:
            continue
        turned = tensor.format if tensor.format.name in FLOATS else FORMATS["f16"]
        for fmt, shape in (
            (turned, (spec.n_heads, spec.latent_dim, spec.nope_dim)),
            (tensor.format, (spec.n_heads, spec.value_dim, spec.latent_dim)),
        ):
            total += footprint.copied_bytes(fmt, shape, is_looked_up=False)
            if footprint.is_of_host():
                total += math.prod(shape[:-1]) * fmt.row_bytes(shape[-1])
    return total


EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"


def backend_of(device: str) -> str:
    """The name of the backend that runs on a device of a placement."""
    return "cuda" if device.startswith("cuda") else device


def output_matrix(tensors: Iterable[TensorInfo]) -> str:
    """The name of the matrix that logits are made with; it may be the embedding."""
    return next((t.name for t in tensors if t.name == "output.weight"), EMBEDDING)


def weight_bytes(
    tensors: Iterable[TensorInfo], backend: str, changed: Collection[str] = (), output: str = ""
) -> tuple[int, int]:
    """Bytes of tensors that stay in the file, and of those that are copied, as those `changed` are.

    Each counts once. So does an embedding that is the output matrix as well, whose single rows are
    read in the file and which products read from panels. A tensor that is only read by row does not
    count.

    Args:
        output: the name of the output matrix; empty for the one that is among these tensors.
    """
    tensors = list(tensors)
    output = output or output_matrix(tensors)
    footprint = footprint_of(backend)
    mapped = allocated = 0
    for tensor in tensors:
        if tensor.name == PER_LAYER_ROWS:
            continue
        is_looked_up = tensor.name == EMBEDDING != output
        copied = footprint.copied_bytes(tensor.format, tensor.shape, is_looked_up=is_looked_up)
        if tensor.name in changed:
            copied = copied or tensor.n_bytes
        allocated += copied
        mapped += 0 if copied else tensor.n_bytes
    return mapped, allocated


def by_row_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Bytes of the tensor from which only the rows of tokens are read."""
    return sum(tensor.n_bytes for tensor in tensors if tensor.name == PER_LAYER_ROWS)


def looked_up_bytes(tensors: Iterable[TensorInfo], backend: str) -> int:
    """Bytes of an embedding that is the output matrix, too, and is kept beside its panels."""
    footprint, tensors = footprint_of(backend), list(tensors)
    if output_matrix(tensors) != EMBEDDING:
        return 0
    return sum(
        tensor.n_bytes
        for tensor in tensors
        if tensor.name == EMBEDDING
        and footprint.copied_bytes(tensor.format, tensor.shape, is_looked_up=False)
        and not footprint.copied_bytes(tensor.format, tensor.shape, is_looked_up=True)
    )


@dataclass(frozen=True)
class TypeShare:
    """The tensors of a model that are of one type: how many, their values and their bytes."""

    name: str
    n_tensors: int
    n_values: int
    n_bytes: int


def weights_by_type(tensors: Iterable[TensorInfo]) -> list[TypeShare]:
    """Tensors, values and bytes of each type, the largest share first."""
    groups: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.format.name, []).append(tensor)
    shares = [
        TypeShare(
            name,
            len(group),
            sum(math.prod(tensor.shape) for tensor in group),
            sum(tensor.n_bytes for tensor in group),
        )
        for name, group in groups.items()
    ]
    return sorted(shares, key=lambda share: -share.n_bytes)


_OFFERED = [fmt for fmt in WEIGHT_FORMATS.values() if fmt.is_offered]
QUANTS = tuple(fmt.name for fmt in sorted(_OFFERED, key=bits, reverse=True))
"""Types of weights that files are commonly offered in, from the most bits to the fewest."""


def requantised(tensors: Iterable[TensorInfo], type_name: str) -> tuple[TensorInfo, ...]:
    """The tensors with their matrices in another type; offsets mean nothing any more."""
    tensors = tuple(tensors)
    output = output_matrix(tensors)
    return tuple(
        _as(tensor, quantised_format(tensor.shape[-1], type_name, is_output=tensor.name == output))
        if is_quantised(tensor.name, tensor.shape)
        else tensor
        for tensor in tensors
    )


def _as(tensor: TensorInfo, fmt: QuantFormat) -> TensorInfo:
    n_bytes = math.prod(tensor.shape[:-1]) * fmt.row_bytes(tensor.shape[-1])
    return replace(tensor, format=fmt, n_bytes=n_bytes)


def bits_per_weight(tensors: Iterable[TensorInfo]) -> float:
    """Bits that a value takes on average, over all tensors."""
    tensors = tuple(tensors)
    return 8 * sum(t.n_bytes for t in tensors) / sum(math.prod(t.shape) for t in tensors)


CHECKPOINT_TOKENS = NEAR_END
"""A context has at least this many tokens for each checkpoint of its states."""
MOST_PAGES = 1 << 22
"""Pages of the longest context that is looked for: a billion tokens. If all layers have windows, a
cache stops growing, so all longer contexts may fit, and only this ends the search."""


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
        weights_allocated: tensors that are copied at loading, because their layout changes, or
            because they are vectors of another type than float32.
        cache_k, cache_v: the bytes that `KVCache` allocates for K and for V.
        scratch: upper bound of the other memory that a batch takes (`scratch_bytes`), and of the
            memory that pages take to change their types (`repack_bytes`).
        groups: what each group of layers has of the cache.
        weights_by_row: tensors from which the host reads only the rows of tokens, in the mapped
            file (`PER_LAYER_ROWS`). They need not be in any memory, so no sum counts them.
        states: of recurrent layers, for all sequences.
        checkpoints: copies of them in the host's memory, when there are as many as there can be.
        draft: all of a model that drafts for this one, if there is one.
        weights_decoded: the part of the allocated weights that is float32 and has another type in
            the file (`--activations exact`).
        adapters: of LoRA adapters.
        places: device -> what it has of these bytes, where there are several.
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
    weights_decoded: int = 0
    adapters: int = 0
    places: tuple[tuple[str, MemoryPlan], ...] = ()

    @property
    def weights(self) -> int:
        return self.weights_mapped + self.weights_allocated

    @property
    def total(self) -> int:
        draft = 0 if self.draft is None else self.draft.total
        own = self.weights + self.cache_k + self.cache_v + self.scratch + self.states_in_all
        return own + draft + self.adapters

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
        cache: its types. It is as long as the large model's cache, or shorter where the draft was
            trained on less context.
    """

    memory: ModelMemory
    cache: CacheConfig

    def plan(self, n_ctx: int) -> MemoryPlan:
        """The bytes that it takes when the large model has a context of `n_ctx` tokens."""
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
        is_file: weights are mapped. They are not if the model is made in memory, or read into it.
        changed: names of tensors that are copied, as smoothing changes them.
        draft: a smaller model that drafts for this one.
        activations: as `LLM` has it.
        n_between: guesses after which recurrent layers keep states.
        adapters: the bytes of adapters, and the ranks of all pairs of a layer together, at most.
        placement: where its parts are; None for one place, the backend's.
        output: the name of the output matrix, where that is not among the tensors of a part.
    """

    tensors: tuple[TensorInfo, ...]
    config: ModelSpec
    backend: str
    n_batch: int
    n_threads: int
    is_file: bool = True
    changed: frozenset[str] = frozenset()
    draft: DraftMemory | None = None
    activations: str = "auto"
    n_between: int = 0
    adapters: tuple[int, int] = (0, 0)
    placement: Placement | None = None
    output: str = ""

    @cached_property
    def parts(self) -> dict[str, ModelMemory]:
        """What each of its places has of it; empty with one place."""
        if self.placement is None or self.placement.is_one:
            return {}
        return {
            device: self._part(self.placement, k) for k, device in enumerate(self.placement.devices)
        }

    def _part(self, placement: Placement, k: int) -> ModelMemory:
        """What a place has: its tensors, and of layers what it runs. Norms around a block
        whose layer is elsewhere are in both places."""
        config = self.config
        apart = {i for i, at in enumerate(placement.layers) if at != placement.blocks[i]}
        tensors: list[TensorInfo] = []
        for tensor in self.tensors:
            _, i = unit_of(tensor.name)
            if placement.device_of(tensor.name, config) == k or (
                i in apart
                and "norm" in tensor.name
                and k in (placement.layers[i], placement.blocks[i])
            ):
                tensors.append(tensor)
        output = output_matrix(self.tensors)
        if output == EMBEDDING and k == placement.output != placement.embedding:
            tied = next(tensor for tensor in self.tensors if tensor.name == EMBEDDING)
            tensors.append(replace(tied, name=OUTPUT))
        layers = tuple(
            replace(
                layer,
                mixer=layer.mixer if placement.layers[i] == k else None,
                beside=layer.beside if placement.layers[i] == k else None,
                ffn=layer.ffn if placement.blocks[i] == k else None,
            )
            for i, layer in enumerate(config.layers)
        )
        return replace(
            self,
            tensors=tuple(tensors),
            config=replace(
                config, layers=layers, n_vocab=config.n_vocab if k == placement.output else 0
            ),
            backend=backend_of(placement.devices[k]),
            placement=None,
            output="" if placement.output == placement.embedding else OUTPUT,
            draft=None,
            adapters=(0, 0),
        )

    def _placed_plan(self, cache: CacheConfig) -> MemoryPlan:
        """The bytes of all places, each with its own."""
        layouts = group_layouts(cache, self.config.groups)
        groups = tuple(GroupShare.of(layout, cache, self.n_batch) for layout in layouts)
        places = []
        for k, (device, part) in enumerate(self.parts.items()):
            own = list[GroupShare]()
            for layout, share in zip(layouts, groups, strict=True):
                assert self.placement is not None
                here = sum(self.placement.layers[i] == k for i in layout.group.layers)
                if here:
                    of_k, of_v = (
                        of * here // share.layers for of in (share.cache_k, share.cache_v)
                    )
                    own.append(replace(share, layers=here, cache_k=of_k, cache_v=of_v))
            places.append((device, part._plan(cache, layouts, tuple(own))))
        sums = {
            name: sum(getattr(plan, name) for _, plan in places)
            for name in (
                *("weights_mapped", "weights_allocated", "cache_k", "cache_v", "scratch"),
                *("weights_by_row", "states", "checkpoints", "weights_decoded"),
            )
        }
        return MemoryPlan(**sums, groups=groups, places=tuple(places))

    @cached_property
    def decoded(self) -> frozenset[str]:
        """Names of the matrices that are decoded to float32 when they are loaded.

        With exact activations these are all whose products would round the activations that they
        meet. Beside F16 a model with experts rounds them as ggml does (`loader/weights.py`). An
        embedding that is not the output matrix, too, meets none.
        """
        if self.parts:
            found = frozenset[str]().union(*(part.decoded for part in self.parts.values()))
            names = {tensor.name for tensor in self.tensors}
            return frozenset(name if name in names else EMBEDDING for name in found)
        return frozenset(one.name for one in self._rounding) if self._is_exact else frozenset()

    @cached_property
    def rounding_types(self) -> Counter[str]:
        """Values of the matrices whose products round the activations that they meet to 8 bits, by
        the matrices' type; empty on a GPU."""
        found = Counter[str]()
        for part in self.parts.values():
            found += part.rounding_types
        if self.parts:
            return found
        for tensor in () if self._is_exact or self.backend != "cpu" else self._rounding:
            if tensor.format.block_size > 1:
                found[tensor.format.name] += math.prod(tensor.shape)
        return found

    @property
    def _is_exact(self) -> bool:
        return self.activations == "exact"

    @cached_property
    def _rounding(self) -> tuple[TensorInfo, ...]:
        """The matrices whose products round the activations that they meet."""
        rounds = footprint_of(self.backend).rounds_activations
        output = self.output or output_matrix(self.tensors)
        return tuple(
            tensor
            for tensor in self.tensors
            if len(tensor.shape) > 1
            and tensor.name != PER_LAYER_ROWS
            and (tensor.name != EMBEDDING or output == EMBEDDING)
            and (rounds(tensor.format) or (self.config.has_experts and tensor.format.name == "f16"))
        )

    @cached_property
    def _loaded(self) -> tuple[TensorInfo, ...]:
        """The tensors in the types that they have in memory."""
        f32 = FORMATS["f32"]
        return tuple(_as(one, f32) if one.name in self.decoded else one for one in self.tensors)

    @cached_property
    def weights(self) -> tuple[int, int]:
        """Bytes of weights that stay in the file, and of those that are copied.

        A tensor that is read by row counts only where it is made in, or read into, the memory that
        is counted.
        """
        if self.parts:
            mapped, allocated = map(
                sum, zip(*(p.weights for p in self.parts.values()), strict=True)
            )
            return mapped, allocated
        whole = [tensor for tensor in self._loaded if split_by(tensor, self.config) is None]
        changed = self.changed | self.decoded
        mapped, allocated = weight_bytes(whole, self.backend, changed, self.output)
        allocated += split_bytes(self._loaded, self.config, self.backend)
        if self.is_file:
            return mapped, allocated
        by_row = by_row_bytes(self.tensors) if footprint_of(self.backend).is_of_host() else 0
        return 0, mapped + allocated + by_row + looked_up_bytes(self._loaded, self.backend)

    @cached_property
    def _matrices(self) -> frozenset[Matrix]:
        """Its matrices, or stacks of them: each format and shape once."""
        return frozenset(
            Matrix(tensor.format, tensor.shape)
            for tensor in self._loaded
            if len(tensor.shape) > 1 and tensor.name != PER_LAYER_ROWS
        )

    def plan(self, cache: CacheConfig) -> MemoryPlan:
        """The bytes with one cache.

        Raises:
            UsageError: the model can't have this cache.
        """
        if self.parts:
            return self._placed_plan(cache)
        layouts = group_layouts(cache, self.config.groups)
        groups = tuple(GroupShare.of(layout, cache, self.n_batch) for layout in layouts)
        return self._plan(cache, layouts, groups)

    def _plan(
        self, cache: CacheConfig, layouts: Sequence[GroupLayout], groups: tuple[GroupShare, ...]
    ) -> MemoryPlan:
        """The bytes with one cache, of which these groups are here."""
        config = self.config
        scratch = scratch_bytes(
            config,
            n_ctx=cache.n_ctx,
            n_batch=self.n_batch,
            n_threads=self.n_threads,
            footprint=footprint_of(self.backend),
            matrices=self._matrices,
        )
        scratch += repack_bytes(layouts)
        scratch += FLOAT * min(self.n_batch, cache.n_ctx) * self.adapters[1]
        k, v = (sum(getattr(group, side) for group in groups) for side in ("cache_k", "cache_v"))
        by_row = by_row_bytes(self.tensors) if self.is_file else 0
        states = self._state_bytes(cache)
        draft = None if self.draft is None else self.draft.plan(cache.n_ctx)
        decoded = sum(tensor.n_bytes for tensor in self._loaded if tensor.name in self.decoded)
        adapters = self.adapters[0]
        return MemoryPlan(
            *self.weights, k, v, scratch, groups, by_row, *states, draft, decoded, adapters
        )

    def _state_bytes(self, cache: CacheConfig) -> tuple[int, int]:
        """Bytes of states and of their checkpoints; checkpoints in another memory count as 0."""
        states, n = self.config.states, cache.n_sequences
        most = min(cache.ctx_checkpoints, cache.n_ctx // CHECKPOINT_TOKENS)
        checkpoints = 0 if self.backend == "cuda" else most * state_bytes(states, n_sequences=n)
        return state_bytes(states, n_sequences=n, n_between=self.n_between), checkpoints

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


PACKED = 1.0625
"""Values that a packed one takes at most: float32, and two sums for 32."""
VOCABULARY_BYTES = 64
"""Per token of the vocabulary: logits, and the sampler's ids, keys and probabilities."""
INDEX_BYTES = 64
"""Per token of a batch: its id, position, slots, and the like, int64 each."""
REPACK_BYTES = 20
"""Per value of a page of one layer that changes its types: float32, rotated and not, both packed
forms, and what references of formats hold meanwhile. The most of any step was 19.4."""


def scratch_bytes(
    config: ModelSpec,
    *,
    n_ctx: int,
    n_batch: int,
    n_threads: int,
    footprint: Footprint,
    matrices: Iterable[Matrix],
) -> int:
    """Bytes that a batch takes at most.

    Args:
        n_ctx: tokens of context; a batch is no longer, but for an encoder, which evaluates several
            texts at once, and each text whole.
        n_batch: most tokens evaluated at a time.
        n_threads: threads of the CPU's kernels.
        footprint: the backend's.
        matrices: the model's weights.
    """
    n_tokens = max(n_batch, n_ctx) if config.is_encoder else min(n_batch, n_ctx)
    widths = [q_width(layer) for layer in config.kinds] + [layer.n_ff for layer in config.kinds]
    widest = max(config.n_embd, *widths)
    width = max(activation_width(config.n_embd, layer) for layer in config.kinds)
    width = _with_streams(config, width)
    activations = n_tokens * (FLOAT * width + INDEX_BYTES)
    products = footprint.product_bytes(
        matrices, n_tokens=n_tokens, widest=widest, n_threads=n_threads
    )
    attention = max(
        (
            footprint.attention_bytes(sizes, n_ctx=n_ctx, n_tokens=n_tokens, n_threads=n_threads)
            for sizes in filter(None, {_head_sizes(layer.mixer) for layer in config.kinds})
        ),
        default=0,
    )
    if config.is_encoder:
        attention = max(encoder_bytes(layer.mixer, n_tokens) for layer in config.kinds)
    return int(ALLOCATOR * (activations + products)) + attention + VOCABULARY_BYTES * config.n_vocab


def encoder_bytes(mixer: Mixer | None, n_tokens: int) -> int:
    """Bytes of attention to both sides, where `kernels/attention_mixers.py` computes it: logits,
    what becomes of them, a mask; and K and V by head of q."""
    if not isinstance(mixer, EncoderAttentionSpec):
        return 0
    attn = mixer.attention
    by_head = n_tokens * attn.n_heads * (attn.key_dim + attn.value_dim)
    return FLOAT * (4 * max(MOST_LOGITS, attn.n_heads * n_tokens) + 2 * by_head)


def repack_bytes(layouts: Iterable[GroupLayout]) -> int:
    """Bytes that pages of a cache with a budget take at most while they change their types, one
    layer after the other."""
    return sum(
        REPACK_BYTES * PAGE_TOKENS * group.n_kv_heads * (group.key_dim + group.value_dim)
        for group in (layout.group for layout in layouts if layout.budget is not None)
    )


def _with_streams(config: ModelSpec, width: int) -> int:
    """Values per token: `width`, which counts one layer's, and what is kept in addition to x."""
    n_embd = config.n_embd
    if config.per_layer_input is not None:
        rows = config.n_layers * config.per_layer_input.width
        # a row for each layer is kept; before, it is decoded, projected, normed and added
        width = max(rows + width, n_embd + 4 * rows)
    if config.altup is not None:
        # what was, what is predicted or corrected, and one more in between; Laurel's two rows
        width += (3 * config.altup.n_streams + 2) * n_embd
    return width


def _head_sizes(mixer: Mixer | None) -> HeadSizes | None:
    """Heads as attention's kernels see them; None without attention."""
    match mixer:
        case EncoderAttentionSpec(attention=attn):
            return HeadSizes(attn.n_heads, attn.n_kv_heads, max(attn.key_dim, attn.value_dim))
        case AttentionSpec():
            width = max(mixer.key_dim, mixer.value_dim)
            return HeadSizes(mixer.n_heads, mixer.n_kv_heads, width)
        case LatentAttentionSpec():
            width = mixer.latent_dim + mixer.rope_dim
            return HeadSizes(mixer.n_heads, 1, width, mixer.rope_dim)
    return None


def q_width(layer: LayerSpec) -> int:
    """Values per token of q, with its gate, or of attention's output. For a recurrent mixer, the
    values that its first product gives."""
    match layer.mixer:
        case DeltaNetSpec() as mixer:
            n_decays = mixer.width + 2 * mixer.low_rank if mixer.fades_by_channel else 0
            return 2 * (mixer.n_key_heads + mixer.n_value_heads) * mixer.head_dim + n_decays
        case ShortConvSpec() as mixer:
            return 3 * mixer.width
        case Mamba2Spec() as mixer:
            return 2 * mixer.width + 2 * mixer.n_groups * mixer.state_dim + mixer.n_heads
    sizes = _head_sizes(layer.mixer)
    if sizes is None:
        return 0
    gated = isinstance(layer.mixer, AttentionSpec) and layer.mixer.gated
    return sizes.n_heads * sizes.head_dim * (2 if gated else 1)


def _expert_width(n_embd: int, layer: LayerSpec, moe: MoeSpec) -> int:
    """Values per token where experts are steps of a chain, whose memory is one piece.

    Each expert of a token has its input and its output, gate and up, and what of these is packed
    for products, with sums. What is packed takes as many bytes as float32 at most.
    """
    n_dense = moe.n_ff_shared + (layer.mlp.n_ff if layer.mlp is not None else 0)
    by_pair = (1 + PACKED) * n_embd + (2 + PACKED) * moe.n_ff
    # x, its norms, the router's logits, what dense blocks give, and the sum
    by_token = 8 * n_embd + 2 * moe.n_experts + (2 + PACKED) * n_dense + 4 * moe.latent_dim
    return int((moe.n_experts_used * by_pair + by_token) / ALLOCATOR) + 2 * q_width(layer)


def activation_width(n_embd: int, layer: LayerSpec) -> int:
    """Values per token that activations of a layer hold at their peak."""
    if layer.beside is not None:  # the first one's output is kept
        second = replace(layer, mixer=layer.beside, beside=None)
        first = replace(layer, beside=None)
        widths = (activation_width(n_embd, one) for one in (first, second))
        return max(widths) + q_width(first)
    x, q = n_embd, q_width(layer)
    sizes = _head_sizes(layer.mixer)
    kv = sizes.n_kv_heads * sizes.head_dim if sizes else 0
    rope = sizes.head_dim if sizes else 0
    # x and its norm, q; k and v, both rotated, and the scratch of encoding one of them
    store = 2 * x + q + 4 * kv + 8 * kv
    # x and its norm, q before, while and after it is turned, k and v
    turn = 2 * x + 4 * q + 2 * kv
    # x; q, and either q rotated or the output, while a Hadamard transform holds three of its kind
    attend = x + 6 * q
    # x, q and the output of attention are kept; the norm, gate, up, their product, down, the sum
    feed_forward = 2 * x + 2 * q + 4 * layer.n_ff + 2 * x
    if layer.moe is not None:
        feed_forward += 3 * x  # the experts' sum, the rows of one expert, its weighted output
        feed_forward = max(feed_forward, _expert_width(n_embd, layer, layer.moe))
    if layer.parallel or layer.post_attn_norm is not None or layer.post_ffn_norm is not None:
        feed_forward += 2 * x  # the layer's input, what a block adds before its norm
    return rope + max(store, turn, attend, feed_forward)
