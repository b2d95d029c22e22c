"""On the CPU a token's logits are the same bits alone and in the batches of a server.

Texts of many lengths start at different times, in chunks of any size, beside others that generate
one token or verify several. They lose their rows and are evaluated again, and read pages that
another text has filled. What may matter is what a token sees, and its kind.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from localkv.cache.arrays import Wanted
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import SegmentSpec, Tail, tail_segments
from localkv.cache.pages import Sequence
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.gguf_file import open_gguf
from localkv.loader.synthetic import synthetic_model
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.quant_formats import FORMATS
from support.forward import new_cache, with_params
from support.hybrid_models import hybrid
from support.latent_models import latent_tensors, write_latent
from support.random_model import variant

N_CTX, N_GENERATED = 2304, 12
LONG, SHARED = 1920, 515
"""Tokens of the longest prompt, and how many of them another text begins with."""


@dataclass
class Text:
    """A text on its way through a cache.

    Attributes:
        logits: of each position, alone.
        start: tokens whose rows are another text's.
    """

    ids: list[int]
    n_prompt: int
    sequence: Sequence
    logits: list[bytes] = field(default_factory=list)
    start: int = 0

    @property
    def is_done(self) -> bool:
        return self.sequence.length == len(self.ids)

    def next_part(self, rng: random.Random) -> tuple[list[int], bool, Wanted]:
        """Its next tokens, whether they are generated ones, and which logits are wanted."""
        at, n_prompt = self.sequence.length, self.n_prompt
        if at >= n_prompt:
            n = rng.choice((1, 1, 1, 2, 4, 9))
            return self.ids[at : at + n], True, rng.choice(("last", "all"))
        end = min(at + rng.choice((1, 3, 33, 64, 250, 700)), n_prompt)
        wanted: Wanted = "last" if end == n_prompt else rng.choice(("none", "none", "all"))
        return self.ids[at:end], False, wanted


def row_bytes(logits: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in logits]


def alone(model: Transformer, cache: KVCache, text: Text) -> list[bytes]:
    """The logits of all positions: of a prompt at once, and of one token after the other."""
    sequence, found = cache.new_sequence(), list[bytes]()
    n = text.n_prompt
    for ids in (text.ids[:n], *([token] for token in text.ids[n:])):
        batch = cache.batch([(sequence, ids)], logits="all", generated=bool(found))
        found += row_bytes(model.forward(batch, cache))
        sequence.length += len(ids)
    cache.truncate(sequence, 0)
    return found


def texts_of(model: Transformer, cache: KVCache, rng: random.Random, share: bool) -> list[Text]:
    long = [rng.randrange(60) for _ in range(LONG + N_GENERATED)]
    prompts = [long[:LONG]]
    prompts += [[rng.randrange(60) for _ in range(n)] for n in (1, 5, 40, 257, 300, 700)]
    prompts.append([*long[:SHARED], 3, 1, 4, 1, 5])
    found = list[Text]()
    for prompt in prompts:
        ids = prompt + [rng.randrange(60) for _ in range(N_GENERATED)]
        text = Text(ids, len(prompt), cache.new_sequence())
        text.logits = alone(model, cache, text)
        found.append(text)
    if share:
        found[-1].start = SHARED
    return found


def steps(
    model: Transformer, cache: KVCache, texts: list[Text], rng: random.Random
) -> Iterator[tuple[Text, int, list[bytes]]]:
    """Batches of some texts at a time, until all are done: a text, a position, and the logits that
    were wanted from there on."""
    while any(not text.is_done for text in texts):
        ready = [t for t in texts if not t.is_done and is_ready(cache, t, texts[0].sequence)]
        chosen = rng.sample(ready, rng.randint(1, len(ready)))
        parts = [text.next_part(rng) for text in chosen]
        batch = cache.batch(
            [(text.sequence, ids) for text, (ids, _, _) in zip(chosen, parts, strict=True)],
            logits=[wanted for _, _, wanted in parts],
            generated=[generated for _, generated, _ in parts],
        )
        rows = row_bytes(model.forward(batch, cache))
        for text, (ids, _, wanted) in zip(chosen, parts, strict=True):
            n_rows = {"none": 0, "last": 1, "all": len(ids)}[wanted]
            text.sequence.length += len(ids)
            yield text, text.sequence.length - n_rows, rows[:n_rows]
            del rows[:n_rows]
        assert not rows
        if rng.random() < 0.2:
            lost = rng.choice(texts[1:-1])  # the first and the last share pages
            cache.truncate(lost.sequence, 0)


def is_ready(cache: KVCache, text: Text, source: Sequence) -> bool:
    """Whether the rows that it starts with are there; it takes another sequence's."""
    if text.sequence.length < text.start <= source.length:
        text.sequence = cache.fork(source, text.start)
    return text.sequence.length >= text.start


def check(model: Transformer, seed: int, *segments: SegmentSpec, share: bool = False) -> None:
    cache = new_cache(model, *segments, n_ctx=N_CTX, n_sequences=9)
    rng = random.Random(seed)
    texts = texts_of(model, cache, rng, share)
    n_compared = 0
    for text, position, rows in steps(model, cache, texts, rng):
        for i, row in enumerate(rows, position):
            number = texts.index(text)
            assert row == text.logits[i], f"text {number} of {text.n_prompt}, position {i}"
            n_compared += 1
    assert n_compared > N_GENERATED * len(texts) // 2


def loaded(path: Path) -> Transformer:
    return load_model(open_gguf(path), cpu_backend())[0]


@pytest.mark.parametrize(
    ("shape", "weights", "type_k", "type_v"),
    [
        ("llama-tiny", "q4_0", "q8_0", "q4_0"),
        pytest.param("llama-tiny", "f16", "f16", "f16", marks=pytest.mark.slow),
        pytest.param("moe-tiny", "q4_K", "q4_0", "q4_0", marks=pytest.mark.slow),
    ],
)
def test_texts_together(shape: str, weights: str, type_k: str, type_v: str) -> None:
    model = synthetic_model(shape, weights, cpu_backend())
    check(model, 1, SegmentSpec(type_k, type_v, rotation_k=32), share=True)


@pytest.mark.slow
def test_texts_with_tails_and_windows(tmp_path: Path) -> None:
    path = variant("llama", n_heads=6, head_dim=64, n_kv_heads=2).write(tmp_path / "m.gguf")
    tail = Tail(4, 50, FORMATS["q4_1c"].group_tokens)
    packed = SegmentSpec("q4_1c", "q4_1", 4, 0, 64, tail)
    segments = (SegmentSpec("f16", "f16"), packed, *tail_segments(tail))
    check(loaded(path), 2, *segments)
    check(with_params(loaded(path), window=300), 3, SegmentSpec("q8_0", "q4_0"))


@pytest.mark.slow
def test_texts_of_latents_and_of_states(tmp_path: Path) -> None:
    made = latent_tensors("minicpm3")
    latents = write_latent(tmp_path / "latents.gguf", "minicpm3", made)
    check(loaded(latents), 4, SegmentSpec("f16", "f16"))
    states = hybrid("qwen35").write(tmp_path / "states.gguf")
    check(loaded(states), 5, SegmentSpec("f16", "f16"))
