"""Token ids in, logits and hidden states out: chunks, prefix reuse, and warming up.

`Engine` knows nothing of text: stop strings, templates and detokenising are the layer's above.
`BatchEngine` generates. The functions at the end run a model before a user waits for what else its
first batches take.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import ClassifierSpec
from localkv.cache.arrays import Array
from localkv.cache.cache_checks import check_alibi, check_context
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import PAGE_TOKENS, cache_bytes, group_layouts, pages_for
from localkv.cache.pages import NoPageError
from localkv.cache.pages import Sequence as CachedSequence
from localkv.cache.profile import check_scales
from localkv.cache.recurrent_state import CheckpointConfig
from localkv.config import CacheConfig
from localkv.engine.cache_slot import CacheSlot
from localkv.engine.embedding import Pool, Pooling, packed, pooled
from localkv.engine.prefix import Text
from localkv.engine.recorded import DecodeLoop
from localkv.engine.speculation.config import Speculation
from localkv.engine.speculation.draft_model import DraftModel
from localkv.engine.speculation.speculator import SIZES, Prices
from localkv.errors import ContextOverflowError, LocalKVError, UsageError, byte_size, counted
from localkv.kernels.device_memory import Room, naming_what_fails
from localkv.kernels.low_rank import MOST_SCALE
from localkv.model import Transformer

if TYPE_CHECKING:
    from localkv.engine.speculation.prediction_head import PredictionHead

T = TypeVar("T")

MOST_SALTS = 4096
"""Pairs of a salt and adapters' scales whose number is remembered."""


