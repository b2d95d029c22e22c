"""Going on where a prompt begins like the last one, in models whose states can't be cut back."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from torch import Tensor

from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import GroupLayout, SegmentSpec
from localkv.cache.recurrent_state import (
    LONG_PROMPT,
    NEAR_END,
    CheckpointConfig,
    RecurrentStates,
    floats_of,
    state_bytes,
)
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.engine.recorded import DecodeLoop
from localkv.errors import LocalKVError
from localkv.kernels.backend import Backend
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.hybrid_models import N_VOCAB, hybrid

CACHE = CacheConfig(n_ctx=256, ctx_checkpoints=3, checkpoint_min_step=24)


@pytest.fixture(scope="module", params=["qwen35", "lfm2", "kimi-linear"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    path = tmp_path_factory.mktemp("hybrid") / "model.gguf"
    return load_model(hybrid(request.param).write(path), cpu_backend())[0]


def engine(model: Transformer, **changes: int) -> Engine:
    return Engine(model, replace(CACHE, **changes), n_batch=32)


def greedy() -> Sampler:
    return Sampler(SamplingParams(temperature=0.0), n_vocab=N_VOCAB)


def answer(engine: Engine, prompt: list[int], n: int) -> list[int]:
    return list(
        BatchEngine(engine).generate(prompt, GenerationOptions(sampler=greedy(), max_tokens=n))
    )


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_edits_gives_what_a_fresh_cache_gives(
    model: Transformer, seed: int
) -> None:
    chance = random.Random(seed)
    used = engine(model)
    prompt = [chance.randrange(N_VOCAB) for _ in range(90)]
    reused = 0
    for _ in range(7):
        match chance.choice(["again", "edit", "continue", "cut", "cancel", "truncate"]):
            case "edit":
                at = chance.randrange(len(prompt))
                prompt = [*prompt[:at], (prompt[at] + 1) % N_VOCAB, *prompt[at + 1 :]]
            case "continue":
                prompt = [*prompt, *answer(used, prompt, 5), 7, 8, 9]
            case "cut":
                prompt = prompt[: chance.randrange(1, len(prompt) + 1)]
            case "cancel":
                tokens = BatchEngine(used).generate(
                    prompt, GenerationOptions(sampler=greedy(), cancel=(cancel := Event()))
                )
                next(tokens)
                cancel.set()
                assert list(tokens) == []
            case "truncate":
                assert used.truncate(chance.randrange(1, 60)) == len(used.cached_ids)
        prompt = prompt[:200]
        generation = BatchEngine(used).generate(
            prompt, GenerationOptions(sampler=greedy(), max_tokens=4)
        )
        got = list(generation)
        reused += generation.stats.n_reused
        assert got == answer(engine(model), prompt, 4)
        assert used.cached_ids == [*prompt, *got[:-1]]
    assert reused > 0


def test_the_same_prompt_goes_on_near_its_end(model: Transformer) -> None:
    used = engine(model, checkpoint_min_step=1000)
    prompt = [i % N_VOCAB for i in range(100)]
    first = answer(used, prompt, 6)
    again = BatchEngine(used).generate(prompt, GenerationOptions(sampler=greedy(), max_tokens=6))
    assert list(again) == first
    assert again.stats.n_reused == len(prompt) - NEAR_END
    assert again.stats.n_lost == NEAR_END - 1
    longer = BatchEngine(used).generate(
        [*prompt, *first, 1, 2], GenerationOptions(sampler=greedy(), max_tokens=2)
    )
    assert list(longer) == answer(engine(model), [*prompt, *first, 1, 2], 2)
    assert longer.stats.n_reused >= len(prompt) - NEAR_END


def test_without_checkpoints_a_prompt_is_read_again(model: Transformer) -> None:
    used = engine(model, ctx_checkpoints=0)
    prompt = [i % N_VOCAB for i in range(100)]
    first = answer(used, prompt, 6)
    again = BatchEngine(used).generate(prompt, GenerationOptions(sampler=greedy(), max_tokens=6))
    assert list(again) == first
    assert again.stats.n_reused == 0
    assert not used.sequence.kept


def test_checkpoints_are_within_their_budget_and_some_tokens_apart(model: Transformer) -> None:
    used = engine(model)
    prompt = [i * 7 % N_VOCAB for i in range(180)]
    answer(used, prompt, 40)
    lengths = [item.length for item in used.sequence.kept]
    assert len(lengths) == CACHE.ctx_checkpoints
    assert lengths == sorted(set(lengths))
    assert lengths[-1] > len(prompt)
    assert all(item.data.nbytes == state_bytes(model.config.states) for item in used.sequence.kept)


def test_an_exception_leaves_a_clean_cache(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = engine(model)
    prompt = [i % N_VOCAB for i in range(70)]
    first = answer(used, prompt, 3)
    forward, calls = Transformer.forward, []

    def broken(*args: object) -> object:
        out = forward(*args)  # states have seen the tokens by now
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return out

    monkeypatch.setattr(Transformer, "forward", broken)
    with pytest.raises(KeyboardInterrupt):
        answer(used, [*prompt[:40], 5, *prompt], 3)
    monkeypatch.undo()
    again = BatchEngine(used).generate(prompt, GenerationOptions(sampler=greedy(), max_tokens=3))
    assert list(again) == first
    assert again.stats.n_reused == 0


def test_a_new_sequence_starts_from_nothing(model: Transformer) -> None:
    used = engine(model)
    used.warm_up()
    prompt = [i % N_VOCAB for i in range(30)]
    first = np.array(used.logits(prompt))
    answer(used, prompt[::-1], 3)
    used.reset()
    np.testing.assert_array_equal(used.logits(prompt), first)


def test_two_texts_in_turn(model: Transformer) -> None:
    """Each goes on where it was, though states are the other's in between."""
    used = engine(model)
    prompts = [[(i * k) % N_VOCAB for i in range(80)] for k in (3, 5)]
    both = [
        BatchEngine(used).generate(prompt, GenerationOptions(sampler=greedy(), max_tokens=6))
        for prompt in prompts
    ]
    got: list[list[int]] = [[], []]
    for _ in range(6):
        for tokens, found in zip(both, got, strict=True):
            found.append(next(tokens))
    assert got == [answer(engine(model), prompt, 6) for prompt in prompts]


