"""What a backend is: one frozen table of functions, at the grain at which kernels fuse.

The forward pass calls nothing else. A backend that does not fuse composes its functions from
primitives (`compose`). One that does replaces entries of the table, and falls back on the composed
ones where a kernel is missing: `methods` says where, and what that costs. A backend answers for
tensors as it has prepared them and for types of the cache, so that statements about a model follow
from the code that runs.

A model that drafts is so small that what Python does for each of its tokens takes longer than the
token itself. So a backend may guess several tokens at once, until one is not likely enough to be
right.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from localkv.arch.spec import Ffn, LayerSpec, Mixer, ModelSpec
from localkv.cache.arrays import Array, Arrays, Batch, Draw, LayerCache
from localkv.config import CacheConfig
from localkv.kernels.device_memory import DeviceMemory
from localkv.kernels.kept_sums import Kept, KeptSums, Logits, kept_sums
from localkv.kernels.layer_weights import LayerWeights, Linear, MoeWeights, Norm, tensors_of
from localkv.kernels.namespace import namespace
from localkv.kernels.rope import RopeTable, TokenRotations
from localkv.quant_formats import KV_FORMATS
from localkv.quant_formats.base import QuantFormat
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.sampling.params import SamplingParams
from localkv.system.turns import Turns


@dataclass(frozen=True)
class Method:
    """How an operation is carried out, in words: "packed panels, 8-bit activations"."""

    words: str


@dataclass(frozen=True)
class Methods:
    """How one backend carries out its operations.

    Attributes:
        attention: of all cache types.
        tiles: (cache type, "K" or "V") -> the form in which attention multiplies its rows.
        store: cache type -> how new rows are packed.
        product: a prepared matrix, or a stack of them -> how it is multiplied.
        experts: prepared weights of routed experts -> how they are run.
        others: operations that depend on no type.
    """

    attention: Method
    tiles: Callable[[QuantFormat, str], Method]
    store: Callable[[QuantFormat], Method]
    product: Callable[[PackedTensor], Method]
    experts: Callable[[MoeWeights], Method]
    others: Mapping[str, Method] = field(default_factory=dict)
    encoder_attention: Method | None = None


class Use(NamedTuple):
    """The operations of a model on a backend; `of` is a type, or empty."""

    operation: str
    of: str
    method: Method


def uses(
    methods: Methods,
    layers: Sequence[LayerWeights],
    output: Linear | None,
    pairs: Sequence[tuple[str, str]],
) -> list[Use]:
    """All that runs for a model's prepared weights and a cache with these pairs of types, each
    once. An encoder has no output matrix and no pairs."""
    cache = [(name, side) for pair in pairs for name, side in zip(pair, "KV", strict=True)]
    found = [Use(operation, "", method) for operation, method in methods.others.items()]
    attention = methods.attention if pairs else methods.encoder_attention
    if attention is not None:
        found.append(Use("attention", "", attention))
    found += [Use(f"tiles of {side}", "", methods.tiles(KV_FORMATS[t], side)) for t, side in cache]
    found += [Use("storing", name, methods.store(KV_FORMATS[name])) for name, _ in cache]
    matrices = (part for part in tensors_of((*layers, output)) if isinstance(part, PackedTensor))
    found += [Use("products", matrix.format.name, methods.product(matrix)) for matrix in matrices]
    routed = (layer.moe for layer in layers if layer.moe is not None)
    found += [Use("experts", "", methods.experts(moe)) for moe in routed]
    return list(dict.fromkeys(found))


def in_words(found: Sequence[Use]) -> dict[str, str]:
    """Each operation in a few words, as "q4_K, q6_K: packed panels; f32: rows" where types differ.

    Types of one method stand together.
    """
    operations = dict[str, dict[str, list[str]]]()
    for operation, of, method in found:
        operations.setdefault(operation, {}).setdefault(method.words, []).append(of)
    return {
        operation: "; ".join(
            f"{', '.join(types)}: {words}" if any(types) else words
            for words, types in methods.items()
        )
        for operation, methods in operations.items()
    }


@dataclass(frozen=True)
class TokenInputs:
    """What attention needs to know of a batch's tokens in one layer.

    Attributes:
        rope: rotations of q and k, or None in a layer without RoPE.
        q_scale: [tokens] factor on q that grows with the position, or None.
        rope_at: positions, int64 [n] -> rotations there, for who reads K before RoPE; or None.
    """

    rope: RopeTable | None
    q_scale: Array | None
    rope_at: Callable[[Array], RopeTable] | None = None


def as_in_file(weight: PackedTensor) -> PackedTensor:
    """What backends that read the file's own layout prepare."""
    return weight


