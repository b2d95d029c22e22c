"""Products with packed matrices on the CPU.

`CpuProducts.prepare` lays a matrix out anew when it is loaded (`formats/cpu/panel_layout.py`), and
its products read that layout as it is: no weight is ever decoded into memory. With AVX512-VNNI Q8_0
stays in the file (`linear/in_place.py`). F32, F16 and BF16 rows are read as in the file
(`linear/rows.py`). Formats without a kernel are decoded tile by tile, as in `linear.py`, to rows of
F32. Whatever the format, a token's result does not depend on how many tokens come with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from localkv.formats.cpu.panel_layout import LANES
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.bounds import check_tensor
from localkv.kernels.cpu.attention.kernels import n_threads, run
from localkv.kernels.cpu.linear.blocks import LAYOUTS
from localkv.kernels.cpu.linear.job import IN_PLACE_FORMATS, MAX_TILE, NEXT, PART_BLOCKS
from localkv.kernels.cpu.linear.matrices import (
    InPlaceTensor,
    PanelTensor,
    RowTensor,
    check_matrix,
    float_rows,
    has_kernel,
    panel_facts,
    product_kernel,
)
from localkv.kernels.cpu.linear.panel_arena import PanelArena
from localkv.kernels.cpu.linear.panel_bytes import MADE_BYTES, ROW_FORMAT_NAMES
from localkv.kernels.cpu.runtime.chain import Chain, Item, Memory, Place, Scratch, Where
from localkv.kernels.layer_weights import Linear
from localkv.kernels.linear import matmul as matmul_by_tile
from localkv.kernels.linear import round_activations

CHUNK_PANELS, CHUNK_ROWS = 8, 64
"""The most panels or rows that a thread takes at a time; its cache keeps them for all tokens."""

CHUNKS_PER_THREAD = 8
"""How finely work is divided where there is little, so that threads end together."""

FEW_PARTS = 4
"""Up to so many pieces of activations are packed sooner by one thread than others start."""


@dataclass(frozen=True)
class Product:
    """One matrix of `add_products`.

    Attributes:
        weight: [n_out, n_in], for which there is a kernel.
        out: float32 [n_tokens, n_out].
        addend: what is added, float32 like `out`, or None.
        addend_stride: bytes from token to token in the addend; 0 for a bias.
    """

    weight: PackedTensor
    out: Where
    addend: Where | None = None
    addend_stride: int = 0


def with_bias(layer: Linear, out: Where) -> Product:
    """A product and its bias; whoever runs the chain keeps the layer."""
    return Product(layer.weight, out, layer.bias)


def _add_group(chain: Chain, x: Where, n_tokens: int, products: Sequence[Product]) -> None:
    """Products with matrices of one format, in one step."""
    threads = n_threads()
    first = products[0].weight
    n_in = first.shape[-1]
    matrices = list[Item]()
    n_items = 0
    for product in products:
        weight = product.weight
        assert isinstance(weight, PanelTensor | InPlaceTensor | RowTensor)
        check_matrix(weight, first.format.name, n_in)
        n_items += weight.items[2]
        n_out, stride = weight.shape[0], product.addend_stride
        matrices += (*weight.items, n_out, Memory(product.out, 4 * n_tokens * n_out))
        addend: Item = 0
        if product.addend is not None:
            addend = Memory(product.addend, (n_tokens - 1) * stride + 4 * n_out)
        matrices += (addend, stride)
    panel_bytes, group, panels = 0, 0, Memory(Place(0, 0), 0)
    rows = Memory(x, 4 * n_tokens * n_in)
    if isinstance(first, PanelTensor | InPlaceTensor):
        facts = first.facts
        kernel, n_records, token_bytes = facts.kernel, facts.n_records, facts.token_bytes
        packed = chain.take(n_tokens * token_bytes)
        activations = Memory(packed, n_tokens * token_bytes)
        n_parts = -(-facts.n_blocks // PART_BLOCKS)
        pack = (NEXT, n_tokens, n_in, facts.n_blocks, n_parts, rows, activations)
        chain.add(kernel.pack, pack, threads if n_tokens * n_parts >= FEW_PARTS else 1)
        most, panel_bytes = CHUNK_PANELS, facts.panel_bytes
        if isinstance(first, InPlaceTensor) and n_tokens != 1:
            group = 1 if n_tokens <= MAX_TILE else max(1, min(most, MADE_BYTES // panel_bytes))
            n_bytes = threads * group * panel_bytes
            panels = Memory(chain.take(n_bytes), n_bytes)
    else:
        assert isinstance(first, RowTensor)
        kernel, n_records, token_bytes, activations, most = first.kernel, 0, 0, rows, CHUNK_ROWS
    chunk = max(1, min(most, n_items // (threads * CHUNKS_PER_THREAD)))
    head = (NEXT, n_tokens, n_in, n_records, token_bytes, activations, chunk)
    made = (panel_bytes, group, panels)
    chain.add(kernel.multiply, (*head, *made, len(products), *matrices), threads)


def add_products(chain: Chain, x: Where, n_tokens: int, products: Sequence[Product]) -> None:
    """Products of float32 x [n_tokens, n_in] with some matrices, in as few steps as they need."""
    groups = dict[str, list[Product]]()
    for product in products:
        groups.setdefault(product.weight.format.name, []).append(product)
    for group in groups.values():
        _add_group(chain, x, n_tokens, group)


class CpuProducts:
    """Products of one backend: memory for panels, and scratch, which one thread uses at a time."""

    def __init__(self, scratch: Scratch | None = None) -> None:
        self._arena = PanelArena()
        self._scratch = scratch or Scratch()

    def prepare(self, weight: PackedTensor) -> PackedTensor:
        """A matrix [n_out, n_in] or a stack [n_experts, n_out, n_in], as `matmul` wants it.

        The result is `weight` itself where there is no kernel for its format.
        """
        name = weight.format.name
        whole = weight.shape[-1] % LANES == 0 and weight.rows.is_contiguous()
        if name in ROW_FORMAT_NAMES and whole:
            return RowTensor(
                weight.format,
                weight.rows,
                weight.shape,
                weight.halves_activations,
                kernel=product_kernel(name),
            )
        layout = LAYOUTS.get(name)
        if layout is None:
            return weight
        *stack, n_out, n_in = weight.shape
        rows = weight.rows.contiguous()
        row_bytes = weight.format.row_bytes(n_in)
        check_tensor(f"rows of {name}", rows, torch.uint8, *stack, n_out, row_bytes)
        facts = panel_facts(layout, n_out, n_in)
        if name in IN_PLACE_FORMATS:
            return InPlaceTensor(weight.format, rows, weight.shape, facts=facts)
        shape = (*stack, facts.n_panels, facts.panel_bytes)
        panels = self._arena.take(int(np.prod(shape))).reshape(shape)
        n_panels = panels.size // shape[-1]
        job: list[int] = [0, n_panels, n_out, row_bytes]
        job += (layout.format.block_bytes, layout.record_blocks, layout.record_bytes, shape[-1])
        job += (len(layout.table), layout.table.ctypes.data, rows.data_ptr(), panels.ctypes.data)
        run("linear/fill", job, n_threads())
        self._arena.join_pages()
        return PanelTensor(weight.format, weight.rows, weight.shape, panels=panels, facts=facts)

    def matmul(self, x: Tensor, weight: PackedTensor) -> Tensor:
        """x float32 [tokens, n_in] @ weight [n_out, n_in].T -> float32 [tokens, n_out]."""
        return self.linear(x, Linear(weight))

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        """x [tokens, n_in] -> [tokens, n_out]."""
        weight = layer.weight
        if not has_kernel(weight):
            y = matmul_by_tile(x, weight, self._times_rows)
            return y if layer.bias is None else y.add_(layer.bias)
        x = round_activations(x, weight).contiguous()
        out = torch.empty(x.shape[0], weight.shape[0])
        chain = Chain(self._scratch)
        add_products(chain, x, x.shape[0], [with_bias(layer, out)])
        chain.run()
        return out

    def _times_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """x float32 [tokens, n_in] @ rows float32 [n_out, n_in].T; any n_in."""
        if missing := -x.shape[1] % LANES:
            x, rows = F.pad(x, (0, missing)), F.pad(rows, (0, missing))
        return self.linear(x, Linear(float_rows(rows)))
