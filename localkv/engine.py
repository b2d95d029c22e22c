"""Token ids in, token ids out: prefill in chunks, decode, cancel, prefix reuse, figures.

Knows nothing of text: stop strings, templates and detokenising are the layer's above.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Event
from typing import Literal

import torch
from torch import Tensor

from localkv.cache_room import allocated_cache
from localkv.config import CacheConfig
from localkv.decode_loop import DecodeLoop
from localkv.errors import ContextOverflowError, LocalKVError
from localkv.kernels.device_memory import Room, naming_what_fails
from localkv.kv_cache import KVCache
from localkv.kv_scales import check_scales
from localkv.model import Transformer
from localkv.sampling import Sampler
from localkv.sampling.device_draw import NO_TOKEN, device_draw

WARM_UP_TOKENS = 16
"""A prompt of so many tokens uses the kernels that long prompts use, where these are not recorded
on a GPU."""

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass
class GenerationStats:
    """Counts and seconds of one generation, filled in while it runs.

    `n_prompt` counts the whole prompt, of which `n_reused` tokens were still in the cache.
    `decode_seconds` covers the tokens after the first: the first comes with the prompt.
    """

    n_prompt: int = 0
    n_reused: int = 0
    n_generated: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens evaluated (not reused) per second."""
        return _rate(self.n_prompt - self.n_reused, self.prompt_seconds)

    @property
    def decode_per_second(self) -> float:
        """Tokens decoded per second."""
        return _rate(self.n_generated - 1, self.decode_seconds)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0


class Generation(Iterator[int]):
    """The token ids of one generation, as they are drawn.

    Attributes:
        stats: counts and seconds so far.
        finish_reason: None while it runs, then "stop" (a stop token, which is not part of the
            ids), "length" (`max_tokens` or the end of the context) or "cancelled".
        context_full: it ended because the context did.
    """

    def __init__(self, stats: GenerationStats) -> None:
        self.stats = stats
        self.finish_reason: FinishReason | None = None
        self.context_full = False
        self._ids: Iterator[int] = iter(())

    def __next__(self) -> int:
        return next(self._ids)


def _checked(token: int) -> int:
    if token == NO_TOKEN:
        raise LocalKVError("the model produced NaN or infinite logits")
    return token