class Engine:
    """A model with a KV cache that holds one sequence.

    The cache keeps the tokens of the last call, and of calls before it as far as there is room. A
    prompt that starts like some of them is only evaluated from where it differs.

    Threads may call it at the same time: they take turns, first come, first served, and each call
    of the model is one turn. Generations and `logit_batches` take one for each step, and go on
    where they were if others came in between. So do engines of the same backend. After an
    exception in a turn, Ctrl-C for one, the cache starts empty.

    Args:
        model: weights on a backend.
        cache: types and context length.
        n_batch: most prompt tokens evaluated at a time.
        exact: evaluate generated tokens once more when they have become part of a prompt, so that,
            on a CPU, a generation does not depend on those before it. Else its rows are reused.
        make_cache: takes the arguments of `KVCache`; measurements make another one.
        check_source: called before anything is evaluated; raises if the weights are no longer
            those that were loaded.
        n_between: guesses that recurrent layers keep states for, so that it takes a copy to take
            others back (`Speculation.n_between`).

    Attributes:
        draft: a smaller model that drafts, if there is one.
        head: the model's own block that drafts, if it was loaded (`add_head`).

    Raises:
        UsageError: a type's scales are missing or not this model's.
        LocalKVError: the cache does not fit the memory. Of all methods: this is a fork of the
            process that made the engine, or the thread is in a turn already (a signal handler).
    """

    def __init__(
        self,
        model: Transformer,
        cache: CacheConfig,
        *,
        n_batch: int = 512,
        exact: bool = True,
        make_cache: Callable[..., KVCache] = KVCache,
        check_source: Callable[[], None] = lambda: None,
        n_between: int = 0,
    ) -> None:
        self.model = model
        self.check_source = check_source
        self.n_ctx = cache.n_ctx
        check_scales(cache, model.config)
        self.prices = Prices()
        self.draft: DraftModel | None = None
        self.head: PredictionHead | None = None
        self.cache = allocated_cache(model, cache, n_batch, make_cache, n_between=n_between)
        self.cache.adapters, self.cache.scales = model.adapters, model.scales
        self._salts = dict[tuple[int, tuple[float, ...]], int]()
        self._n_salts = 0
        if self.cache.ladder is not None:
            n_batch = self.cache.ladder.sizes.batch(n_batch)
        self.n_batch = n_batch
        self.slot = CacheSlot(model, self.cache, n_batch, exact=exact, check_source=check_source)
        if self.cache.ladder is not None and self.slot.loop is None:
            self.cache.warm_up_ladder()

    @property
    def loop(self) -> DecodeLoop | None:
        """Decodes from fixed buffers, where the backend records."""
        return self.slot.loop

    @property
    def sequence(self) -> CachedSequence:
        """The rows of the cache."""
        return self.slot.sequence

    @property
    def cached_ids(self) -> list[int]:
        """The tokens whose rows the cache holds."""
        return self.slot.ids

    def reset(self) -> None:
        """Forget the cached tokens, and the texts that came before them."""

        def work() -> None:
            self.slot.forget()
            if self.head is not None:
                self.head.forget()

        self.slot.turn(work)

    def truncate(self, length: int) -> int:
        """Forget the cached tokens from position `length` on; more if layers with a window lack
        rows that the next token would see. Returns how many are left."""
        return self.slot.turn(lambda: self.slot.truncate(length))

    def checkpoint(self) -> None:
        """Expect `truncate` to come back to where the cached tokens end now."""
        self.slot.turn(self.slot.checkpoint)

    def close(self) -> None:
        """Let go of the model and the cache, whose memory is free if nobody else has them.

        Generations and other users of `slot` get a `ModelClosedError` from now on.
        """
        self.slot.close()
        if self.head is not None:
            self.head.close()
        del self.model, self.cache, self.draft, self.head, self.check_source

    def warm_up(self) -> None:
        """Run the model on some tokens and forget them, so that all kernels it needs are compiled
        (`compile_kernels`)."""
        self.slot.turn(lambda: compile_kernels(self.slot))

    def prepare(self) -> None:
        """Do what else the first prompt would wait for: lay out weights that loading left for it,
        and run all layers once."""
        self.slot.turn(lambda: finish_loading(self.slot))

    def add_head(self, cache: CacheConfig) -> None:
        """Have the block of the model that predicts a further token guess.

        Args:
            cache: its types of K and V; the context and the sequences are the model's.

        Raises:
            LocalKVError: its cache does not fit the memory.
        """
        from localkv.engine.speculation.prediction_head import PredictionHead

        sizes = self.cache.n_ctx, self.cache.n_sequences
        block = self.model.predictor
        own = replace(cache, n_ctx=sizes[0], n_sequences=sizes[1])
        rows = allocated_cache(block, own, self.n_batch)
        self.head = PredictionHead(self.model, block, rows, self.n_batch, self.prices)
        self.slot.turn(self.head.warm_up)

    def warm_up_drafts(self, speculation: Speculation) -> None:
        """Run batches of the sizes that drafts have, and measure what they cost."""
        any_size = speculation.drafter == "draft"
        self.slot.turn(
            lambda: warm_up_drafts(self.slot, self.prices, speculation.draft_max, any_size=any_size)
        )

    def evaluate(
        self,
        ids: Sequence[int],
        logits: Literal["last", "all"] = "last",
        *,
        generated: bool = False,
    ) -> Array:
        """Run `ids`, at most `n_batch`, after the cached ones: float32 [1 or len(ids), n_vocab].

        On the CPU logits depend on the tokens and on which of them were `generated`, bit for bit,
        and not on how they are batched.

        Raises:
            LocalKVError: they do not fit the context or a batch, or one is not in the vocabulary.
        """
        self.check_writes()
        self._check_ids(ids)

        def work() -> Array:
            self.slot.truncate(len(self.slot.ids))  # the former owner loses it
            return self.slot.evaluate(ids, logits, generated=generated)

        return self.slot.turn(work)

    def text_of(
        self,
        ids: Sequence[int],
        salt: int = 0,
        scales: tuple[float, ...] | None = None,
        origin: bytes = b"",
    ) -> Text:
        """A prompt.

        Args:
            salt: texts of different salts share no rows of the cache.
            scales: of the model's adapters, in order; None for those that it was loaded with. Texts
                of different scales share no rows either.
            origin: what the salt stands for.

        Raises:
            UsageError: there are other adapters than these.
        """
        loaded = self.model.scales
        if scales is None or scales == loaded:
            scales = loaded
        elif len(scales) != len(loaded):
            raise UsageError(
                f"{counted(len(scales), 'scale')} of adapters, and the model has {len(loaded)}"
            )
        if not salt and scales == loaded:
            return Text(list(ids), len(ids))
        if (number := self._salts.get((salt, scales))) is None:
            if len(self._salts) >= MOST_SALTS:  # their numbers are not used again
                self._salts.clear()
            self._n_salts += 1
            number = self._salts[salt, scales] = self._n_salts
        if scales != loaded and (origin or not salt):
            from localkv.engine.state_file import adapters_of

            origin += b"\0" + adapters_of(self.cache, scales).encode()
        return Text(list(ids), len(ids), number, origin, scales=scales)

    def scales_of(self, lora: Mapping[int, float] | None) -> tuple[float, ...] | None:
        """Scales of all adapters, of those that a text asks for by their numbers; None for None.

        Raises:
            UsageError: there is no such adapter, or a scale is no number.
        """
        if lora is None:
            return None
        n = len(self.model.scales)
        for number, scale in lora.items():
            if not 0 <= number < n:
                there = f"they are 0 to {n - 1}" if n else "none was loaded (--lora)"
                raise UsageError(f"there is no adapter {number}", hint=there)
            if not abs(scale) <= MOST_SCALE:
                raise UsageError(
                    f"the scale of adapter {number} is {scale}",
                    hint=f"use a number from -{MOST_SCALE:g} to {MOST_SCALE:g}",
                )
        return tuple(float(lora.get(number, 0.0)) for number in range(n))

    def check_prompt(self, ids: Sequence[int], what: str = "the prompt") -> None:
        """Refuse a prompt that can't be evaluated.

        Args:
            ids: its tokens.
            what: its name in the error.

        Raises:
            ContextOverflowError: it is longer than the context.
            UsageError: the model is an encoder.
            LocalKVError: it has no tokens, or one that is not in the vocabulary.
        """
        self.check_writes()
        self.check_text(ids, what)

    def check_writes(self) -> None:
        """Refuse an encoder, where logits are wanted.

        Raises:
            UsageError: it is one.
        """
        if self.model.config.is_encoder:
            raise UsageError(
                f"a {self.model.config.architecture} model makes embeddings, and no text",
                hint="localkv embed (LLM.embed in Python) turns texts into vectors with it",
            )

    def check_text(self, ids: Sequence[int], what: str) -> None:
        """Refuse a text that can't be evaluated; raises as `check_prompt`, but for encoders."""
        self.check_source()
        if not ids:
            raise LocalKVError(f"{what} has no tokens to evaluate")
        if len(ids) > self.n_ctx:
            hint = f"use a context of at least {len(ids)} (-c) or a shorter prompt"
            if 0 < self.model.config.n_positions < len(ids):
                hint = "the model has no positions after these: cut the text into shorter ones"
            raise ContextOverflowError(
                f"{what} has {len(ids)} tokens, but the context holds {self.n_ctx}", hint=hint
            )
        self._check_ids(ids)

    def _check_ids(self, ids: Sequence[int]) -> None:
        """No backend looks at ids: they are indices of the embedding's rows."""
        n_vocab = self.model.config.n_vocab
        for token in ids:
            if not 0 <= token < n_vocab:
                raise LocalKVError(f"token id {token} is not in the vocabulary of {n_vocab}")

    def logits(self, ids: Sequence[int]) -> Array:
        """Logits of every position, through the cache: float32 [len(ids), n_vocab] on the CPU.

        Raises:
            ContextOverflowError: more ids than the context holds.
        """
        self.check_prompt(ids)
        out = self.model.backend.arrays.host_floats(len(ids), self.model.config.n_vocab)

        def work() -> None:
            self.slot.truncate(0)
            for start in range(0, len(ids), self.n_batch):
                part = self.slot.evaluate(ids[start : start + self.n_batch], "all")
                out[start : start + len(part)] = part

        self.slot.turn(work)
        return out

    def logit_batches(
        self,
        ids: Sequence[int],
        *,
        first: int = 0,
        n_prompt: int | None = None,
        n_rows: int | None = None,
    ) -> Iterator[Array]:
        """Yield the logits of the positions from `first` on, in parts, on the backend's device.

        Each part is float32 [at most n_rows, n_vocab], so nobody has to hold the logits of a whole
        context. A part is valid until the next is asked for, or another thread calls the engine.

        Args:
            n_prompt: evaluate the first `n_prompt` tokens as a prompt, and the tokens after them as
                generated ones. None evaluates all as a prompt.
            n_rows: most positions of a part. None, or more than a batch, means a batch.

        Raises:
            ContextOverflowError: more ids than the context holds.
        """
        return self.read_logits(
            ids, lambda part: part, first=first, n_prompt=n_prompt, n_rows=n_rows
        )

    def read_logits(
        self,
        ids: Sequence[int],
        read: Callable[[Array], T],
        *,
        first: int = 0,
        n_prompt: int | None = None,
        n_rows: int | None = None,
        n_read: int | None = None,
    ) -> Iterator[T]:
        """What `read` makes of each part of `logit_batches`, in the turn in which it was computed:
        until it returns, no other thread calls the engine.

        Args:
            n_read: most positions whose logits are made, and read, at a time; None for a part's.
        """
        self.check_prompt(ids)
        n_prompt = len(ids) if n_prompt is None else min(n_prompt, len(ids))
        n_rows = min(n_rows or self.n_batch, self.n_batch)
        text = Text(list(ids), n_prompt)
        parts = self._parts(len(ids), n_prompt, first, n_rows)

        def run_up_to(number: int) -> list[T]:
            """Evaluate the parts that are missing, and read the logits of the last of them."""
            if not self.slot.is_taken_by(text):
                self.slot.truncate(0)
                self.slot.take(text)
                if self.sequence.length not in (0, parts[number][0]):  # another text's rows
                    self.slot.truncate(0)
                    self.slot.take(text, reuses=False)
            for start, end in parts[:number]:
                if self.sequence.length > start:
                    continue
                if start < n_prompt < end:
                    self.slot.read_logits(ids[start:end], len, n_rows, n_prompt=n_prompt - start)
                else:
                    self.slot.evaluate(ids[start:end], generated=start >= n_prompt)
            start, end = parts[number]
            if start < first and end <= n_prompt:
                return [read(self.slot.evaluate(ids[start:end]))]
            n_leading = min(max(0, n_prompt - start), end - start)
            n_at_once = n_read or n_rows
            return self.slot.read_logits(ids[start:end], read, n_at_once, n_prompt=n_leading)

        for number, (_, end) in enumerate(parts):
            if end > first:
                yield from self.slot.turn(partial(run_up_to, number))

    def _parts(
        self, n_tokens: int, n_prompt: int, first: int, n_rows: int
    ) -> list[tuple[int, int]]:
        """What `read_logits` evaluates at a time: positions, from and to."""
        if first == n_prompt - 1 and n_rows == self.n_batch and self.slot.mixes_kinds:
            return list(pairwise([*range(0, n_tokens, self.n_batch), n_tokens]))
        # the last token of a prompt has its logits with the rest of it
        places = {0, n_prompt, n_tokens} | ({first} if first != n_prompt - 1 else set())
        bounds = [
            at
            for start, end in pairwise(sorted(places))
            for at in range(start, end, self.n_batch if start < first else n_rows)
        ]
        return list(pairwise([*bounds, n_tokens]))

    def embeddings(
        self, texts: Sequence[Sequence[int]], pooling: Pooling
    ) -> list[NDArray[np.float32]]:
        """The pooled hidden states of texts: float32 [n_embd] each, or [tokens, n_embd] for "none".

        Raises:
            ContextOverflowError: one has more tokens than the context holds; none was evaluated.
        """
        for number, ids in enumerate(texts, 1):
            self.check_text(ids, f"text {number} of {len(texts)}" if len(texts) > 1 else "the text")
        return [vector for some in self.embed_by_turns(texts, pooling) for vector in some]

    def embed_by_turns(
        self,
        texts: Sequence[Sequence[int]],
        pooling: Pooling,
        waits: Callable[[], bool] = lambda: False,
    ) -> Iterator[list[NDArray[np.float32]]]:
        """Make the vectors of `embeddings`, about `n_batch` tokens at a time.

        Between two others may have their turn: texts are evaluated together up to a batch, and a
        longer one in pieces.

        Args:
            texts: which `check_text` does not refuse.
            waits: asked where the cache is full: whether others will give pages back, so that the
                text goes on later.

        Yields:
            the vectors that are done, in order; none while a long text is not.

        Raises:
            LocalKVError: the cache is full, and nobody gives pages back.
        """
        for some in packed(texts, self.n_batch):
            if self.model.config.is_encoder:
                yield self._encoded(some, pooling)
            elif len(some) == 1:
                yield from self._embed_in_pieces(some[0], pooling, waits)
            else:
                vectors = list[NDArray[np.float32]]()
                for ids in some:
                    for done in self._embed_in_pieces(ids, pooling, waits):
                        vectors += done
                        if not done:
                            yield []
                yield vectors

    def _encoded(
        self, texts: Sequence[Sequence[int]], pooling: Pooling
    ) -> list[NDArray[np.float32]]:
        """The vectors of an encoder's texts, evaluated in one batch."""
        states = self.slot.turn(partial(self.slot.encode, texts))
        ends = np.cumsum([len(ids) for ids in texts])[:-1]
        vectors = [pooled(part, pooling) for part in np.split(states, ends)]
        if not self.model.config.dense:
            return vectors
        ends = np.cumsum([len(np.atleast_2d(vector)) for vector in vectors])[:-1]
        rows = self._in_turn(self.model.projected, np.vstack(vectors))
        shapes = [vector.shape for vector in vectors]
        parts = zip(np.split(rows, ends), shapes, strict=True)
        return [part.reshape(shape) for part, shape in parts]

    def _in_turn(
        self, run: Callable[[Array], Array], rows: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """What an operation of the model makes of rows that are on the host."""
        arrays = self.model.backend.arrays

        def work() -> NDArray[np.float32]:
            self.slot.use_threads(len(rows))
            with arrays.inference():
                given = arrays.floating(arrays.from_numpy(rows))
                return arrays.to_numpy(run(given)).astype(np.float32)

        return self.slot.turn(work)

    def check_scores(self) -> ClassifierSpec:
        """The head that scores texts.

        Raises:
            UsageError: the model has none.
        """
        spec = self.model.config.classifier
        if spec is None:
            raise UsageError(
                f"the {self.model.config.architecture} model has no head that scores texts",
                hint="rerankers have one, bge-reranker-v2-m3 and Qwen3-Reranker among them",
            )
        return spec

    def scores(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """What the head of a model that scores texts gives: float32 [texts, classes].

        Raises:
            UsageError: the model has no such head.
            ContextOverflowError: one has more tokens than the context holds; none was evaluated.
        """
        spec = self.check_scores()
        if not texts:
            return np.zeros((0, spec.n_classes or spec.n_hidden), np.float32)
        return self.scores_of(self.embeddings(texts, spec.pooling))

    def scores_of(self, vectors: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Score texts, at least one, by their vectors; see `scores`."""
        return self._in_turn(self.model.scores, np.stack(vectors))

    def _embed_in_pieces(
        self, ids: Sequence[int], pooling: Pooling, waits: Callable[[], bool]
    ) -> Iterator[list[NDArray[np.float32]]]:
        """Evaluate a text that goes through the cache, a turn at a time: its vector at the end.

        Where others had turns in between, rows may be gone and have to be made again. Then a turn
        has as many new tokens, so that most work is new however many take turns.
        """
        rows: Literal["last", "all"] = "last" if pooling == "last" else "all"
        slot, to_numpy = self.slot, self.model.backend.arrays.to_numpy
        text, pool, n_read = Text(list(ids), len(ids)), Pool(pooling), 0

        def work() -> NoPageError | None:
            """Evaluate the next tokens."""
            try:
                evaluate()
            except NoPageError as error:
                slot.leave()  # who needs the pages may take them
                return error
            return None

        def evaluate() -> None:
            nonlocal n_read
            first = at = n_read
            if not slot.is_taken_by(text):
                slot.take(text, reuses=at > 0)
                if slot.sequence.length > at:  # another text has more of these tokens
                    slot.truncate(at)
            n_again = at - slot.sequence.length
            while slot.sequence.length < at:
                end = min(at, slot.sequence.length + self.n_batch)
                slot.hidden(ids[slot.sequence.length : end], "last")
            while at < len(ids):
                part = ids[at : at + self.n_batch]
                pool.add(to_numpy(slot.hidden(part, rows)).astype(np.float32))
                at = n_read = at + len(part)
                if at - first >= n_again:
                    break
            if at == len(ids):
                slot.truncate(0)  # its pages are free for others

        while n_read < len(ids):
            if (full := slot.turn(work)) is not None and not waits():
                raise full
            yield [pool.vector()] if n_read == len(ids) else []


def allocated_cache(
    model: Transformer,
    cache: CacheConfig,
    n_batch: int,
    make_cache: Callable[..., KVCache] = KVCache,
    *,
    n_between: int = 0,
) -> KVCache:
    """The cache of a model for `cache.n_sequences` sequences, on its backend's device.

    Args:
        n_batch: most tokens of a batch.
        make_cache: takes the arguments of `KVCache`.
        n_between: as `RecurrentStates` has it.

    Raises:
        LocalKVError: it does not fit the memory; names its size and the context that would fit.
        UsageError: the model has fewer positions, or can't attend to such a cache.
    """
    check_context(cache.n_ctx, model.config)
    layouts = group_layouts(cache, model.config.groups)
    check_alibi(layouts, model.config)

    def bytes_of(n_ctx: int) -> int:
        k, v = cache_bytes(
            layouts,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_sequences=cache.n_sequences,
            n_tokens=cache.n_tokens,
        )
        return k + v

    def what_fits(room: Room) -> str:
        pages = range(1, pages_for(cache.n_ctx) + 1)
        fit = PAGE_TOKENS * bisect_right(pages, room.free, key=lambda n: bytes_of(n * PAGE_TOKENS))
        if fit == 0:
            return "the weights leave no room: use a smaller model, or --device cpu"
        return f"{fit} tokens (-c) would fit, or more in smaller types of K and V (-ctk, -ctv)"

    times = f"{cache.n_sequences} times " if cache.n_sequences > 1 else ""
    what = f"a KV cache of {byte_size(bytes_of(cache.n_ctx))} for {times}{cache.n_ctx} tokens"
    try:
        with naming_what_fails(what, model.backend.memory, what_fits):
            return make_cache(
                layouts,
                n_ctx=cache.n_ctx,
                n_batch=n_batch,
                n_sequences=cache.n_sequences,
                n_tokens=cache.n_tokens,
                arrays=model.places.batch_arrays,
                layer_arrays=model.places.layer_arrays(),
                kv_scales=cache.kv_scales,
                kv_codebooks=cache.kv_codebooks,
                states=model.config.states,
                checkpoints=CheckpointConfig(cache.ctx_checkpoints, cache.checkpoint_min_step),
                n_between=n_between,
            )
    except (RuntimeError, MemoryError) as error:
        raise LocalKVError(
            f"{what} does not fit the memory", hint="use a smaller context (-c)"
        ) from error


WARM_UP_TOKENS = 16
"""A prompt of this length uses the kernels of long prompts, unless a GPU records them."""


def compile_kernels(slot: CacheSlot) -> None:
    """Run the model on some tokens, in a turn, so that all kernels it needs are compiled.

    On a CPU these are a prompt's. The kernels of generated tokens are a matter of milliseconds
    if they were compiled before, and else are compiled while a prompt runs.

    On a GPU a product's tiles depend on the number of tokens, each size from one power of two
    to another at least; so every power of two is run. Where weights may still be in a file and
    products are compiled when these are prepared, one layer has all the rest.

    The slot holds no tokens afterwards.
    """
    n_ctx = slot.cache.n_ctx
    if slot.model.config.is_encoder:
        slot.encode([[0] * min(n_ctx, WARM_UP_TOKENS)])
        return
    is_on_gpu = slot.model.backend.compile_together is not None
    if slot.loop is None and not is_on_gpu:
        _try(slot, slot.model.first_layers(1), min(n_ctx, slot.n_batch, WARM_UP_TOKENS))
        slot.truncate(0)
        return
    most = min(n_ctx, slot.n_batch)
    # the longest first: if there is no room for its scratch, that shows at once
    sizes = sorted({most, *(1 << i for i in range(most.bit_length()))} - {1}, reverse=True)
    if slot.loop is None:  # in several places nothing is recorded
        sizes.append(1)
    if slot.model.backend.compile_together is not None:
        slot.model.backend.compile_together(lambda: _rehearse(slot, sizes))
    _try_prompts(slot, slot.model, sizes)
    if slot.loop is not None:
        with slot.scratch_of(1):
            slot.loop.warm_up(slot.sequence)


def finish_loading(slot: CacheSlot) -> None:
    """Do what else the first prompt would wait for, in a turn: lay out weights that loading left
    for it, and run all layers once. The slot holds no tokens afterwards."""
    if slot.model.backend.late is not None:
        slot.model.backend.late.finish()
    if slot.model.config.is_encoder:
        slot.encode([[0] * min(slot.cache.n_ctx, WARM_UP_TOKENS)])
    elif slot.loop is None:  # else `compile_kernels` has run them
        for n_tokens in (min(slot.cache.n_ctx - 1, slot.n_batch, WARM_UP_TOKENS), 1):
            if n_tokens:
                slot.evaluate([0] * n_tokens, generated=n_tokens == 1)
        slot.forget()


def _rehearse(slot: CacheSlot, sizes: list[int]) -> None:
    """Make the launches of `compile_kernels` on a GPU, once for each kind of layer."""
    model = slot.model
    if slot.loop is None:
        _try_prompts(slot, model, sizes)
        return
    model = model.one_of_each_layer(slot.cache)
    _try_prompts(slot, model, sizes)
    with slot.scratch_of(1):
        DecodeLoop(model, slot.cache, records=False).warm_up(slot.sequence)


def _try_prompts(slot: CacheSlot, model: Transformer, sizes: list[int]) -> None:
    """Run prompts of these sizes; with a budget on each rung that pages may begin on, as they do
    where there is no room for higher ones."""
    ladder = slot.cache.ladder
    for rung in range(1 if ladder is None else ladder.n_open):
        if ladder is not None:
            ladder.highest = rung
        for n_tokens in sizes:
            _try(slot, model, n_tokens)
        slot.truncate(0)
    if ladder is not None:
        ladder.highest = 0


def _try(slot: CacheSlot, model: Transformer, n_tokens: int) -> None:
    """Run `model` on some tokens at the start of the context; none of them counts.

    One token is a generated one, more are a prompt's.
    """
    slot.truncate(0)
    slot.forward(model, [0] * n_tokens, "last", generated=n_tokens == 1)


_TIMES = 4
_QUICK = 2e-3
"""Seconds of a step, beside which it matters what is made once for each size."""


def warm_up_drafts(
    slot: CacheSlot, prices: Prices, draft_max: int, *, any_size: bool = False
) -> None:
    """Run batches of each draft size some times, in a turn, and note what they cost.

    Each batch comes after a first token. The first run of a size takes long, so it is not counted.
    The cache starts empty afterwards.

    Args:
        any_size: drafts may have other sizes, too. If a step takes at most `_QUICK` seconds, run
            these as well, so that small models don't wait for them later.
    """
    most = min(slot.cache.n_ctx, slot.n_batch)
    sizes = [1 + size for size in SIZES if size <= draft_max]
    if any_size:
        sizes += sorted(set(range(2, 2 + draft_max)) - {*sizes})
    for _ in range(2):  # the second lays out what the first could do without
        slot.truncate(0)
        slot.evaluate([0])

    def took(n_tokens: int) -> float:
        slot.truncate(1)
        started = time.perf_counter()
        logits = slot.evaluate([0] * n_tokens, "all", generated=True)
        slot.model.backend.arrays.to_numpy(logits)  # a GPU has only been told so far
        return time.perf_counter() - started

    for n_tokens in sizes:
        if n_tokens - 1 not in SIZES and prices.one > _QUICK:
            continue
        slot.truncate(0)
        slot.evaluate([0])
        if n_tokens < most:
            took(n_tokens)  # the first time takes long
            pairs = [(took(1), took(n_tokens)) for _ in range(_TIMES)]
            one, several = (min(seconds) for seconds in zip(*pairs, strict=True))
            prices.compared(n_tokens, several, one)
    slot.truncate(0)
