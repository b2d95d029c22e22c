"""The steps of a recurrent mixer after its products, for a chain, and their kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from localkv.arch.spec import DeltaNetSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec
from localkv.cache.arrays import StateRows
from localkv.kernels.cpu.arrays import Floats
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.layers.chains import RESIDUALS, LayerChains
from localkv.kernels.cpu.linear.jobs import DecayJob
from localkv.kernels.cpu.recurrent.jobs import ConvJob, GatedConvJob, OutputJob, ScanJob, vectors_of
from localkv.kernels.cpu.runtime.chain import Chain, Item, Memory, Where
from localkv.kernels.layer_weights import DeltaNetWeights, Mamba2Weights, ShortConvWeights
from localkv.simd import LANES
from localkv.system.threads import n_threads

OUTPUT = KernelSource("recurrent/output")


def conv_source(kernel: int) -> KernelSource:
    """The kernel of convolutions over `kernel` tokens."""
    return KernelSource("recurrent/conv", {"KERNEL": kernel})


def scan_source(spec: DeltaNetSpec | Mamba2Spec) -> KernelSource:
    """The kernel of a layer's memories."""
    parameters: dict[str, bool | int] = {
        "PREDICTS": isinstance(spec, DeltaNetSpec),
        "VECTORS": vectors_of(spec.head_dim),
    }
    if isinstance(spec, DeltaNetSpec) and spec.fades_by_channel:
        parameters["BY_CHANNEL"] = True
    return KernelSource("recurrent/scan", parameters)


def has_recurrent_kernel(spec: RecurrentSpec) -> bool:
    """Whether its channels are whole vectors."""
    match spec:
        case DeltaNetSpec():
            return spec.head_dim % LANES == 0
        case ShortConvSpec():
            return spec.width % LANES == 0
    sizes = (spec.head_dim, spec.width // spec.n_groups, spec.conv_channels)
    return not any(size % LANES for size in sizes)


def recurrent_sources(spec: RecurrentSpec) -> Iterator[KernelSource]:
    """All that a layer takes."""
    if not has_recurrent_kernel(spec):
        return
    match spec:
        case ShortConvSpec():
            yield conv_source(spec.kernel)
        case DeltaNetSpec() | Mamba2Spec():
            yield conv_source(spec.conv_kernel)
            yield scan_source(spec)
            yield OUTPUT
            if isinstance(spec, DeltaNetSpec) and spec.fades_by_channel:
                yield RESIDUALS


BLOCK = 256
"""Channels of a piece of a convolution, at most."""


class RecurrentSteps:
    """Adds the steps after the products to a chain.

    Args:
        chains: keep numbers.
        chain: to which steps are added; it is given the arrays "starts", "slots", "after", "states"
            and "out" when it runs.
        state: the layer's.
    """

    def __init__(
        self, chains: LayerChains, chain: Chain, n_tokens: int, n_sequences: int, state: StateRows
    ) -> None:
        self.chains = chains
        self.chain = chain
        self.n_tokens = n_tokens
        self.n_sequences = n_sequences
        self.state = state

    def _common(self, state_at: int) -> dict[str, Item]:
        """Items of every job."""
        return {
            "n_sequences": self.n_sequences,
            "starts": Memory("starts", 4 * (self.n_sequences + 1)),
            "slots": Memory("slots", 8 * self.n_sequences),
            "after": Memory("after", 8 * self.n_tokens),
            "states": Memory("states", self.state.data.nbytes),
            "slot_stride": 4 * self.state.data.shape[1],
            "state_at": 4 * state_at,
        }

    def _rows(self, where: Where, n: int) -> Memory:
        return Memory(where, 4 * self.n_tokens * n)

    def _threads(self, n_pieces: int) -> int:
        return min(n_threads(), n_pieces * self.n_sequences)

    def _add_conv(
        self, weight: Floats, x: Item, x_at: int, stride: int, block: int, **more: Item
    ) -> Where:
        """The convolved rows."""
        channels, kernel = weight.shape
        out = self.chain.take(4 * self.n_tokens * channels)
        table = np.ascontiguousarray(weight.T)
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
            numbers=self.chains.floats(norm.spec.eps, 1 / math.sqrt(size)),
        )
        part, n_decays = 4 * size * n_keys, n_heads
        if spec.fades_by_channel:
            n_decays = n_heads * size
            self._add_decays(places["alpha"], spec, weights)
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
            alpha=self._rows(places["alpha"], n_decays),
            alpha_at=0,
            alpha_stride=4 * n_decays,
            beta=self._rows(places["beta"], n_heads),
            dt=0 if spec.fades_by_channel else Memory(weights.ssm_dt, 4 * n_heads),
            a=0 if spec.fades_by_channel else Memory(weights.ssm_a, 4 * n_heads),
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
            eps=self.chains.floats(norm.spec.eps),
            is_sigmoid=int(spec.gate_activation == "sigmoid"),
        )
        worker = specialized(OUTPUT)["normed_then_gated"]
        self.chain.add(worker, output, min(n_threads(), self.n_tokens))

    def _add_decays(self, alpha: Where, spec: DeltaNetSpec, weights: DeltaNetWeights) -> None:
        """Decays by channel, in the place of alpha."""
        n_heads, least = spec.n_value_heads, spec.least_log_decay
        job = DecayJob(
            next_row=0,
            n_rows=self.n_tokens,
            n_heads=n_heads,
            n=spec.head_dim,
            x=self._rows(alpha, spec.width),
            dt=Memory(weights.ssm_dt, 4 * spec.width),
            a=Memory(weights.ssm_a, 4 * n_heads),
            least=self.chains.floats(least) if least else 0,
        )
        worker = specialized(RESIDUALS)["decays"]
        self.chain.add(worker, job, min(n_threads(), self.n_tokens))

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
            eps=0 if norm is None else self.chains.floats(norm.spec.eps),
            skipped=every,
            skipped_stride=4 * channels,
            d=Memory(d, 4 * width),
        )
        worker = specialized(OUTPUT)["gated_then_normed"]
        self.chain.add(worker, output, min(n_threads(), self.n_tokens))

    def short_conv(
        self, places: dict[str, Where], spec: ShortConvSpec, weights: ShortConvWeights
    ) -> None:
        table, block = np.ascontiguousarray(weights.conv.T), _block(spec.width)
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
