"""Recurrent mixers on the CPU, each one chain from the norm to what the output matrix reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.arch.mixer_spec import DeltaNetSpec, Mamba2Spec, Mixer, ShortConvSpec
from localkv.arch.spec import LayerSpec
from localkv.cache.kv_cache import Batch, LayerCache
from localkv.cache.recurrent_state import StateRows
from localkv.kernels.backend import Mix, TokenInputs
from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.arrays import Floats
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.layer_chains import LayerChains, runs
from localkv.kernels.cpu.linear.products import CpuProducts, add_products, with_bias
from localkv.kernels.cpu.recurrent.job import ConvJob, GatedConvJob, OutputJob, ScanJob
from localkv.kernels.cpu.recurrent.kernels import (
    OUTPUT,
    conv_source,
    has_recurrent_kernel,
    scan_source,
    vectors_of,
)
from localkv.kernels.cpu.row_operations import norm_cpu
from localkv.kernels.cpu.runtime.chain import Chain, Item, Memory, Where
from localkv.kernels.layer_weights import (
    DeltaNetWeights,
    LayerWeights,
    Linear,
    Mamba2Weights,
    ShortConvWeights,
)
from localkv.simd.lanes import LANES
from localkv.system.threads import n_threads

BLOCK = 256
"""Channels of a piece of a convolution, at most."""


class RecurrentLayer:
    """As `Backend.mixers` has it.

    Args:
        composed: the mixers put together from primitives, for sizes that have no kernel.
        products: for matrices that no chain can run.
    """

    def __init__(
        self, chains: LayerChains, composed: Mapping[type[Mixer], Mix], products: CpuProducts
    ) -> None:
        self.chains = chains
        self.composed = composed
        self.products = products
        self.tables = dict[int, tuple[Any, Floats]]()

    def __call__(
        self,
        x: Floats,
        layer: LayerWeights,
        spec: LayerSpec,
        inputs: TokenInputs,
        cache: LayerCache,
        batch: Batch,
    ) -> Floats:
        mixer, state, weights = spec.mixer, cache.state, layer.mixer
        assert isinstance(mixer, (DeltaNetSpec, ShortConvSpec, Mamba2Spec))
        assert state is not None
        if not has_recurrent_kernel(mixer):
            composed = self.composed[type(mixer)]
            return np.asarray(composed(x, layer, spec, inputs, cache, batch))
        n_tokens, n_sequences = len(x), len(batch.slots)
        linears = _projections(weights)
        values = _batch_values(batch, state, n_tokens)
        fused = runs(*linears.values())
        if fused:
            values["x"] = np.ascontiguousarray(x)
        else:
            h = x if layer.attn_norm is None else norm_cpu(x, layer.attn_norm)
            values |= {name: self.products.linear(h, linear) for name, linear in linears.items()}

        def make(chain: Chain) -> None:
            places: dict[str, Where] = {name: name for name in linears}
            if fused:
                h = self.chains.add_norm(chain, n_tokens, layer.attn_norm)
                places = {
                    name: chain.take(4 * n_tokens * linear.weight.shape[0])
                    for name, linear in linears.items()
                }
                wanted = [with_bias(linear, places[name]) for name, linear in linears.items()]
                add_products(chain, h, n_tokens, wanted)
            add = _Steps(self, chain, n_tokens, n_sequences, state)
            match mixer, weights:
                case DeltaNetSpec(), DeltaNetWeights():
                    add.delta_net(places, mixer, weights)
                case ShortConvSpec(), ShortConvWeights():
                    add.short_conv(places, mixer, weights)
                case Mamba2Spec(), Mamba2Weights():
                    add.mamba2(places, mixer, weights)

        made_for = (layer, spec, state.data)
        chain = self.chains.get("recurrent", made_for, n_tokens, make, n_sequences)
        out = np.empty((n_tokens, mixer.width), np.float32)
        chain.run(out=out, **values)
        return out

    def columns_first(self, table: Floats) -> Floats:
        """A convolution's weights [kernel, channels], kept."""
        known = self.tables.get(id(table))
        if known is None or known[0] is not table:
            known = table, np.ascontiguousarray(table.T)
            self.tables[id(table)] = known
        return known[1]


