"""Products with packed matrices on the CPU.

`CpuProducts.prepare` lays a matrix out anew when it is loaded (`cpu_linear_panels.py`), and its
products read that layout as it is: no weight is ever decoded into memory. F32, F16 and BF16 rows
are read as in the file (`cpu_linear_rows.py`). Formats without a kernel, and these three with many
tokens, are decoded tile by tile, as in `linear.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from threading import get_ident

import numpy as np
import torch
from torch import Tensor

from localkv.kernels.cpu_linear_blocks import BLOCK
from localkv.kernels.cpu_linear_kernels import (
    ACTIVATION_BLOCK_BYTES,
    JOB_SIZE,
    panel_workers,
    run_product,
    source_hash,
)
from localkv.kernels.cpu_linear_panels import (
    LAYOUTS,
    Bytes,
    PanelArena,
    PanelLayout,
    fill_panels,
)
from localkv.kernels.cpu_linear_rows import (
    MAX_TOKENS,
    ROW_FORMATS,
    rows_worker,
    run_rows_product,
)
from localkv.kernels.cpu_panel_bytes import LANES
from localkv.kernels.cpu_threads import use_torch_threads
from localkv.kernels.layer_weights import Linear
from localkv.kernels.linear import matmul as matmul_by_tile
from localkv.kernels.linear import round_activations
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
class ProductFacts:
    """What a product with a matrix of some format and shape needs to know.

    Attributes:
        pack, multiply: addresses of the compiled workers.
        n_blocks: blocks of a token's packed activations, of `token_bytes` together.
    """

    pack: int
    multiply: int
    n_out: int
    n_panels: int
    panel_bytes: int
    n_records: int
    n_blocks: int
    token_bytes: int


def _product_facts(layout: PanelLayout, n_out: int, n_in: int) -> ProductFacts:
    """Compiles the workers, or loads them from Numba's cache."""
    pack, multiply = panel_workers(layout.format.name)
    n_records = layout.n_records(n_in)
    n_blocks = n_records * layout.record_values // BLOCK
    return ProductFacts(
        pack=pack,
        multiply=multiply,
        n_out=n_out,
        n_panels=-(-n_out // LANES),
        panel_bytes=layout.panel_bytes(n_in),
        n_records=n_records,
        n_blocks=n_blocks,
        token_bytes=n_blocks * ACTIVATION_BLOCK_BYTES,
    )


class _Memory:
    """Bytes that kernels use, at an address that is asked for once."""

    def __init__(self, n_bytes: int) -> None:
        self.data = np.zeros(n_bytes, np.uint8)
        self.address: int = self.data.ctypes.data
        self.nbytes = n_bytes


@dataclass(frozen=True, kw_only=True)
class PanelTensor(PackedTensor):
    """A matrix, or a stack of them, in panels.

    `rows` are still the file's, so that single rows can be decoded (a tied output matrix is the
    embedding, too); the products do not touch them, so that they need no memory.

    Attributes:
        panels: uint8 [..., panels of a matrix, bytes of a panel].
        facts: of one matrix.
    """

    panels: Bytes
    facts: ProductFacts

    @property
    def reads_rows(self) -> bool:
        return False

    def __getitem__(self, index: int | slice | Tensor) -> PackedTensor:
        """A matrix of a stack keeps its panels; rows and parts of a matrix do not."""
        part = super().__getitem__(index)
        if len(part.shape) < 2 or len(part.shape) == len(self.shape):
            return part
        assert isinstance(index, int)
        return PanelTensor(
            part.format, part.rows, part.shape, panels=self.panels[index], facts=self.facts
        )

    @cached_property
    def address(self) -> int:
        """Of the panels; NumPy takes a while to say."""
        return self.panels.ctypes.data


@dataclass(frozen=True, kw_only=True)
class RowTensor(PackedTensor):
    """A matrix, or a stack of them, whose rows a kernel reads as they are.

    Attributes:
        worker: address of the kernel.
    """

    worker: int

    def __getitem__(self, index: int | slice | Tensor) -> PackedTensor:
        """A matrix of a stack is one, too."""
        part = super().__getitem__(index)
        if len(part.shape) < 2 or len(part.shape) == len(self.shape):
            return part
        return RowTensor(
            part.format, part.rows, part.shape, part.halves_activations, worker=self.worker
        )


class CpuProducts:
    """Products of one backend: memory for panels, and scratch, which one thread uses at a time."""

    def __init__(self) -> None:
        self._arena = PanelArena()
        self._scratch = _Memory(0)
        self._job = _Memory(8 * JOB_SIZE)
        self._asked = (0, 0)
        self._n_threads = 1

    def prepare(self, weight: PackedTensor) -> PackedTensor:
        """A matrix [n_out, n_in] or a stack [n_experts, n_out, n_in], as `matmul` wants it.

        The result is `weight` itself where there is no kernel for its format.
        """
        name = weight.format.name
        if name in ROW_FORMATS and weight.shape[-1] % LANES == 0 and weight.rows.is_contiguous():
            worker = rows_worker(name, source_hash())
            return RowTensor(
                weight.format, weight.rows, weight.shape, weight.halves_activations, worker=worker
            )
        layout = LAYOUTS.get(name)
        if layout is None:
            return weight
        *stack, n_out, n_in = weight.shape
        facts = _product_facts(layout, n_out, n_in)
        shape = (*stack, facts.n_panels, facts.panel_bytes)
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
        return PanelTensor(weight.format, weight.rows, weight.shape, panels=panels, facts=facts)

    def matmul(self, x: Tensor, weight: PackedTensor) -> Tensor:
        """x float32 [tokens, n_in] @ weight [n_out, n_in].T -> float32 [tokens, n_out]."""
        if isinstance(weight, RowTensor) and x.shape[0] <= MAX_TOKENS:
            return self._multiply_rows(x, weight)
        if not isinstance(weight, PanelTensor):
            return matmul_by_tile(x, weight)
        x = x.contiguous()
        n_tokens, n_in = x.shape
        facts = weight.facts
        n_threads = self._threads()
        if n_tokens * facts.token_bytes > self._scratch.nbytes:
            self._scratch = _Memory(n_tokens * facts.token_bytes)
        out = torch.empty(n_tokens, facts.n_out)
        run_product(
            facts.pack,
            facts.multiply,
            self._job.address,
            n_threads,
            x.data_ptr(),
            n_tokens,
            n_in,
            facts.n_blocks,
            self._scratch.address,
            weight.address,
            facts.panel_bytes,
            facts.n_records,
            facts.n_out,
            max(1, min(CHUNK_PANELS, facts.n_panels // (n_threads * CHUNKS_PER_THREAD))),
            out.data_ptr(),
        )
        return out

    def _multiply_rows(self, x: Tensor, weight: RowTensor) -> Tensor:
        x = round_activations(x, weight).contiguous()
        n_tokens, n_in = x.shape
        n_out = weight.shape[0]
        out = torch.empty(n_tokens, n_out)
        run_rows_product(
            weight.worker,
            self._job.address,
            self._threads(),
            x.data_ptr(),
            n_tokens,
            n_in,
            weight.rows.data_ptr(),
            weight.rows.shape[1],
            n_out,
            out.data_ptr(),
        )
        return out

    def _threads(self) -> int:
        """Numba counts threads for each calling thread apart; asking it takes microseconds."""
        wanted = torch.get_num_threads(), get_ident()
        if wanted != self._asked:
            self._n_threads = use_torch_threads()
            self._asked = wanted
        return self._n_threads

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        """x [tokens, n_in] -> [tokens, n_out]."""
        y = self.matmul(x, layer.weight)
        return y if layer.bias is None else y.add_(layer.bias)