def test_states_that_are_ahead_are_refused(model: Transformer) -> None:
    used = engine(model)
    cache, sequence = used.cache, used.sequence
    cache.batch([(sequence, [1, 2, 3])])
    sequence.length = 2
    with pytest.raises(LocalKVError, match="states after 3 tokens can't go on after 2"):
        cache.batch([(sequence, [4])])


def test_every_sequence_has_a_place_of_its_own(model: Transformer) -> None:
    states = model.config.states
    layouts = [GroupLayout(group, (SegmentSpec("f16", "f16"),)) for group in model.config.groups]
    cache = KVCache(layouts, n_ctx=64, arrays=NumpyArrays(), n_sequences=2, states=states)
    first, second = cache.new_sequence(), cache.new_sequence()
    assert {first.slot, second.slot} == {0, 1}
    with pytest.raises(LocalKVError, match="holds 2 sequences, and all are in use"):
        cache.new_sequence()
    del first
    assert cache.new_sequence().slot != second.slot
    assert cache.states.n_bytes == 2 * 4 * floats_of(states) == state_bytes(states, n_sequences=2)


def test_which_checkpoint_goes(model: Transformer) -> None:
    """Checkpoints of long ago are farther from each other."""
    arrays = NumpyArrays()
    states = RecurrentStates(
        model.config.states,
        arrays=lambda layer: arrays,
        n_sequences=1,
        config=CheckpointConfig(most=4, step=1),
    )
    sequence = engine(model).sequence
    for length in range(1, 33):
        sequence.length = sequence.n_stepped = length
        states.keep(sequence)
    lengths = [item.length for item in sequence.kept]
    assert len(lengths) == 4
    assert lengths[-1] == 32
    gaps = [b - a for a, b in zip([0, *lengths], lengths, strict=False)]
    assert gaps[-1] == min(gaps)
    assert max(gaps) < 24


@pytest.mark.parametrize("n_prompt", [LONG_PROMPT - 1, LONG_PROMPT])
def test_only_a_long_prompt_is_cut(model: Transformer, n_prompt: int) -> None:
    used = engine(model, checkpoint_min_step=1000)
    answer(used, [i % N_VOCAB for i in range(n_prompt)], 1)
    end = n_prompt - NEAR_END if n_prompt >= LONG_PROMPT else n_prompt
    assert [item.length for item in used.sequence.kept] == [end]


def largest(logits: Tensor, random: Tensor) -> Tensor:
    return logits.argmax(-1)