OnKernel = Callable[[int, int], None]
"""(kernels that are compiled, all that had to be)"""


def nothing_ahead(
    embedding_type: str,
    matrix_types: Iterable[str],
    config: ModelSpec,
    cache: CacheConfig,
    on_kernel: OnKernel,
) -> AbstractContextManager[bool]:
    """What backends do that compile everything when it is first used."""
    return nullcontext(False)


def drawn_by_host(params: SamplingParams) -> Draw | None:
    """What backends do whose logits are on the host."""
    return None


def lacks_nothing(layer: LayerSpec) -> str:
    """What backends do that run every layer whose kinds they have."""
    return ""


Tell = Callable[[object, Array, int | None], None]
"""(a weight, rows float [n, n_in], the matrix of a stack): before a matrix, a stack of them or the
vector of a gate is multiplied with rows, it is given. After a norm its rows are, with the norm. A
stack is given one matrix at a time, by its number; else it is None."""

Mix = Callable[[Array, LayerWeights, LayerSpec, TokenInputs, LayerCache, Batch], Array]
FeedForward = Callable[[Array, Array, LayerWeights, LayerSpec], Array]


@dataclass(frozen=True)
class StackLayer:
    """A layer of a model, and where it finds what differs from batch to batch.

    Attributes:
        parts: each of its mixers, with a layer that has only this one.
        positions: which of a batch's inputs it takes.
        rows: the layer whose rows of K and V it reads.
    """

    spec: LayerSpec
    weights: LayerWeights
    parts: tuple[tuple[type[Mixer], LayerSpec, LayerWeights], ...]
    positions: int
    rows: int


class Head(NamedTuple):
    """What makes logits of what comes out of the last layer."""

    norm: Norm
    output: Linear
    spec: ModelSpec


@dataclass(frozen=True)
class TokenBatch:
    """What layers are given with x.

    Attributes:
        inputs: by `StackLayer.positions`.
        caches: of each layer.
        embedded: [n_layers, tokens, P], what layers read of tokens' own embeddings, or None.
        head: what follows the layers, if logits are wanted (`run_layers`).
    """

    inputs: Sequence[TokenInputs]
    caches: Sequence[LayerCache]
    batch: Batch
    embedded: Array | None
    head: Head | None = None


RunLayers = Callable[[Array, tuple[StackLayer, ...], TokenBatch], Array | None]
"""(x [tokens, n_embd], layers, what they are given) -> x after all layers, the same as they give
one by one. If there is a head, it is what `logits` makes of that. None where the batch is not of a
kind that is run so."""


class MovedBatch(NamedTuple):
    """Generated tokens that differ from a batch before in their ids and positions only:
    the rows of each sequence go to the same page.

    Attributes:
        token_ids: of all sequences, one after the other, as many of each as before.
        positions: of each token; a sequence's follow one another.
        token_embd, scale: as `Backend.embed` takes them.
        rotations: by `StackLayer.positions`.
        before: the batch of those other tokens, with the logits of all of them.
        embedded: `TokenBatch.embedded` of x [tokens, n_embd], or None.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    token_embd: PackedTensor
    scale: float
    rotations: Sequence[TokenRotations | None]
    before: Batch
    embedded: Callable[[Array], Array] | None = None


RunNext = Callable[[tuple[StackLayer, ...], MovedBatch], Array | None]
"""(layers, tokens) -> their logits [tokens, n_vocab], the same bits as a batch gives. None unless
`before` is the last one of as many tokens that `run_layers` ran with these layers, and what that
left will do."""


def run_nothing_next(layers: tuple[StackLayer, ...], moved: MovedBatch) -> Array | None:
    """What backends do that keep nothing from batch to batch."""
    return None


def run_one_by_one(x: Array, layers: tuple[StackLayer, ...], given: TokenBatch) -> Array | None:
    """What backends do that have operations of layers only."""
    return None


def nothing_behind() -> Array:
    """What backends do that run no layers at once, whose hidden states nobody asks for.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError


