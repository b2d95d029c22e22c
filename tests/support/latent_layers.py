"""Layers with latent attention of random weights, on the CPU."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from localkv.arch.spec import (
    AttentionParams,
    CacheGroup,
    LatentAttentionSpec,
    LayerSpec,
    NormSpec,
    RopeSpec,
)
from localkv.cache.arrays import Batch
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import GroupLayout, SegmentSpec, Tail
from localkv.kernels.backend import Backend, StackLayer, TokenBatch, TokenInputs
from localkv.kernels.layer_weights import LatentAttentionWeights, LayerWeights, Linear, Norm
from localkv.kernels.rope import rope_frequencies, rope_table
from localkv.loader.synthetic import random_rows
from localkv.quant_formats import FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor
from support.tail_checks import segments as tail_rows

N_EMBD, N_HEADS, NOPE, ROPE, VALUE, LATENT, RANK = 64, 4, 32, 32, 48, 64, 96
RMS = NormSpec("norm", "rms", 1e-5)


F16 = SegmentSpec("f16", "f16")


@dataclass(frozen=True)
class Options:
    """What such layers differ in.

    Attributes:
        type_name: of matrices.
        low_rank: q has a latent.
        rope: pairs are neighbours or not; None for no RoPE.
        scaled: q grows with its position.
        biased: matrices have biases.
        segments: of the cache.
    """

    type_name: str = "q4_0"
    low_rank: bool = True
    rope: bool | None = True
    scaled: bool = False
    biased: bool = False
    segments: tuple[SegmentSpec, ...] = (F16,)


def any_options(rng: random.Random) -> Options:
    pairs = ("f16", "f32"), ("q8_0", "q4_0"), ("q4_0", "bf16")
    turn = rng.choice((0, 32))
    return Options(
        rng.choice(("q4_0", "q8_0", "f32", "bf16", "q5_1")),
        rng.random() < 0.5,
        rng.choice((None, True, False)),
        rng.random() < 0.3,
        rng.random() < 0.3,
        rng.choice(
            (
                (SegmentSpec(*rng.choice(pairs), 0, turn, turn),),
                tail_rows(Tail(*rng.choice(((0, 3), (2, 4)))), *rng.choice(pairs), turn),
                tail_rows(
                    Tail(3, rng.choice((0, 5)), 32), "q4_1c", rng.choice(("f16", "kv3_1")), turn
                ),
            )
        ),
    )


class LatentModel:
    """A layer that has only a mixer, and a cache for it."""

    def __init__(self, options: Options, backend: Backend) -> None:
        self.backend, self.options = backend, options
        self.draw = np.random.default_rng(5)
        rope = None if options.rope is None else RopeSpec(ROPE, interleaved=options.rope)
        attn = LatentAttentionSpec(
            N_HEADS,
            LATENT,
            ROPE,
            NOPE,
            VALUE,
            RANK if options.low_rank else 0,
            AttentionParams((NOPE + ROPE) ** -0.5),
            rope,
            RMS,
            RMS if options.low_rank else None,
        )
        weights = LatentAttentionWeights(
            attn_q=self._linear(N_HEADS * (NOPE + ROPE), RANK if options.low_rank else N_EMBD),
            attn_kv_a_mqa=self._linear(LATENT + ROPE, N_EMBD),
            attn_kv_a_norm=self._norm(LATENT),
            attn_k_b=self._matrix(N_HEADS, LATENT, NOPE),
            attn_v_b=self._matrix(N_HEADS, VALUE, LATENT),
            output=self._linear(N_EMBD, N_HEADS * VALUE),
            attn_q_a=self._linear(RANK, N_EMBD) if options.low_rank else None,
            attn_q_a_norm=self._norm(RANK) if options.low_rank else None,
        )
        self.spec = LayerSpec(attn, None, RMS, None)
        self.weights = LayerWeights(weights, None, self._norm(N_EMBD), None)
        self.stack = (
            StackLayer(self.spec, self.weights, ((type(attn), self.spec, self.weights),), 0, 0),
        )

    def cache(self) -> KVCache:
        group = CacheGroup(1, LATENT, ROPE, 0, (0,), is_latent=True)
        layouts = [GroupLayout(group, self.options.segments)]
        return KVCache(layouts, n_ctx=256, arrays=self.backend.arrays)

    def given(self, cache: KVCache, batch: Batch) -> TokenBatch:
        attn, positions = self.spec.mixer, batch.positions
        assert isinstance(attn, LatentAttentionSpec)
        rope = None
        if attn.rope is not None:
            rope = rope_table(
                rope_frequencies(attn.rope), positions, attn.rope, self.backend.arrays
            )
        scale = (1 + positions / 7).astype(np.float32) if self.options.scaled else None
        inputs = TokenInputs(rope, scale)
        return TokenBatch([inputs], cache.layers, batch, None)

    def _matrix(self, *shape: int) -> PackedTensor:
        fmt = FORMATS[self.options.type_name]
        rows = random_rows(fmt, int(np.prod(shape[:-1])), shape[-1], generator=self.draw)
        return self.backend.prepare(PackedTensor(fmt, rows.reshape(*shape[:-1], -1), shape))

    def _linear(self, n_out: int, n_in: int) -> Linear:
        bias = self.draw.standard_normal(n_out).astype(np.float32) if self.options.biased else None
        return Linear(self._matrix(n_out, n_in), bias)

    def _norm(self, n: int) -> Norm:
        return Norm(RMS, (1 + 0.3 * self.draw.standard_normal(n)).astype(np.float32))


def check_latents(options: Options, backend: Backend) -> None:
    """Chains give the bits of what primitives compose, and all layers at once the bits of one.

    Several segments are merged by a chain, and as composed by NumPy, whose exponentials differ.
    """
    model = LatentModel(options, backend)
    mixer, draw = backend.mixers[LatentAttentionSpec], np.random.default_rng(1)
    results = []
    composed = mixer.composed  # type: ignore[attr-defined]
    one_segment = len(options.segments) == 1
    for mix, together in ((mixer, True), (mixer, False), (composed, False)):
        cache, draw, out = model.cache(), np.random.default_rng(1), list[bytes]()
        sequence = cache.new_sequence()
        news = ((9, False), (1, False), (2, True), *((1, True),) * (2 if one_segment else 30))
        for n_tokens, generated in news:
            batch = cache.batch([(sequence, [0] * n_tokens)], generated=generated)
            x = draw.standard_normal((n_tokens, N_EMBD)).astype(np.float32)
            given = model.given(cache, batch)
            at_once = None
            if together:
                at_once = backend.run_layers(x, model.stack, given)
                assert (at_once is not None) == (generated and n_tokens == 1)
            if at_once is None:
                y = mix(x, model.weights, model.spec, given.inputs[0], cache.layers[0], batch)
                assert np.isfinite(y).all()
                at_once = backend.out_residual(x, y, model.weights, model.spec)
            out.append(at_once.tobytes())
            sequence.length += n_tokens
        results.append(out)
    at_once, one_by_one, by_numpy = results
    assert at_once == one_by_one
    if one_segment:
        assert at_once == by_numpy
    else:
        for ours, theirs in zip(at_once, by_numpy, strict=True):
            np.testing.assert_allclose(
                *(np.frombuffer(x, np.float32) for x in (ours, theirs)), rtol=1e-4, atol=1e-4
            )
