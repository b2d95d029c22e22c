"""Random recurrent layers on guarded memory, compared with the composed ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from localkv.arch.spec import (
    DeltaNetSpec,
    LayerSpec,
    LayerState,
    Mamba2Spec,
    NormSpec,
    RecurrentSpec,
    ShortConvSpec,
)
from localkv.cache.arrays import Batch, LayerCache, StateRows
from localkv.cache.recurrent_state import CheckpointConfig, RecurrentStates
from localkv.kernels.backend import TokenInputs
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.cpu.layers.chains import LayerChains, norm_cpu
from localkv.kernels.cpu.layers.recurrent import RecurrentLayer
from localkv.kernels.cpu.linear.products import CpuProducts
from localkv.kernels.cpu.runtime.chain import Scratch
from localkv.kernels.layer_weights import (
    DeltaNetWeights,
    LayerWeights,
    Linear,
    Mamba2Weights,
    Norm,
    ShortConvWeights,
)
from localkv.kernels.recurrent import Recurrence, recurrent_mixers
from localkv.quant_formats import FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor
from support.guarded_memory import GuardedMemory

N_EMBD = 16


def _spec(rng: random.Random) -> RecurrentSpec:
    norm = NormSpec("ssm_norm", "rms", 1e-5)
    kernel = rng.choice((2, 3, 4))
    kind = rng.choice(("delta", "conv", "mamba"))
    if kind == "conv":
        return ShortConvSpec(16 * rng.choice((1, 3, 17)), kernel)
    groups, times = rng.choice((1, 2, 3)), rng.choice((1, 2))
    size = 16 * rng.choice((1, 2, 3, 4))
    if kind == "delta":
        in_turn = rng.random() < 0.5
        return DeltaNetSpec(groups, groups * times, size, kernel, norm, in_turn)
    state = 16 * rng.choice((1, 2))
    return Mamba2Spec(groups * times, size, state, groups, kernel, rng.choice((norm, None)))


def recurrent_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """A batch of some sequences after a state of any values."""
    draw = np.random.default_rng(rng.randrange(1 << 30))
    spec = _spec(rng)
    lengths = [rng.choice((1, 2, 5, 19)) for _ in range(rng.choice((1, 2, 3)))]
    say(f"{spec}, sequences of {lengths}")
    products = CpuProducts()

    def vector(*shape: int) -> Any:
        return memory.array(draw.standard_normal(shape).astype(np.float32) / 2, "a vector")

    def linear(n_out: int) -> Linear:
        rows = vector(n_out, N_EMBD).view(np.uint8)
        return Linear(products.prepare(PackedTensor(FORMATS["f32"], rows, (n_out, N_EMBD))))

    def norm(n: int) -> Norm:
        return Norm(NormSpec("ssm_norm", "rms", 1e-5), vector(n))

    weights: Any
    match spec:
        case DeltaNetSpec():
            n_heads, table = spec.n_value_heads, vector(spec.conv_channels, spec.conv_kernel)
            a, dt = -np.abs(vector(n_heads)), vector(n_heads)
            made = linear(spec.conv_channels), linear(spec.width), linear(n_heads), linear(n_heads)
            last = norm(spec.head_dim), linear(spec.width)
            weights = DeltaNetWeights(*made, table, dt, a, *last)
        case ShortConvSpec():
            made3, table = linear(3 * spec.width), vector(spec.width, spec.kernel)
            weights = ShortConvWeights(made3, table, linear(spec.width))
        case Mamba2Spec():
            channels, n_heads = spec.conv_channels, spec.n_heads
            a, dt, d = -np.abs(vector(n_heads)), vector(n_heads), vector(n_heads)
            weights = Mamba2Weights(
                linear(spec.width + channels + n_heads),
                vector(channels, spec.conv_kernel),
                vector(channels) if rng.random() < 0.5 else None,
                dt,
                a,
                d,
                None if spec.norm is None else norm(spec.width),
                linear(spec.width),
            )
    layer, of = LayerWeights(weights, None, norm(N_EMBD), None), LayerSpec(spec, None, None, None)
    n_tokens = sum(lengths)
    own = NumpyArrays()
    states = RecurrentStates(
        [LayerState(0, spec.state)],
        arrays=lambda layer: own,
        n_sequences=4,
        config=CheckpointConfig(),
        n_between=n_tokens // 4 + 1,
    )
    starts, slots = np.cumsum([0, *lengths]), draw.permutation(4)[: len(lengths)]
    after = np.repeat(slots, lengths)
    for at in range(n_tokens):  # some go to places of their own, but for each sequence's last
        if at + 1 not in starts and draw.random() < 0.5:
            after[at] = 4 + at
    batch = cast(
        Batch,
        _SomeBatch(
            tuple(starts.tolist()),
            memory.array(starts.astype(np.int32), "starts"),
            memory.array(slots, "slots"),
            memory.array(after, "after"),
        ),
    )
    x = vector(int(starts[-1]), N_EMBD)
    mixers = recurrent_mixers(Recurrence(norm_cpu, products.linear))
    fast = RecurrentLayer(LayerChains(Scratch()), mixers, products)
    results = []
    for mix in (mixers[type(spec)], fast):
        data = memory.array(np.zeros_like(states.parts[0].data), "states")
        rows = _views(states.layers[0], data)
        cache = LayerCache((), state=rows)
        out = [mix(x, layer, of, TokenInputs(None, None), cache, batch) for _ in range(2)]
        results.append((out[0], out[1], rows.rows))
    for ours, theirs in zip(*results, strict=True):
        assert np.isfinite(theirs).all()
        np.testing.assert_allclose(theirs, ours, rtol=2e-3, atol=2e-4)


class _SomeBatch:
    """What recurrent layers read of one."""

    def __init__(self, starts: tuple[int, ...], table: Any, slots: Any, after: Any) -> None:
        self.starts, self.start_table, self.slots, self.after = starts, table, slots, after


def _views(rows: StateRows, data: Any) -> StateRows:
    """A copy of the places in other memory."""
    n = rows.rows[0].size
    held = data[:, rows.rows_at : rows.rows_at + n].reshape(rows.rows.shape)
    if rows.memory is None:
        return StateRows(held, None, data, rows.rows_at, rows.memory_at, rows.n_slots)
    n = rows.memory[0].size
    memory = data[:, rows.memory_at : rows.memory_at + n].reshape(rows.memory.shape)
    return StateRows(held, memory, data, rows.rows_at, rows.memory_at, rows.n_slots)