class Engine:
    """A model with a KV cache that holds one sequence.

    The cache keeps the tokens of the last call; a prompt that starts with them is only evaluated
    from where it differs.

    Args:
        model: weights on a backend.
        cache: types and context length.
        n_batch: most prompt tokens evaluated at a time.
        make_cache: takes what `KVCache` takes; measurements make another one.
        check_source: called before anything is evaluated; raises if the weights are no longer what
            was loaded.

    Raises:
        UsageError: a type's scales are missing or not this model's.
        LocalKVError: the cache does not fit the memory.
    """

    def __init__(
        self,
        model: Transformer,
        cache: CacheConfig,
        *,
        n_batch: int = 512,
        make_cache: Callable[..., KVCache] = KVCache,
        check_source: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.check_source = check_source
        self.n_batch = n_batch
        self.n_ctx = cache.n_ctx
        check_scales(cache, model.config)
        self.cache = allocated_cache(model, cache, make_cache)
        self.loop = DecodeLoop(model, self.cache) if model.backend.records else None
        self.sequence = self.cache.new_sequence()
        self.cached_ids: list[int] = []

    def reset(self) -> None:
        """Forget the cached tokens."""
        self.truncate(0)

    def warm_up(self) -> None:
        """Run the model on some tokens and forget them, so that all kernels it needs are compiled.

        On a GPU a product's tiles depend on the number of tokens, each size from one power of two
        to another at least; so every power of two is run. Where weights may still be in a file and
        products are compiled when these are prepared, one layer has all the rest.
        """
        if self.loop is None:
            for n_tokens in (min(self.n_ctx, WARM_UP_TOKENS), 1):
                self._try(self.model.first_layers(1), n_tokens)
            self.reset()
            return
        most = min(self.n_ctx, self.n_batch)
        # the longest first: if there is no room for its scratch, that shows at once
        sizes = sorted({most, *(1 << i for i in range(most.bit_length()))} - {1}, reverse=True)
        if self.model.backend.compile_together is not None:
            self.model.backend.compile_together(lambda: self._rehearse(sizes))
        for n_tokens in sizes:
            self._try(self.model, n_tokens)
        self.reset()
        with self._scratch_of(1):
            self.loop.warm_up(self.sequence)

    def _rehearse(self, sizes: list[int]) -> None:
        """Launch what `warm_up` does on a GPU, but each kind of layer once."""
        model = self.model.one_of_each_layer()
        for n_tokens in sizes:
            self._try(model, n_tokens)
        self.reset()
        with self._scratch_of(1):
            DecodeLoop(model, self.cache, records=False).warm_up(self.sequence)

    def _try(self, model: Transformer, n_tokens: int) -> None:
        """Run `model` on so many tokens at the start of the context; none of them counts."""
        self.reset()
        self._forward(model, [0] * n_tokens, "last")

    def _forward(
        self, model: Transformer, ids: Sequence[int], logits: Literal["last", "all"]
    ) -> Tensor:
        """Run `model` on `ids` after the cached tokens, of which they are none yet."""
        batch = self.cache.batch([(self.sequence, ids)], logits=logits)
        with self._scratch_of(len(ids)), torch.inference_mode():
            return model.forward(batch, self.cache)

    def truncate(self, length: int) -> None:
        """Forget the cached tokens from position `length` on."""
        self.cache.truncate(self.sequence, length)
        del self.cached_ids[length:]

    def evaluate(self, ids: Sequence[int], logits: Literal["last", "all"] = "last") -> Tensor:
        """Run `ids`, in one batch, after the cached ones: float32 [1 or len(ids), n_vocab].

        Raises:
            LocalKVError: they do not fit the context.
        """
        if len(ids) > 1:
            self.check_source()
        if self.loop is not None and len(ids) == 1:
            with self._scratch_of(1):
                out = self.loop.logits(self.sequence, ids[0])
        else:
            out = self._forward(self.model, ids, logits)
        self.sequence.length += len(ids)
        self.cached_ids.extend(ids)
        return out

    def _scratch_of(self, n_tokens: int) -> AbstractContextManager[None]:
        def hint(room: Room) -> str:
            if n_tokens == 1:
                return "use a smaller context (-c), or smaller types of K and V (-ctk, -ctv)"
            return "use a smaller batch (-b) or a smaller context (-c)"

        what = (
            f"the scratch of a batch of {n_tokens} tokens" if n_tokens > 1 else "a step's scratch"
        )
        return naming_what_fails(what, self.model.backend.device, hint)

    def _check(self, ids: Sequence[int]) -> None:
        self.check_source()
        if not ids:
            raise LocalKVError("there is nothing to evaluate: the prompt has no tokens")
        if len(ids) > self.n_ctx:
            raise ContextOverflowError(
                f"the prompt has {len(ids)} tokens, but the context holds {self.n_ctx}",
                hint=f"use a context of at least {len(ids)} (-c) or a shorter prompt",
            )
        n_vocab = self.model.config.n_vocab
        for token in ids:
            if not 0 <= token < n_vocab:
                raise LocalKVError(f"token id {token} is not in the vocabulary of {n_vocab}")

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits of every position, through the cache: float32 [len(ids), n_vocab] on the CPU.

        Raises:
            ContextOverflowError: more ids than the context holds.
        """
        self._check(ids)
        out = torch.empty(len(ids), self.model.config.n_vocab)
        done = 0
        for part in self.logit_batches(ids):
            out[done : done + len(part)] = part
            done += len(part)
        return out

    def logit_batches(self, ids: Sequence[int], *, first: int = 0) -> Iterator[Tensor]:
        """Logits of the positions from `first` on, a batch at a time, on the backend's device.

        Nobody has to hold those of a whole context: float32 [at most n_batch, n_vocab] each. A part
        is valid until the next is asked for.

        Raises:
            ContextOverflowError: more ids than the context holds.
        """
        self._check(ids)
        self.reset()
        for start in range(0, first, self.n_batch):
            self.evaluate(ids[start : min(start + self.n_batch, first)])
        for start in range(first, len(ids), self.n_batch):
            yield self.evaluate(ids[start : start + self.n_batch], "all")

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        sampler: Sampler,
        max_tokens: int | None = None,
        stop_ids: frozenset[int] = frozenset(),
        cancel: Event | None = None,
    ) -> Generation:
        """Continue a prompt.

        Args:
            prompt_ids: the whole prompt; what the cache still holds of it is reused.
            sampler: draws the tokens; it is told those of the prompt first.
            max_tokens: most tokens to draw; None goes on to the end of the context.
            stop_ids: tokens that end the generation.
            cancel: looked at before every chunk of the prompt and before every token.

        Raises:
            ContextOverflowError: the prompt is longer than the context; nothing was computed.
        """
        self._check(prompt_ids)
        generation = Generation(GenerationStats(n_prompt=len(prompt_ids)))
        generation._ids = self._run(
            generation, list(prompt_ids), sampler, max_tokens, stop_ids, cancel or Event()
        )
        return generation

    def _run(
        self,
        generation: Generation,
        prompt_ids: list[int],
        sampler: Sampler,
        max_tokens: int | None,
        stop_ids: frozenset[int],
        cancel: Event,
    ) -> Iterator[int]:
        stats = generation.stats
        room = self.n_ctx - len(prompt_ids)
        budget = room if max_tokens is None else min(max_tokens, room)
        if budget == 0:
            generation.finish_reason = "length"
            generation.context_full = max_tokens != 0
            return
        for token in prompt_ids:
            sampler.accept(token)
        started = time.perf_counter()
        logits = self._prefill(prompt_ids, stats, cancel)
        stats.prompt_seconds = time.perf_counter() - started
        if logits is None:
            generation.finish_reason = "cancelled"
            return
        drawn = self._drawn(logits, sampler, budget)
        started = time.perf_counter()
        for token in drawn:
            if stats.n_generated:
                stats.decode_seconds += time.perf_counter() - started
            if token in stop_ids:
                generation.finish_reason = "stop"
                return
            sampler.accept(token)
            stats.n_generated += 1
            if stats.n_generated == budget:
                generation.finish_reason = "length"
                generation.context_full = max_tokens is None or budget < max_tokens
            yield token
            if generation.finish_reason is not None:
                return
            if cancel.is_set():
                generation.finish_reason = "cancelled"
                return
            started = time.perf_counter()

    def _drawn(self, logits: Tensor, sampler: Sampler, limit: int) -> Iterator[int]:
        """Tokens drawn by `logits` [1, n_vocab] and those that follow; one is evaluated only when
        the next is asked for."""
        draw = None if self.loop is None else device_draw(sampler.params)
        if draw is None:
            while True:
                token = sampler.sample(logits[0].cpu().numpy())
                yield token
                logits = self.evaluate([token])
        assert self.loop is not None
        random = torch.tensor([sampler.seed, 0], device=logits.device)
        token = _checked(int(draw(logits, random)))
        yield token
        tokens = self.loop.tokens(
            self.sequence, token, draw, seed=sampler.seed, number=1, limit=limit - 1
        )
        while True:
            with self._scratch_of(1):
                following = next(tokens, None)
            if following is None:
                return
            self.sequence.length += 1
            self.cached_ids.append(token)
            token = _checked(following)
            yield token

    def _prefill(
        self, prompt_ids: list[int], stats: GenerationStats, cancel: Event
    ) -> Tensor | None:
        """Evaluate what the cache does not hold: the last token's logits, or None if cancelled."""
        reused = 0
        for ours, theirs in zip(self.cached_ids, prompt_ids[:-1], strict=False):
            if ours != theirs:
                break
            reused += 1
        self.truncate(reused)
        stats.n_reused = reused
        logits = None
        for start in range(reused, len(prompt_ids), self.n_batch):
            if cancel.is_set():
                return None
            logits = self.evaluate(prompt_ids[start : start + self.n_batch])
        return None if cancel.is_set() else logits