class Guessing(NamedTuple):
    """When tokens are no longer guessed.

    Attributes:
        most: how many are guessed at most.
        n_vocab: only the first tokens of the vocabulary are.
        p_min: none that is less probable.
        bounds: ascending probabilities, between levels.
        chances: by levels, one more than bounds: how likely a guess so probable is right.
        least: by the number of guesses so far, from 1 on, up to `most`: how likely all of them
            must be right for another one to be looked for.
    """

    most: int
    n_vocab: int
    p_min: float
    bounds: Sequence[float]
    chances: Sequence[float]
    least: Sequence[float]

    def goes_on(self, likely: float, number: int) -> bool:
        """Whether another guess follows `number` of them, all right by this chance."""
        return number < self.most and likely > self.least[number - 1]

    def chance(self, probability: float) -> float:
        """How likely a guess that the model gives this probability is right."""
        return self.chances[bisect_right(self.bounds, probability)]


class Guessed(NamedTuple):
    """What was guessed.

    Attributes:
        tokens: one after the other.
        probabilities: that the model gave them.
        n_evaluated: the given tokens, and the guessed ones after which another one was looked for.
        seconds: that each of those took.
    """

    tokens: list[int]
    probabilities: list[float]
    n_evaluated: int
    seconds: float


RunGuesses = Callable[
    ["tuple[StackLayer, ...]", "MovedBatch", Sequence[int], Guessing], Guessed | None
]
"""(layers, the first of some tokens as `RunNext` takes it, those that follow it, when it ends) ->
the tokens that follow all of these; their rows go to the same page. None, with nothing stored,
where `RunNext` gives None. None, too, where a token takes more than chains that are run again as
they are. There may also be fewer tokens than `guessing` says."""


def run_no_guesses(
    layers: tuple[StackLayer, ...], moved: MovedBatch, more: Sequence[int], guessing: Guessing
) -> Guessed | None:
    """What backends do that run tokens one by one."""
    return None


class LatePreparation(Protocol):
    """Weights that can be used before they are laid out, which then happens step by step."""

    def prepare(self, weight: PackedTensor, release: Callable[[], None]) -> PackedTensor:
        """See `Backend.prepare`; `release` is called when the file's rows are not read any more."""
        ...

    def begin(self) -> None:
        """The next evaluation is the first one after loading: the ones after it lay out some."""
        ...

    def finish(self) -> None:
        """Lay out all that is left."""
        ...


