"""Matrices as the CPU's products read them, in panels or as in the file, and their workers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from localkv.formats import FORMATS
from localkv.formats.cpu.panel_layout import BLOCK, LANES, PanelLayout
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.bounds import BoundsError, check_tensor
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.linear.blocks import LAYOUTS
from localkv.kernels.cpu.linear.job import ACTIVATION_BLOCK_BYTES
from localkv.kernels.cpu.linear.panel_arena import Bytes
from localkv.kernels.cpu.linear.panel_bytes import ROW_FORMAT_NAMES


@dataclass(frozen=True)
class Kernel:
    """Addresses of a format's compiled workers; `pack` is 0 where activations stay as they are."""

    pack: int
    multiply: int


def product_source(name: str) -> KernelSource:
    """The kernel of products with matrices of a format; without one, of its decoded rows."""
    if name in LAYOUTS:
        return KernelSource("linear/product", {"FORMAT": name})
    return KernelSource(
        "linear/row_product", {"FORMAT": name if name in ROW_FORMAT_NAMES else "f32"}
    )


@functools.cache
def product_kernel(name: str) -> Kernel:
    """The workers of a format; compiles them if no process has before."""
    workers = specialized(product_source(name))
    return Kernel(workers.get("pack", 0), workers["multiply"])


@dataclass(frozen=True)
class PanelFacts:
    """What a product with a matrix of some format and shape needs to know.

    Attributes:
        n_blocks: blocks of a token's packed activations, of `token_bytes` together.
        panel_bytes: of a panel as kernels multiply it.
    """

    kernel: Kernel
    n_panels: int
    panel_bytes: int
    n_records: int
    n_blocks: int

    @property
    def token_bytes(self) -> int:
        return self.n_blocks * ACTIVATION_BLOCK_BYTES


def panel_facts(layout: PanelLayout, n_out: int, n_in: int) -> PanelFacts:
    n_records = layout.n_records(n_in)
    return PanelFacts(
        kernel=product_kernel(layout.format.name),
        n_panels=-(-n_out // LANES),
        panel_bytes=layout.panel_bytes(n_in),
        n_records=n_records,
        n_blocks=n_records * layout.record_values // BLOCK,
    )


Items = tuple[int, int, int]
"""What products with one matrix share out: the address of the first, bytes of each, how many."""


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
    facts: PanelFacts

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
    def items(self) -> Items:
        address: int = self.panels.ctypes.data  # NumPy takes a while to say
        return address, self.facts.panel_bytes, self.facts.n_panels


@dataclass(frozen=True, kw_only=True)
class InPlaceTensor(PackedTensor):
    """A matrix, or a stack of them, that is multiplied as it lies in the file.

    Attributes:
        rows: contiguous.
        facts: of one matrix.
    """

    facts: PanelFacts

    def __getitem__(self, index: int | slice | Tensor) -> PackedTensor:
        """A matrix of a stack is one, too."""
        part = super().__getitem__(index)
        if len(part.shape) < 2 or len(part.shape) == len(self.shape):
            return part
        return InPlaceTensor(part.format, part.rows, part.shape, facts=self.facts)

    @cached_property
    def items(self) -> Items:
        """An item has the rows of a panel; the last one may have fewer."""
        return self.rows.data_ptr(), LANES * self.rows.shape[1], self.facts.n_panels


@dataclass(frozen=True, kw_only=True)
class RowTensor(PackedTensor):
    """A matrix, or a stack of them, whose rows a kernel reads as they are."""

    kernel: Kernel

    def __getitem__(self, index: int | slice | Tensor) -> PackedTensor:
        """A matrix of a stack is one, too."""
        part = super().__getitem__(index)
        if len(part.shape) < 2 or len(part.shape) == len(self.shape):
            return part
        return RowTensor(
            part.format, part.rows, part.shape, part.halves_activations, kernel=self.kernel
        )

    @cached_property
    def items(self) -> Items:
        return self.rows.data_ptr(), self.rows.shape[1], self.shape[0]


def check_matrix(weight: PanelTensor | InPlaceTensor | RowTensor, name: str, n_in: int) -> None:
    """A matrix whose `items` are as large as a product with rows of `n_in` values takes them."""
    n_out, width = weight.shape
    if weight.format.name != name or width != n_in:
        raise BoundsError(f"{weight.format.name} of {width} columns next to {name} of {n_in}")
    if isinstance(weight, PanelTensor):
        facts, layout = weight.facts, LAYOUTS[name]
        wanted = layout.n_records(n_in), -(-n_out // LANES), layout.panel_bytes(n_in)
        found = facts.n_records, facts.n_panels, facts.panel_bytes
        if found != wanted or weight.panels.shape != wanted[1:]:
            raise BoundsError(f"panels {found}, {weight.panels.shape} instead of {wanted}")
        if not weight.panels.flags.c_contiguous:
            raise BoundsError("panels are not contiguous")
        return
    row_bytes = weight.format.row_bytes(n_in)
    check_tensor(f"rows of {name}", weight.rows, torch.uint8, n_out, row_bytes)
    if isinstance(weight, RowTensor) and n_in % LANES:
        raise BoundsError(f"{n_in} columns are no multiple of {LANES}")


def has_kernel(weight: PackedTensor) -> bool:
    """Whether products with it can be part of a chain."""
    return isinstance(weight, PanelTensor | InPlaceTensor | RowTensor)


def float_rows(values: Tensor) -> RowTensor:
    """A matrix of float32 [n_out, n_in], n_in a multiple of 16, for the kernel of such rows."""
    rows = values.contiguous().view(torch.uint8)
    return RowTensor(FORMATS["f32"], rows, tuple(values.shape), kernel=product_kernel("f32"))