def _projections(weights: Any) -> dict[str, Linear]:
    """The products of a layer's normed rows."""
    match weights:
        case DeltaNetWeights():
            return {
                "mixed": weights.attn_qkv,
                "z": weights.attn_gate,
                "beta": weights.ssm_beta,
                "alpha": weights.ssm_alpha,
            }
        case ShortConvWeights():
            return {"mixed": weights.in_proj}
        case Mamba2Weights():
            return {"mixed": weights.ssm_in}
    raise BoundsError(f"{type(weights).__name__} are no weights of a recurrent layer")


def _batch_values(batch: Batch, state: StateRows, n_tokens: int) -> dict[str, int | NDArray[Any]]:
    """What all chains are given of a batch.

    Raises:
        BoundsError: a sequence has no place among the states, or the tokens are others.
    """
    starts = batch.starts
    if starts[-1] != n_tokens or any(a > b for a, b in pairwise(starts)):
        raise BoundsError(f"{n_tokens} tokens of sequences at {starts}")
    if not 0 <= int(batch.slots.min()) <= int(batch.slots.max()) < len(state.data):
        raise BoundsError(f"{len(state.data)} states of sequences, and slots {batch.slots}")
    return {"starts": batch.start_table, "slots": batch.slots, "states": state.data}


class _Steps:
    """Adds the steps behind the products to a chain."""

    def __init__(
        self,
        owner: RecurrentLayer,
        chain: Chain,
        n_tokens: int,
        n_sequences: int,
        state: StateRows,
    ) -> None:
        self.owner = owner
        self.chain = chain
        self.n_tokens = n_tokens
        self.n_sequences = n_sequences
        self.state = state

    def _common(self, state_at: int) -> dict[str, Item]:
        """Of every job."""
        return {
            "n_sequences": self.n_sequences,
            "starts": Memory("starts", 4 * (self.n_sequences + 1)),
            "slots": Memory("slots", 8 * self.n_sequences),
            "states": Memory("states", self.state.data.nbytes),
            "slot_stride": 4 * self.state.data.shape[1],
            "state_at": 4 * state_at,
        }

    def _rows(self, where: Where, n: int) -> Memory:
        return Memory(where, 4 * self.n_tokens * n)

    def _threads(self, n_pieces: int) -> int:
        return min(n_threads(), n_pieces * self.n_sequences)

    def _add_conv(
        self,
        weight: Floats,
        x: Item,
        x_at: int,
        stride: int,
        block: int,
        **more: Item,
    ) -> Where:
        """The convolved rows."""
        channels, kernel = weight.shape
        out = self.chain.take(4 * self.n_tokens * channels)
        table = self.owner.columns_first(weight)
        job = ConvJob(
            next_piece=0,
            **self._common(self.state.rows_at),
            n_channels=channels,
            block=block,
            x=x,
            x_at=x_at,
            stride=stride,
            weight=Memory(table, table.nbytes),
            out=self._rows(out, channels),
            **more,
        )
        worker = specialized(conv_source(kernel))["conv"]
        self.chain.add(worker, job, self._threads(channels // block))
        return out

    def delta_net(
        self, places: dict[str, Where], spec: DeltaNetSpec, weights: DeltaNetWeights
    ) -> None:
        size, channels, n_heads = spec.head_dim, spec.conv_channels, spec.n_value_heads
        row, n_keys, norm = 4 * channels, spec.n_key_heads, weights.ssm_norm
        mixed = self._add_conv(
            weights.ssm_conv1d,
            self._rows(places["mixed"], channels),
            0,
            row,
            size,
            n_unit=2 * n_keys,
            n_scaled=n_keys,
            numbers=self.owner.chains.floats(norm.spec.eps, 1 / math.sqrt(size)),
        )
        part = 4 * size * n_keys
        job = ScanJob(
            next_piece=0,
            **self._common(self.state.memory_at),
            n_heads=n_heads,
            n_rows=size,
            n_columns=size,
            n_keys=n_keys,
            times=0 if spec.heads_in_turn else n_heads // n_keys,
            mixed=self._rows(mixed, channels),
            stride=row,
            q_at=0,
            k_at=part,
            v_at=2 * part,
            alpha=self._rows(places["alpha"], n_heads),
            alpha_at=0,
            alpha_stride=4 * n_heads,
            beta=self._rows(places["beta"], n_heads),
            dt=Memory(weights.ssm_dt, 4 * n_heads),
            a=Memory(weights.ssm_a, 4 * n_heads),
            out=self._rows("out", spec.width),
        )
        self._add_scan(spec, job)
        output = OutputJob(
            next_row=0,
            n_tokens=self.n_tokens,
            n_groups=n_heads,
            n=size,
            x=self._rows("out", spec.width),
            z=self._rows(places["z"], spec.width),
            z_stride=4 * spec.width,
            weight=Memory(norm.weight, 4 * size),
            eps=self.owner.chains.floats(norm.spec.eps),
        )
        worker = specialized(OUTPUT)["normed_then_gated"]
        self.chain.add(worker, output, min(n_threads(), self.n_tokens))

    def _add_scan(self, spec: DeltaNetSpec | Mamba2Spec, job: ScanJob) -> None:
        n_parts = spec.head_dim // (LANES * vectors_of(spec.head_dim))
        memory = spec.state.memory
        assert memory
        worker = specialized(scan_source(spec))["scan"]
        self.chain.add(worker, job, self._threads(memory[0] * n_parts))

    def mamba2(self, places: dict[str, Where], spec: Mamba2Spec, weights: Mamba2Weights) -> None:
        width, channels, n_heads = spec.width, spec.conv_channels, spec.n_heads
        n_projected = width + channels + n_heads
        row, part = 4 * n_projected, 4 * spec.n_groups * spec.state_dim
        projected = self._rows(places["mixed"], n_projected)
        bias = weights.ssm_conv1d_bias
        mixed = self._add_conv(
            weights.ssm_conv1d,
            projected,
            4 * width,
            row,
            _block(channels),
            bias=0 if bias is None else Memory(bias, 4 * channels),
        )
        every = self._rows(mixed, channels)
        job = ScanJob(
            next_piece=0,
            **self._common(self.state.memory_at),
            n_heads=n_heads,
            n_rows=spec.state_dim,
            n_columns=spec.head_dim,
            n_keys=spec.n_groups,
            times=n_heads // spec.n_groups,
            mixed=every,
            stride=4 * channels,
            q_at=4 * width + part,
            k_at=4 * width,
            v_at=0,
            alpha=projected,
            alpha_at=4 * (width + channels),
            alpha_stride=row,
            dt=Memory(weights.ssm_dt, 4 * n_heads),
            a=Memory(weights.ssm_a, 4 * n_heads),
            out=self._rows("out", width),
        )
        self._add_scan(spec, job)
        norm, n = weights.ssm_norm, width // spec.n_groups
        d = np.repeat(weights.ssm_d, spec.head_dim)
        output = OutputJob(
            next_row=0,
            n_tokens=self.n_tokens,
            n_groups=spec.n_groups,
            n=n,
            x=self._rows("out", width),
            z=projected,
            z_stride=row,
            weight=0 if norm is None else Memory(norm.weight, 4 * width),
            weight_stride=4 * n,
            eps=0 if norm is None else self.owner.chains.floats(norm.spec.eps),
            skipped=every,
            skipped_stride=4 * channels,
            d=Memory(d, 4 * width),
        )
        worker = specialized(OUTPUT)["gated_then_normed"]
        self.chain.add(worker, output, min(n_threads(), self.n_tokens))

    def short_conv(
        self, places: dict[str, Where], spec: ShortConvSpec, weights: ShortConvWeights
    ) -> None:
        table, block = self.owner.columns_first(weights.conv), _block(spec.width)
        job = GatedConvJob(
            next_piece=0,
            **self._common(self.state.rows_at),
            n_channels=spec.width,
            block=block,
            x=self._rows(places["mixed"], 3 * spec.width),
            weight=Memory(table, table.nbytes),
            out=self._rows("out", spec.width),
        )
        worker = specialized(conv_source(spec.kernel))["gated_conv"]
        self.chain.add(worker, job, self._threads(spec.width // block))


def _block(n_channels: int) -> int:
    """Channels of a piece: a divisor of all, in whole vectors."""
    n = n_channels // LANES
    return LANES * next(d for d in range(min(n, BLOCK // LANES), 0, -1) if n % d == 0)