def test_decoding_from_fixed_buffers(tmp_path: Path) -> None:
    """No token is computed ahead, so a reader may stop at any."""
    path = hybrid("qwen35").write(tmp_path / "model.gguf")
    model = load_model(path, reference_backend())[0]
    used = engine(model)
    cache, prompt = used.cache, [5, 4, 3, 2, 1]
    for layer in cache.layers:
        for segment in layer.segments:
            for plane in (*segment.k, *segment.v):
                plane.fill_(0x3C)  # rows behind the last must be finite
    sequence = used.sequence
    loop = DecodeLoop(model, cache)
    loop.warm_up(sequence)
    assert sequence.length == 0
    out = model.forward(cache.batch([(sequence, prompt)]), cache)
    sequence.length = len(prompt)
    token = int(out.argmax())
    texts = [token]
    drawn = loop.tokens(sequence, token, largest, seed=0, number=1, limit=8)
    for _ in range(4):
        texts.append(next(drawn))
        sequence.length += 1
        assert sequence.n_stepped == sequence.length
    assert texts == answer(engine(model), prompt, 5)
    assert isinstance(cache.states.parts[0].data, torch.Tensor)


def test_what_is_asked_for_is_kept_exactly(model: Transformer) -> None:
    used = engine(model)
    for ids in ([1] * 20, [2] * 6):
        used.evaluate(ids)
        used.checkpoint()
    used.evaluate([3], generated=True)
    assert used.truncate(26) == 26
    assert used.truncate(25) == 20


@pytest.mark.parametrize("backend", [cpu_backend, reference_backend])
@pytest.mark.parametrize("name", ["qwen35", "lfm2", "granitehybrid", "kimi-linear"])
def test_guesses_are_taken_back_by_a_copy(
    name: str, backend: Callable[[], Backend], tmp_path: Path
) -> None:
    """Wherever a batch of guesses is cut, the text goes on as one without them, on the CPU with the
    same bits."""
    is_equal = np.testing.assert_array_equal
    if backend is reference_backend:
        is_equal = partial(np.testing.assert_allclose, rtol=1e-2, atol=5e-3)
    model = load_model(hybrid(name).write(tmp_path / "model.gguf"), backend())[0]
    to_numpy = model.backend.arrays.to_numpy
    prompt, guesses = [5, 4, 3, 2, 1], [7, 8, 9, 10]
    for n_between, n_kept in ((3, 4), (2, 0)):  # with places for the guesses, and with too few
        for n_right in range(1, len(guesses) + 1):
            plain, used = engine(model), Engine(model, CACHE, n_batch=32, n_between=n_between)
            for one in (plain, used):
                one.evaluate(prompt)
            for _ in range(2):  # the second batch is like the first, but for its positions
                at = used.sequence.length
                used.slot.cache.states.mark(used.sequence, len(guesses))
                for token in guesses[:n_right]:
                    plain.evaluate([token], generated=True)
                logits = to_numpy(used.evaluate(guesses, "all", generated=True)).copy()
                if n_kept == 0 and n_right < len(guesses):
                    assert used.truncate(at + n_right) == at
                    used.evaluate(guesses[:n_right], "all", generated=True)
                else:
                    states = used.slot.cache.states
                    (part,) = states.parts
                    all_states = to_numpy(part.data).copy()
                    assert used.truncate(at + n_right) == at + n_right
                    assert np.array_equal(to_numpy(part.data), all_states)  # none is copied
                assert np.isfinite(logits).all()
                is_equal(
                    used.cache.states.copied(used.sequence),
                    plain.cache.states.copied(plain.sequence),
                )
            want = to_numpy(plain.evaluate([11], generated=True))
            is_equal(to_numpy(used.evaluate([11], generated=True)), want)


def test_a_fork_has_no_states_between_guesses(model: Transformer) -> None:
    used = Engine(model, replace(CACHE, n_sequences=2), n_batch=32, n_between=3)
    used.evaluate([5, 4, 3])
    used.evaluate([7, 8, 9], "all", generated=True)
    assert used.cache.reachable(used.sequence, 5) == 5
    other = used.cache.fork(used.sequence, 6)
    assert used.cache.reachable(other, 5) < 5
    assert used.cache.reachable(other, 6) == 6


def test_guesses_taken_back_again_and_again(model: Transformer) -> None:
    """States change places each time, in another order each time."""
    plain, used = engine(model), Engine(model, CACHE, n_batch=32, n_between=3)
    rng = random.Random(4)
    for one in (plain, used):
        one.evaluate([5, 4, 3])
    for _ in range(40):
        guesses = [rng.randrange(N_VOCAB) for _ in range(rng.randint(1, 4))]
        at, n_right = used.sequence.length, rng.randint(1, len(guesses))
        used.evaluate(guesses, "all", generated=True)
        assert used.truncate(at + n_right) == at + n_right
        for token in guesses[:n_right]:
            plain.evaluate([token], generated=True)
        states = (one.cache.states.copied(one.sequence) for one in (plain, used))
        np.testing.assert_array_equal(*states)
