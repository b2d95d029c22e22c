"""The forward pass: the only one, for every architecture and every backend.

Knows nothing of files, tokens' texts or sampling. Differences between architectures are data
(`ModelSpec`, optional weights); differences between machines are the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import AttentionSpec, LayerSpec, Mixer, ModelSpec
from localkv.cache.arrays import Array, Arrays, Batch, Draw, LayerCache
from localkv.cache.kv_cache import KVCache
from localkv.kernels.activation import activated
from localkv.kernels.backend import (
    Backend,
    Guessed,
    Guessing,
    Head,
    Method,
    MovedBatch,
    StackLayer,
    TokenBatch,
    Use,
    run_no_guesses,
    run_nothing_next,
    uses,
)
from localkv.kernels.layer_positions import LayerPositions
from localkv.kernels.layer_weights import (
    AltUpProjections,
    LayerWeights,
    Linear,
    Norm,
    PerLayerTable,
)
from localkv.kernels.low_rank import TokenScales
from localkv.kernels.namespace import namespace
from localkv.kernels.places import Places, batch_at, moved
from localkv.kernels.streams import (
    AltUpStreams,
    OneStream,
    Streams,
    layer_inputs,
    looked_up,
    with_laurel,
)
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.sampling.params import SamplingParams

NO_ROWS = LayerCache(())
"""The cache of a layer that stores nothing. Backends make their chains for this very object."""
PER_LAYER_ROWS = Method("rows of the file, decoded in NumPy; the host draws tokens")
"""How per-layer embeddings are read. The host must know each token, so it draws them all."""


@dataclass(frozen=True)
class PredictionWeights:
    """The block that predicts a further token (`PredictionSpec`).

    Attributes:
        eh_proj: [n_embd, 2 n_embd], of e before h.
        embedding_norm, hidden_norm: of e and of h.
        model: the block as a model of one layer; what it shares with the model is the same object.
    """

    eh_proj: Linear
    embedding_norm: Norm
    hidden_norm: Norm
    model: ModelWeights


@dataclass(frozen=True)
class ModelWeights:
    """All weights. Norms are float32; matrices stay packed; a tied `output` is `token_embd`.

    `rope_divisors`, by the tensors' names, are on the host, since frequencies are made once.
    `per_layer` and `altup` are None but where layers have per-layer inputs, and several streams.
    `prediction` is None unless it was asked for. `position_embd`, `token_type` [n_embd] and
    `embedding_norm` are None in models whose embedding has rows of tokens only. An encoder has no
    output matrix; nothing reads its `output`. `classifier` is None in models that score nothing.
    `names` has, by the `id` of a matrix or a stack of them, the names of the file's tensors whose
    rows it has.
    """

    token_embd: PackedTensor
    layers: tuple[LayerWeights, ...]
    output_norm: Norm
    output: Linear
    rope_divisors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    per_layer: PerLayerTable | None = None
    altup: AltUpProjections | None = None
    prediction: PredictionWeights | None = None
    position_embd: PackedTensor | None = None
    token_type: Array | None = None
    embedding_norm: Norm | None = None
    classifier: ClassifierWeights | None = None
    dense: tuple[Linear, ...] = ()
    names: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ClassifierWeights:
    """The head that scores texts; see `ClassifierSpec`. What the file has not is None."""

    cls: Linear | None
    norm: Norm | None
    output: Linear | None


@dataclass(frozen=True)
class Run:
    """Layers, one after the other, that one place runs.

    Attributes:
        backend: the place's.
        positions: what tokens' positions do there.
        first: the first layer.
        stack: they.
        block: where the feed-forward block of the only layer is, if it is apart.
    """

    backend: Backend
    positions: LayerPositions
    first: int
    stack: tuple[StackLayer, ...]
    block: Backend | None = None


class Transformer:
    """A model in its places.

    Args:
        places: where its weights are; a backend is one place for all.

    Attributes:
        backend: what makes the logits, and what the engine asks of it (`Places.whole`).
        adapted: the same with adapters, which runs batches that have scales of some; or None.
        adapters: what tells its adapters from others, by their numbers.
        scales: of these, of texts that ask for none.
    """

    def __init__(self, config: ModelSpec, weights: ModelWeights, places: Backend | Places) -> None:
        if isinstance(places, Backend):
            places = Places.one(places, config.n_layers)
        self.config = config
        self.weights = weights
        self.places = places
        self.backend = places.whole
        self.adapted: AdaptedTransformer | None = None
        self.adapters: tuple[str, ...] = ()
        self.scales: tuple[float, ...] = ()
        positions = {
            id(one): LayerPositions(config.layers, weights.rope_divisors, one.arrays)
            for one in places.used
        }
        kind_of = next(iter(positions.values())).kind_of
        self._stack = tuple(
            StackLayer(spec, layer, _mixers_of(spec, layer), kind_of[i], _rows_of(i, spec.mixer))
            for i, (spec, layer) in enumerate(zip(config.layers, weights.layers, strict=True))
        )
        self._runs = tuple(
            Run(
                places.of_layer(first),
                positions[id(places.of_layer(first))],
                first,
                self._stack[first:end],
                None if weights.layers[first].apart is None else places.of_block(first),
            )
            for first, end in self._ends_of_runs()
        )
        if places.is_one:  # slices of all are the same tuple, which backends know
            assert self._runs[0].stack is self._stack
        self._positions = positions[id(places.output)] if places.is_one else None

    def _ends_of_runs(self) -> Iterator[tuple[int, int]]:
        """The first layer of each run, and the one after its last. A layer whose feed-forward block
        is apart is a run of its own."""
        first = 0
        apart = [layer.apart is not None for layer in self.weights.layers]
        places = self.places.placement.layers
        for i in range(1, len(apart) + 1):
            if (
                i == len(apart)
                or apart[first]
                or apart[i]
                or self.places.backends[places[i]] is not self.places.backends[places[first]]
            ):
                yield first, i
                first = i

    def _for(self, batch: Batch) -> Transformer:
        """What runs a batch."""
        return self if batch.scales is None or self.adapted is None else self.adapted

    def _begin(self, batch: Batch) -> None:
        """Take note of a batch before its tokens are embedded."""

    def _keep(self, rows: Array) -> None:
        """Only these rows of the batch go on: their indices, in ascending order."""

    def first_layers(self, n: int) -> Transformer:
        """The model with its first `n` layers only; its caches may have more."""
        weights = replace(self.weights, layers=self.weights.layers[:n])
        config = replace(self.config, layers=self.config.layers[:n])
        return Transformer(config, weights, self.places.first(n))

    def one_of_each_layer(self, cache: KVCache | None = None) -> Transformer:
        """The first layers, until each kind was among them and one more is the last.

        Layers are of a kind if their specifications are equal, the types and shapes of weights, and
        the types of their rows in the cache, if there is one.
        """
        caches = [NO_ROWS] * len(self._stack) if cache is None else self._caches(cache)
        kinds = [
            (layer.spec, _kind(layer.weights), caches[layer.rows].types) for layer in self._stack
        ]
        n = 1 + max(map(kinds.index, kinds))
        return self.first_layers(min(n + 1, len(kinds)))

    def uses(self, pairs: Sequence[tuple[str, str]]) -> list[Use]:
        """What the backend does for this model and a cache, and how; `pairs` are types of K and V
        that its layers have."""
        weights, places, found = self.weights, self.places, list[Use]()
        for one in places.used:
            parts = [
                replace(layer, apart=None)
                for i, layer in enumerate(weights.layers)
                if places.of_layer(i) is one
            ]
            parts += [
                layer.apart
                for i, layer in enumerate(weights.layers)
                if layer.apart is not None and places.of_block(i) is one
            ]
            is_output = places.output is one and not self.config.is_encoder
            found += uses(one.methods, parts, weights.output if is_output else None, pairs)
        found = list(dict.fromkeys(found))
        if weights.per_layer is not None:
            name = weights.per_layer.token_embd.format.name
            found.append(Use("per-layer embeddings", name, PER_LAYER_ROWS))
        return found

    def forward(self, batch: Batch, cache: KVCache, rows: Array | None = None) -> Array:
        """Run a batch: its K and V are stored in `cache`, whose sequences keep their lengths.

        Args:
            rows: what `rows_of` gave for its tokens, if that was called before.

        Returns:
            float32 [rows, n_vocab], the logits of the tokens `batch.logit_rows`.
        """
        if (own := self._for(batch)) is not self:
            return own.forward(batch, cache, rows)
        head = Head(self.weights.output_norm, self.weights.output, self.config)
        x, is_logits = self._walk(batch, cache, rows, head)
        if is_logits:
            return x
        if not len(batch.logit_rows):
            return self.backend.arrays.zeros(0, self.config.n_vocab)
        return self.backend.logits(x, *head)

    def forward_with_hidden(self, batch: Batch, cache: KVCache) -> tuple[Array, Array]:
        """Run a batch as `forward` does, with the same bits on a CPU.

        Returns:
            the logits; and [tokens, n_embd], the hidden states of all tokens of the batch, normed
            unless the block that predicts reads them as they are.
        """
        if (own := self._for(batch)) is not self:
            return own.forward_with_hidden(batch, cache)
        backend, weights = self.backend, self.weights
        n_tokens, wanted = len(batch.token_ids), batch.logit_rows
        every, head = batch, None
        if len(wanted) == n_tokens:
            head = Head(weights.output_norm, weights.output, self.config)
        else:
            every = replace(batch, logit_rows=cache.arrays.int64(range(n_tokens)))
        x, is_logits = self._walk(every, cache, head=head)
        if is_logits:
            return x, self.last_hidden()
        if not len(wanted):
            logits = backend.arrays.zeros(0, self.config.n_vocab)
        else:
            rows = x
            if every is not batch:
                self._keep(wanted)
                rows = x[backend.arrays.arrived(wanted, cache.arrays)]
            logits = backend.logits(rows, weights.output_norm, weights.output, self.config)
        return logits, self.as_read(x, weights.output_norm)

    def last_hidden(self) -> Array:
        """[tokens, n_embd], the hidden states, as in `forward_with_hidden`, of the batch whose
        logits the backend made at once (`Backend.run_layers`, `Backend.run_next`), if that was the
        last thing it did."""
        return self.as_read(self.backend.behind_layers(), self.weights.output_norm)

    def as_read(self, x: Array, norm: Norm) -> Array:
        """Hidden states as the block that predicts reads them, of x [tokens, n_embd], which may
        be overwritten then; `norm` is the one behind x."""
        own = self.config.prediction
        if own is None or own.reads_normed:
            return self.backend.norm(x, norm)
        return namespace(x).asarray(x, copy=True)

    @property
    def predictor(self) -> Transformer:
        """The block that predicts a further token, as a model of one layer."""
        assert self.weights.prediction is not None
        return Transformer(self.config.predictor, self.weights.prediction.model, self.backend)

    def joined(self, token_ids: Array, hidden: Array) -> Array:
        """The input of the predictor's layer.

        Args:
            token_ids: int64 [tokens].
            hidden: [tokens, n_embd], the hidden states of the token before each.

        Returns:
            [tokens, n_embd].
        """
        own, backend = self.weights.prediction, self.backend
        assert own is not None
        e = backend.embed(token_ids, own.model.token_embd, self.config.embedding_scale)
        both = backend.norm(e, own.embedding_norm), backend.norm(hidden, own.hidden_norm)
        return backend.linear(namespace(e).concatenate(both, -1), own.eh_proj)

    def behind(self, x: Array, batch: Batch, cache: KVCache) -> Array:
        """Run all layers on x [tokens, n_embd] instead of the tokens' embeddings.

        Returns:
            [rows, n_embd], of the tokens `batch.logit_rows` before the last norm. If there are
            none, the last layer only stores what it has to, and the result is of no use.
        """
        return self._through(OneStream(x, self.places.embedding), batch, cache)[0]

    @property
    def can_start_later(self) -> bool:
        """Whether nothing but its input and its own rows goes into a layer (`run_from`)."""
        plain = self.weights.altup is None and self.weights.per_layer is None
        plain = plain and len(self._runs) == 1
        return plain and all(layer.rows == i for i, layer in enumerate(self._stack))

    def run_from(
        self,
        first: int,
        x: Array | None,
        batch: Batch,
        cache: KVCache,
        before_layer: Callable[[int, Array], None] = lambda index, x: None,
    ) -> Array:
        """Run a batch as `forward` does, but from layer `first` on, where `can_start_later`.

        Args:
            first: the layer to begin with.
            x: [tokens, n_embd], the input of that layer. None makes the embedding, for layer 0.
            before_layer: called with the index and the input of each layer.

        Returns:
            float32 [rows, n_vocab], the logits of the tokens `batch.logit_rows`.
        """
        if (own := self._for(batch)) is not self:
            return own.run_from(first, x, batch, cache, before_layer)
        config, backend, weights = self.config, self.backend, self.weights
        (run,) = self._runs
        self._begin(batch)
        if x is None:
            x = self._embedded(batch)
        given = self._given(run, batch, cache)
        streams = OneStream(x, backend)
        for index in range(first, config.n_layers):
            before_layer(index, streams.x)
            self._run_layer(run, index, streams, given)
        return backend.logits(streams.x, weights.output_norm, weights.output, config)

    def next_logits(
        self, token_ids: Sequence[int], positions: Sequence[int], before: Batch, n_ctx: int
    ) -> Array | None:
        """Run the batch `before` again with other generated tokens, which gives their logits.

        The new tokens have other ids and positions. Their rows go to the same pages.

        Args:
            before: a batch with the logits of all tokens.
            n_ctx: tokens of the cache's context.

        Returns:
            float32 [tokens, n_vocab]. None if the backend keeps nothing from batch to batch or does
            not know `before`, or if the model can't run this way: then `forward` must run them.
        """
        if self.backend.run_next is run_nothing_next:
            return None
        if (own := self._for(before)) is not self:
            return own.next_logits(token_ids, positions, before, n_ctx)
        moved = self._moved(token_ids, positions, before, n_ctx)
        return None if moved is None else self.backend.run_next(self._stack, moved)

    def next_guesses(
        self, token_ids: Sequence[int], position: int, before: Batch, n_ctx: int, guessing: Guessing
    ) -> Guessed | None:
        """Guess the most probable tokens after generated ones, as `Backend.run_guesses` does.

        Args:
            token_ids: the generated tokens, one after the other. Their rows and the rows of the
                guesses go to the page that has the row of `before`.
            position: the position of the first of them.
            before: a batch of one token, with its logits.
            n_ctx: tokens of the cache's context.
            guessing: when to stop.

        Returns:
            the guesses. None if the backend or the model can't run this way.
        """
        if self.backend.run_guesses is run_no_guesses:
            return None
        if (own := self._for(before)) is not self:
            return own.next_guesses(token_ids, position, before, n_ctx, guessing)
        moved = self._moved(token_ids[:1], [position], before, n_ctx)
        if moved is None:
            return None
        return self.backend.run_guesses(self._stack, moved, token_ids[1:], guessing)

    def _moved(
        self, token_ids: Sequence[int], positions: Sequence[int], before: Batch, n_ctx: int
    ) -> MovedBatch | None:
        """What a backend needs to run `before` again with these tokens; None if the model can't."""
        weights = self.weights
        if weights.position_embd is not None or weights.embedding_norm is not None:
            return None
        assert self._positions is not None
        rotations = None if weights.altup else self._positions.rotations(n_ctx)
        if rotations is None:
            return None
        self._begin(before)
        embedding = weights.token_embd, self.config.embedding_scale
        embedded = None
        if weights.per_layer is not None:
            ids = np.array(token_ids, np.int64)
            embedded = partial(self._inputs_of, weights.per_layer, token_ids=ids)
        return MovedBatch(token_ids, positions, *embedding, rotations, before, embedded)

    def hidden(self, batch: Batch, cache: KVCache) -> Array:
        """Run a batch as `forward` does, up to and including the last norm.

        Returns:
            [rows, n_embd], the normed hidden states of the tokens `batch.logit_rows`.
        """
        if (own := self._for(batch)) is not self:
            return own.hidden(batch, cache)
        return self.backend.norm(self._walk(batch, cache)[0], self.weights.output_norm)

    def encode(self, texts: Sequence[Sequence[int]]) -> Array:
        """Run texts through an encoder, each by itself, all in one batch.

        Args:
            texts: tokens of each.

        Returns:
            [tokens of all texts, n_embd], normed hidden states, one text after the other.
        """
        arrays = self.places.batch_arrays
        starts = (0, *accumulate(map(len, texts)))
        positions = [position for text in texts for position in range(len(text))]
        batch = Batch(
            token_ids=arrays.int64([token for text in texts for token in text]),
            positions=arrays.int64(positions),
            starts=starts,
            start_table=arrays.int32(starts),
            segments=(),
            logit_rows=arrays.int64(range(starts[-1])),
            generated=(False,) * len(texts),
            slots=arrays.int64([]),
            after=arrays.int64([]),
        )
        return self.backend.norm(self._walk(batch, None)[0], self.weights.output_norm)

    def projected(self, vectors: Array) -> Array:
        """Pooled vectors [n, n_embd], multiplied with the matrices that follow the pooling."""
        for matrix in self.weights.dense:
            vectors = self.backend.linear(vectors, matrix)
        return vectors

    def scores(self, states: Array) -> Array:
        """Score texts by the hidden states that `ClassifierSpec.pooling` says.

        Args:
            states: [texts, n_embd].

        Returns:
            [texts, classes].
        """
        spec, head, backend = self.config.classifier, self.weights.classifier, self.backend
        assert spec is not None
        assert head is not None
        x, xp = states, namespace(states)
        if head.cls is not None:
            x = backend.linear(x, head.cls)
            x = xp.tanh(x) if spec.activation == "tanh" else activated(x, "gelu")
        if head.norm is not None:
            x = backend.norm(x, head.norm)
        if head.output is not None:
            x = backend.linear(x, head.output)
        if not spec.is_softmax:
            return x
        grown = xp.exp(x - xp.amax(x, axis=-1, keepdims=True))
        return grown / xp.sum(grown, axis=-1, keepdims=True)

    def logit_blocks(self, batch: Batch, cache: KVCache, n_rows: int) -> Iterator[Array]:
        """Run a batch as `forward` does, and yield the logits of at most `n_rows` tokens at a time.

        So the caller need not hold all logits at once. On a CPU they are the bits of `forward`.

        Returns:
            float32 [at most n_rows, n_vocab] each.
        """
        if (own := self._for(batch)) is not self:
            yield from own.logit_blocks(batch, cache, n_rows)
            return
        (x, _), weights = self._walk(batch, cache), self.weights
        for at in range(0, len(x), n_rows):
            self._begin(batch)
            self._keep(batch.logit_rows[at : at + n_rows])
            block = x[at : at + n_rows]
            yield self.backend.logits(block, weights.output_norm, weights.output, self.config)

    def draw(self, params: SamplingParams) -> Draw | None:
        """How the backend draws tokens where the logits are, or None if the host must.

        It must where each token's per-layer embeddings are looked up in its memory.
        """
        return None if self.weights.per_layer else self.backend.draw(params)

    def rows_of(self, token_ids: NDArray[np.int64]) -> Array | None:
        """Per-layer embeddings of tokens, where the backend computes; None if there are none."""
        if self.weights.per_layer is None:
            return None
        arrays = self.places.embedding.arrays
        return arrays.floating(arrays.from_numpy(looked_up(self.weights.per_layer, token_ids)))

    def _walk(
        self,
        batch: Batch,
        cache: KVCache | None,
        rows: Array | None = None,
        head: Head | None = None,
    ) -> tuple[Array, bool]:
        """Run a batch from its tokens to behind the last layer.

        Args:
            cache: None for an encoder's texts.
            rows: as `forward` has them.
            head: what makes logits, if these are wanted.

        Returns:
            [rows, n_embd] of the tokens `batch.logit_rows`, where the output is, and False; or
            their logits, if layers and head were run at once, and True. If no rows are wanted, the
            last layer only stores its K and V, or its state, and the result is of no use.
        """
        self._begin(batch)
        with self._within(self.places.embedding):
            here = self._batch_at(self.places.embedding, batch)
            x = self._embedded(here)
            embedded = self._layer_inputs(x, batch, rows)
            altup = self.weights.altup
            streams: Streams = (
                OneStream(x, self.places.embedding)
                if altup is None
                else AltUpStreams(x, altup, self.places.embedding)
            )
        return self._through(streams, batch, cache, embedded, head)

    def _within(self, backend: Backend) -> AbstractContextManager[Any]:
        """The context for a place's operations; with one place the engine has entered it."""
        return nullcontext() if self.places.is_one else backend.arrays.inference()

    def _batch_at(self, backend: Backend, batch: Batch) -> Batch:
        """A batch where a place reads it."""
        return batch if self.places.is_one else batch_at(batch, backend.arrays)

    def _through(
        self,
        streams: Streams,
        batch: Batch,
        cache: KVCache | None,
        embedded: Array | None = None,
        head: Head | None = None,
    ) -> tuple[Array, bool]:
        """Run all layers; returns what `_walk` does.

        Args:
            embedded: [n_layers, tokens, P] at the embedding's place, or None.
        """
        output, last = self.places.output, self._runs[-1]
        at = dict[int, Batch]()
        for run in self._runs:
            backend, here = run.backend, at.get(id(run.backend))
            with self._within(backend):
                if here is None:
                    here = at[id(backend)] = self._batch_at(backend, batch)
                streams.move(backend)
                if run is not last:
                    here = _with_all_rows(here, backend.arrays)
                behind = head if run is last and backend is output else None
                out = self._run(run, streams, self._given(run, here, cache, embedded, behind))
                if out is not None:
                    return out, True
        with self._within(last.backend):
            x = streams.merged()
        return moved(x, last.backend, output), False

    def _run(self, run: Run, streams: Streams, given: TokenBatch) -> Array | None:
        """Run layers of one place; returns logits if they were made at once."""
        if run.block is None and isinstance(streams, OneStream):
            out = run.backend.run_layers(streams.x, run.stack, given)
            if out is not None:
                streams.x = out
                return None if given.head is None else out
        for index in range(run.first, run.first + len(run.stack)):
            self._run_layer(run, index, streams, given)
        return None

    def _given(
        self,
        run: Run,
        batch: Batch,
        cache: KVCache | None,
        embedded: Array | None = None,
        head: Head | None = None,
    ) -> TokenBatch:
        """What a run's layers are given with x."""
        n_ctx = self.config.n_ctx_train if cache is None else cache.n_ctx
        if embedded is not None:
            if not self.places.is_one:
                embedded = embedded[run.first : run.first + len(run.stack)]
            embedded = moved(embedded, self.places.embedding, run.backend)
        inputs = run.positions.inputs(batch.positions, n_ctx)
        return TokenBatch(inputs, self._caches(cache), batch, embedded, head)

    def _embedded(self, batch: Batch) -> Array:
        """x [tokens, n_embd] before the first layer."""
        backend, weights = self.places.embedding, self.weights
        x = backend.embed(batch.token_ids, weights.token_embd, self.config.embedding_scale)
        if weights.token_type is not None:
            x = x + weights.token_type
        if weights.position_embd is not None:
            x = x + backend.embed(batch.positions, weights.position_embd, 1.0)
        return x if weights.embedding_norm is None else backend.norm(x, weights.embedding_norm)

    def _caches(self, cache: KVCache | None) -> Sequence[LayerCache]:
        """The cache of each layer, with `NO_ROWS` after the last layer that stores something."""
        if cache is None:
            return [NO_ROWS] * len(self._stack)
        n_behind = len(self._stack) - len(cache.layers)
        return cache.layers if n_behind <= 0 else [*cache.layers, *[NO_ROWS] * n_behind]

    def _run_layer(self, run: Run, index: int, streams: Streams, given: TokenBatch) -> None:
        """Run a layer. Behind the last one streams hold the rows `batch.logit_rows` only."""
        layer, backend, batch = self._stack[index], run.backend, given.batch
        spec, weights = layer.spec, layer.weights
        row = None if given.embedded is None else given.embedded[index - run.first]
        source = x = streams.enter(weights)
        inputs, rows = given.inputs[layer.positions], given.caches[layer.rows]
        mixed = [
            backend.mixers[kind](x, part, part_spec, inputs, rows, batch)
            for kind, part_spec, part in layer.parts
        ]
        if index == self.config.n_layers - 1:  # after its mixer, only the wanted rows go on
            if not len(batch.logit_rows):
                return
            if len(batch.logit_rows) < len(batch.token_ids):
                self._keep(batch.logit_rows)
                streams.keep(batch.logit_rows)
                source, mixed = source[batch.logit_rows], [y[batch.logit_rows] for y in mixed]
                row = None if row is None else row[batch.logit_rows]
        x = source
        for y, (_, part_spec, part) in zip(mixed, layer.parts, strict=True):
            x = backend.out_residual(x, y, part, part_spec)
        if spec.laurel is not None:
            x = with_laurel(backend, x, source, weights)
        if weights.attn_sum_norm is not None:
            x = backend.norm(x, weights.attn_sum_norm)
        if weights.attn_norm_2 is not None:
            x = backend.norm(x + source, weights.attn_norm_2)
        if run.block is not None and weights.apart is not None:
            x = self._fed_apart(run.block, backend, x, source, weights.apart, spec)
        elif spec.ffn is not None:
            x = backend.ffns[type(spec.ffn)](x, source, weights, spec)
        if weights.ffn_sum_norm is not None:
            x = backend.norm(x, weights.ffn_sum_norm)
        streams.leave(x, weights, spec, row)

    def _fed_apart(
        self,
        block: Backend,
        layer: Backend,
        x: Array,
        source: Array,
        weights: LayerWeights,
        spec: LayerSpec,
    ) -> Array:
        """x after a feed-forward block at another place than its layer; back at the layer's.

        Args:
            source: the layer's input, which blocks side by side with the mixer read.
        """
        assert spec.ffn is not None
        with block.arrays.inference():
            x = moved(x, layer, block)
            source = moved(source, layer, block) if spec.parallel else x
            x = block.ffns[type(spec.ffn)](x, source, weights, spec)
        return moved(x, block, layer)

    def _layer_inputs(self, x: Array, batch: Batch, rows: Array | None) -> Array | None:
        """[n_layers, tokens, P] of the embedding x, or None."""
        table, backend = self.weights.per_layer, self.places.embedding
        if table is None:
            return None
        if rows is None:
            return self._inputs_of(table, x, self.places.batch_arrays.to_numpy(batch.token_ids))
        return layer_inputs(x, rows, table, backend.linear, backend.norm)

    def _inputs_of(self, table: PerLayerTable, x: Array, token_ids: NDArray[np.int64]) -> Array:
        """Look up the rows of tokens, and make [n_layers, tokens, P] of them and x."""
        rows, backend = self.rows_of(token_ids), self.places.embedding
        return layer_inputs(x, rows, table, backend.linear, backend.norm)