@dataclass(frozen=True)
class Backend:
    """The operations of the forward pass; x is [tokens, n_embd] throughout, in the type
    of activations (`Arrays.floating`).

    Attributes:
        name: as `--device` and the start summary show it.
        arrays: what the cache and the engine make arrays with; activations are of their kind.
        embed: (token_ids, token_embd, scale) -> x, rows of the embedding times a factor.
        mixers: of each kind of mixer that it has, (x, layer, spec, inputs, cache, batch) ->
            [tokens, width], the mixer's output before its output matrix. K and V of the tokens are
            in their pages afterwards, rotated where their segment says so, and states are those
            after them.
        out_residual: (x, mixed, layer, spec) -> x + what the layer's mixer adds, from its output.
        ffns: of each kind of feed-forward block, (x, layer_input, layer, spec) -> x + what the
            block makes of x, or of the layer's input where the layer is parallel.
        logits: (x, output_norm, output, spec of the model) -> float32 [tokens, n_vocab].
        norm: (x [..., n], a norm of n values) -> x normed.
        linear: (x [tokens, n_in], matrix and bias) -> [tokens, n_out].
        add_layer_input: (x, row, layer, spec) -> x + what the layer makes of its embeddings of the
            tokens, [tokens, P] (`streams.py`).
        run_layers: all layers at once, for the batches for which it has that.
        run_next: layers and logits of generated tokens that differ little from the batch before.
        run_guesses: the most probable tokens that follow such ones, at once.
        behind_layers: [tokens, n_embd] after the last layer, where `run_layers` or `run_next` made
            logits of it; valid until one of them runs again.
        prepare: a matrix or a stack of them, as a view of the file -> as the products want it.
        late: the same for weights that may be laid out after loading; None if none are.
        prepare_embedding: the same for `embed`; if its result no longer reads the file's rows, a
            model whose output matrix is its embedding shares it.
        hardware: the GPU, for the start summary; empty on a CPU.
        memory: the GPU's; None where arrays are in the machine's.
        methods: how operations are carried out, for the start summary and for what is slow.
        head_dim_multiple: what the size of a head must be a multiple of.
        compiles: kernels are compiled when they are first used, so a model is warmed up at load.
        compiling_ahead: (weight types of the embedding and of matrices, model, cache, what is told
            how many kernels are compiled and how many had to be) -> a context to load the model and
            to warm it up in: meanwhile other cores compile what this will need, and then what comes
            after it. It says whether all of it is linked already, so that nothing is to warm up.
        compile_together: runs a function that launches kernels, and compiles these at the same time
            instead of running them; None if kernels are not compiled so.
        records: launches read all that changes from the device's memory, so that a token's launches
            can be recorded and repeated.
        draw: how tokens are drawn where the logits are, or None if the host must; of backends that
            record.
        lacks: (layer) -> what of a layer whose kinds it has it can't do, in words, or nothing.
        kept_sums: what an audit asks of logits that are on the host (`kernels/kept_sums.py`).
        turns: one thread at a time runs the operations: they share scratch memory and more.
        watched: the same operations without fusion, which tell a function of all that products are
            given; None where there are none. They round as the backend's own.
    """

    name: str
    arrays: Arrays
    embed: Callable[[Array, PackedTensor, float], Array]
    mixers: Mapping[type[Mixer], Mix]
    out_residual: Callable[[Array, Array, LayerWeights, LayerSpec], Array]
    ffns: Mapping[type[Ffn], FeedForward]
    logits: Callable[[Array, Norm, Linear, ModelSpec], Array]
    norm: Callable[[Array, Norm], Array]
    linear: Callable[[Array, Linear], Array]
    add_layer_input: Callable[[Array, Array, LayerWeights, LayerSpec], Array]
    prepare: Callable[[PackedTensor], PackedTensor]
    methods: Methods
    run_layers: RunLayers = run_one_by_one
    run_next: RunNext = run_nothing_next
    run_guesses: RunGuesses = run_no_guesses
    behind_layers: Callable[[], Array] = nothing_behind
    late: LatePreparation | None = None
    prepare_embedding: Callable[[PackedTensor], PackedTensor] = as_in_file
    hardware: str = ""
    memory: DeviceMemory | None = None
    head_dim_multiple: int = 1
    compiles: bool = False
    compiling_ahead: Callable[
        [str, Iterable[str], ModelSpec, CacheConfig, OnKernel], AbstractContextManager[bool]
    ] = nothing_ahead
    compile_together: Callable[[Callable[[], None]], None] | None = None
    records: bool = False
    draw: Callable[[SamplingParams], Draw | None] = drawn_by_host
    lacks: Callable[[LayerSpec], str] = lacks_nothing
    kept_sums: Callable[[Logits, Kept], KeptSums] = kept_sums
    turns: Turns = field(default_factory=Turns)
    watched: Callable[[Tell], Backend] | None = None

    @property
    def processor(self) -> str:
        """ "CPU" or "GPU"."""
        return "CPU" if self.memory is None else "GPU"


def scaled(x: Array, factor: float) -> Array:
    """x times a number, and x itself for 1."""
    return x if factor == 1.0 else x * factor


def capped_logits(logits: Array, spec: ModelSpec) -> Array:
    """Logits as the model scales and caps them."""
    logits = scaled(logits, spec.logit_scale)
    cap = spec.logit_softcap
    return cap * namespace(logits).tanh(logits / cap) if cap else logits
