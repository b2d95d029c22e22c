"""Products with packed matrices on the CPU.

`CpuProducts.prepare` lays a matrix out anew when it is loaded (`cpu_linear_panels.py`), and its
products read that layout as it is: no weight is ever decoded into memory. Formats without a kernel
are decoded tile by tile, as in `linear.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from localkv.kernels.cpu_linear_blocks import PANEL_FORMATS
from localkv.kernels.cpu_linear_kernels import (
    ACTIVATION_BLOCK_BYTES,
    JOB_SIZE,
    panel_workers,
    run_product,
)
from localkv.kernels.cpu_linear_panels import LANES, LAYOUTS, Bytes, PanelArena, fill_panels
from localkv.kernels.cpu_threads import use_torch_threads
from localkv.kernels.layer_weights import Linear
from localkv.kernels.linear import matmul as matmul_by_tile
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.simd.cpu_features import HAS_VNNI

LINEAR_KERNEL = (
    "packed panels, activations in 8 bits (AVX512-VNNI)" if HAS_VNNI else "packed panels, float32"
)

CHUNK_PANELS = 8
"""The most panels that a thread takes at a time; they stay in its cache from tile to tile."""

CHUNKS_PER_THREAD = 8
"""How finely work is divided where there is little, so that threads end together."""


@dataclass(frozen=True)
class PanelTensor(PackedTensor):
    """A matrix, or a stack of them, in panels.

    `rows` are still the file's, so that single rows can be decoded (a tied output matrix is the
    embedding, too); the products do not touch them, so that they need no memory.

    Attributes:
        panels: uint8 [..., panels of a matrix, bytes of a panel].
    """

    panels: Bytes

    def __getitem__(self, index: int | slice | Tensor) -> PackedTensor:
        """A matrix of a stack keeps its panels; rows and parts of a matrix do not."""
        part = super().__getitem__(index)
        if len(part.shape) < 2 or len(part.shape) == len(self.shape):
            return part
        assert isinstance(index, int)
        return PanelTensor(part.format, part.rows, part.shape, self.panels[index])


class CpuProducts:
    """Products of one backend: memory for panels, and scratch, which one thread uses at a time."""

    def __init__(self) -> None:
        self._arena = PanelArena()
        self._activations = np.empty(0, np.uint8)
        self._job = np.zeros(JOB_SIZE, np.int64)

    def prepare(self, weight: PackedTensor) -> PackedTensor:
        """A matrix [n_out, n_in] or a stack [n_experts, n_out, n_in], as `matmul` wants it.

        The result is `weight` itself where there is no kernel for its format.
        """
        layout = LAYOUTS.get(weight.format.name)
        if layout is None:
            return weight
        panel_workers(weight.format.name)  # compiles, or loads from Numba's cache
        *stack, n_out, n_in = weight.shape
        n_panels = -(-n_out // LANES)
        shape = (*stack, n_panels, layout.panel_bytes(n_in))
        panels = self._arena.take(int(np.prod(shape))).reshape(shape)
        use_torch_threads()
        fill_panels(
            weight.rows.flatten(0, -2).numpy(),
            n_out,
            layout.format.block_bytes,
            layout.record_blocks,
            layout.record_bytes,
            layout.table,
            panels.reshape(-1, shape[-1]),
        )
        return PanelTensor(weight.format, weight.rows, weight.shape, panels)

    def matmul(self, x: Tensor, weight: PackedTensor) -> Tensor:
        """x float32 [tokens, n_in] @ weight [n_out, n_in].T -> float32 [tokens, n_out]."""
        if not isinstance(weight, PanelTensor):
            return matmul_by_tile(x, weight)
        x = x.contiguous()
        n_tokens, n_in = x.shape
        n_out = weight.shape[0]
        fmt = PANEL_FORMATS[weight.format.name]
        n_records = fmt.layout.n_records(n_in)
        n_blocks = n_records * fmt.record_blocks
        n_panels, panel_bytes = weight.panels.shape
        n_threads = use_torch_threads()
        out = torch.empty(n_tokens, n_out)
        chunk = max(1, min(CHUNK_PANELS, n_panels // (n_threads * CHUNKS_PER_THREAD)))
        self._job[:] = (
            0,
            0,
            x.data_ptr(),
            n_tokens,
            n_in,
            n_blocks,
            self._scratch(n_tokens * n_blocks * ACTIVATION_BLOCK_BYTES),
            weight.panels.ctypes.data,
            panel_bytes,
            n_records,
            n_out,
            chunk,
            out.data_ptr(),
        )
        pack, multiply = panel_workers(weight.format.name)
        run_product(pack, multiply, self._job.ctypes.data, n_tokens, n_threads)
        return out

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        """x [tokens, n_in] -> [tokens, n_out]."""
        y = self.matmul(x, layer.weight)
        return y if layer.bias is None else y.add_(layer.bias)

    def _scratch(self, n_bytes: int) -> int:
        """Address of at least `n_bytes`, the same memory every time."""
        if n_bytes > len(self._activations):
            self._activations = np.empty(n_bytes, np.uint8)
        return self._activations.ctypes.data