def _with_all_rows(batch: Batch, arrays: Arrays) -> Batch:
    """A batch whose tokens all go on to the next layers."""
    if len(batch.logit_rows) == len(batch.token_ids):
        return batch
    return replace(batch, logit_rows=arrays.int64(range(len(batch.token_ids))))


@dataclass(frozen=True)
class EmbeddingAdapter:
    """What an adapter adds to rows of the embedding: its scale times factor * b a[token].

    Attributes:
        adapter: its number, a column of the scales.
        a: float32 [n_vocab, rank].
        b: float32 [n_embd, rank].
    """

    adapter: int
    a: NDArray[np.float32]
    b: NDArray[np.float32]
    factor: float

    def add(
        self, x: NDArray[np.float32], ids: NDArray[np.int64], scales: NDArray[np.float32]
    ) -> None:
        """Add to x [tokens, n_embd], for scales [tokens, adapters]; a token's bits are its own."""
        for row, token, scale in zip(x, ids, scales[:, self.adapter], strict=True):
            if scale:
                row += np.float32(scale * self.factor) * (self.b @ self.a[token])


class AdaptedTransformer(Transformer):
    """A model with adapters, for batches that have scales of some.

    Args:
        weights: whose products have adapters.
        scales: what those read.
        embedding: adapters of the embedding.
    """

    def __init__(
        self,
        config: ModelSpec,
        weights: ModelWeights,
        backend: Backend,
        scales: TokenScales,
        embedding: tuple[EmbeddingAdapter, ...],
    ) -> None:
        super().__init__(config, weights, backend)
        self._scales, self._embedding = scales, embedding

    def _begin(self, batch: Batch) -> None:
        assert batch.scales is not None
        self._scales.put(batch.scales)

    def _keep(self, rows: Array) -> None:
        self._scales.keep(self.backend.arrays.to_numpy(rows))

    def _embedded(self, batch: Batch) -> Array:
        x = super()._embedded(batch)
        if not self._embedding:
            return x
        arrays, scale = self.backend.arrays, self.config.embedding_scale
        assert batch.scales is not None
        ids, more = arrays.to_numpy(batch.token_ids), np.zeros(tuple(x.shape), np.float32)
        for adapter in self._embedding:
            adapter.add(more, ids, batch.scales)
        return x + arrays.floating(arrays.from_numpy(more * np.float32(scale)))

    def _moved(
        self, token_ids: Sequence[int], positions: Sequence[int], before: Batch, n_ctx: int
    ) -> MovedBatch | None:
        if self._embedding:  # the backend embeds tokens of a batch that is run again
            return None
        return super()._moved(token_ids, positions, before, n_ctx)


def _mixers_of(
    spec: LayerSpec, layer: LayerWeights
) -> tuple[tuple[type[Mixer], LayerSpec, LayerWeights], ...]:
    """Each of a layer's mixers, with a layer that has only this one."""
    if spec.mixer is None:
        return ()
    first = type(spec.mixer), spec, layer
    if spec.beside is None:
        return (first,)
    alone = replace(spec, mixer=spec.beside, beside=None)
    return first, (type(spec.beside), alone, replace(layer, mixer=layer.beside, beside=None))


def _rows_of(index: int, mixer: Mixer | None) -> int:
    """The layer whose rows of K and V a layer reads."""
    if isinstance(mixer, AttentionSpec) and mixer.kv_from is not None:
        return mixer.kv_from
    return index


def _kind(weights: Any) -> Any:
    """Types and shapes of a layer's weights, or of a part of it."""
    if isinstance(weights, PackedTensor):
        return weights.format.name, weights.shape
    if is_dataclass(weights):
        return type(weights), *(_kind(getattr(weights, field.name)) for field in fields(weights))
    if isinstance(weights, float):
        return float  # a factor, which changes nothing but numbers
    return tuple(weights.shape) if hasattr(weights, "shape") else weights
