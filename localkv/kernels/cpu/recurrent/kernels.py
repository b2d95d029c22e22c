"""Which kernels a recurrent layer takes, without Numba."""

from __future__ import annotations

from collections.abc import Iterator

from localkv.arch.spec import DeltaNetSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.recurrent.pieces import vectors_of
from localkv.simd.lanes import LANES

OUTPUT = KernelSource("recurrent/output")


def conv_source(kernel: int) -> KernelSource:
    """Of convolutions over so many tokens."""
    return KernelSource("recurrent/conv", {"KERNEL": kernel})


def scan_source(spec: DeltaNetSpec | Mamba2Spec) -> KernelSource:
    """Of a layer's memories."""
    parameters = {"PREDICTS": isinstance(spec, DeltaNetSpec), "VECTORS": vectors_of(spec.head_dim)}
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
