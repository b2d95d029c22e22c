"""Matrices as the CPU's products read them, in panels or as in the file, and their workers."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localkv.kernels.bounds import BoundsError, check_array
from localkv.kernels.cpu.arrays import address
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.linear.arena import Bytes
from localkv.kernels.cpu.linear.jobs import (
    ACTIVATION_BLOCK_BYTES,
    BFLOAT_BLOCK_BYTES,
    CHUNK_BYTES,
    CHUNK_ROWS,
    LAYOUTS,
    MADE_BYTES,
    MAX_TILE,
    PART_BLOCKS,
    ROUNDED_ROWS,
    TILE_ROWS,
    PackJob,
    bfloat_blocks,
)
from localkv.kernels.cpu.runtime.chain import Chain, Memory, Place
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.quant_formats.shared.cpu.panel_layout import BLOCK, LANES, PanelLayout
from localkv.system.threads import n_threads

CHUNK_PANELS = 8
"""The most panels that a thread takes at a time; its cache keeps them for all tokens."""

FEW_PARTS = 4
"""Up to this many pieces of activations are packed sooner by one thread than others start."""

BFLOAT_PACK = KernelSource("linear/bfloat_pack")

NO_MEMORY = Memory(Place(0, 0), 0)


@dataclass(frozen=True)
class Kernel:
    """Addresses of a format's compiled workers; `pack` is 0 where activations stay as they are."""

    pack: int
    multiply: int


def product_sources(name: str) -> list[KernelSource]:
    """The kernels of products with matrices of a format; the last one multiplies."""
    if name in LAYOUTS:
        return [KernelSource("linear/product", {"FORMAT": name})]
    rows = KernelSource("linear/row_product", {"FORMAT": ROUNDED_ROWS.get(name, name)})
    return [BFLOAT_PACK, rows] if name in ROUNDED_ROWS else [rows]


@functools.cache
def product_kernel(name: str) -> Kernel:
    """The workers of a format; compiles them if no process has before."""
    workers = dict[str, int]()
    for source in product_sources(name):
        workers.update(specialized(source))
    return Kernel(workers.get("pack", 0), workers["multiply"])


@dataclass(frozen=True)
class Packing:
    """How activations are packed for matrices of some kind and width.

    Attributes:
        n_blocks: blocks of a token's packed activations, of `block_bytes` each.
        side_by_side: tokens lie one after the other, and not in tiles.
    """

    kernel: Kernel
    n_blocks: int
    block_bytes: int = ACTIVATION_BLOCK_BYTES
    side_by_side: bool = False

    @property
    def token_bytes(self) -> int:
        return self.n_blocks * self.block_bytes

    def add_packing(self, chain: Chain, x: Memory, n_tokens: int, n_in: int) -> Memory:
        """Packed activations, and the step that makes them."""
        n_bytes = n_tokens * self.token_bytes
        packed = Memory(chain.take(n_bytes), n_bytes)
        n_parts = -(-self.n_blocks // PART_BLOCKS)
        job = PackJob(0, n_tokens, n_in, self.n_blocks, n_parts, x, packed)
        chain.add(self.kernel.pack, job, n_threads() if n_tokens * n_parts >= FEW_PARTS else 1)
        return packed


def row_packing(name: str, n_in: int) -> Packing | None:
    """How activations are packed for rows as in the file; None where they stay float32."""
    if name not in ROUNDED_ROWS:
        return None
    return Packing(product_kernel(name), bfloat_blocks(n_in), BFLOAT_BLOCK_BYTES, side_by_side=True)


@dataclass(frozen=True, kw_only=True)
class PanelFacts(Packing):
    """What a product with a matrix of some format and shape needs to know.

    Attributes:
        panel_bytes: of a panel as kernels multiply it.
    """

    n_panels: int
    panel_bytes: int
    n_records: int


def panel_facts(layout: PanelLayout, n_out: int, n_in: int) -> PanelFacts:
    n_records = layout.n_records(n_in)
    return PanelFacts(
        kernel=product_kernel(layout.format.name),
        n_panels=-(-n_out // LANES),
        panel_bytes=layout.panel_bytes(n_in),
        n_records=n_records,
        n_blocks=n_records * layout.record_values // BLOCK,
    )


class Items(NamedTuple):
    """What products with one matrix share out: address of the first, bytes of each, how many."""

    data: int
    item_bytes: int
    n_items: int


@dataclass(frozen=True)
class Operands:
    """What products with matrices of one kind and width have in common (see `MultiplyJob`).

    Attributes:
        multiply: the worker's address.
        activations: packed, or as they are.
        most_items: panels or rows that a thread takes at a time.
        panels: memory for those that are made on the way, `group` of them for each thread.
    """

    multiply: int
    activations: Memory | int
    most_items: int
    n_records: int = 0
    token_bytes: int = 0
    panel_bytes: int = 0
    group: int = 0
    panels: Memory = NO_MEMORY


class KernelTensor(PackedTensor, ABC):
    """A matrix, or a stack of them, for whose products there is a kernel."""

    @property
    @abstractmethod
    def items(self) -> Items:
        """The panels or rows of one matrix."""

    @abstractmethod
    def check_items(self) -> None:
        """Raises `BoundsError` unless `items` are as large as the matrix says."""

    @property
    def packing(self) -> Packing | None:
        """How activations are packed for it; None for those that stay float32."""
        return None

    @property
    def late_job(self) -> NDArray[np.int64] | None:
        """The `LateJob` of a matrix whose panels may not be made yet."""
        return None

    @abstractmethod
    def operands_with(self, chain: Chain, activations: Memory | int, n_tokens: int) -> Operands:
        """What products with at most that number of tokens take, packed as `packing` says."""

    def add_operands(self, chain: Chain, x: Memory, n_tokens: int) -> Operands:
        """What products with float32 x [n_tokens, n_in] take; adds the step that packs it."""
        if self.packing is not None:
            x = self.packing.add_packing(chain, x, n_tokens, self.shape[-1])
        return self.operands_with(chain, x, n_tokens)

    @abstractmethod
    def _matrix(self, part: PackedTensor, index: int) -> PackedTensor:
        """Number `index` of a stack, whose rows are `part`, of the same kind."""

    def __getitem__(self, index: int | slice | NDArray[np.int64]) -> PackedTensor:
        """A matrix of a stack is of this kind, too; rows and parts of a matrix are not."""
        part = super().__getitem__(index)
        if len(part.shape) < 2 or len(part.shape) == len(self.shape):
            return part
        assert isinstance(index, int)
        return self._matrix(part, index)

    def _check_rows(self) -> None:
        n_out, n_in = self.shape
        row_bytes = self.format.row_bytes(n_in)
        check_array(f"rows of {self.format.name}", self.rows, "uint8", n_out, row_bytes)


def check_panels(name: str, shape: tuple[int, ...], facts: PanelFacts, panels: Bytes) -> None:
    """Raises `BoundsError` unless panels are as large as a matrix of that format and shape says."""
    n_out, n_in = shape
    layout = LAYOUTS[name]
    wanted = layout.n_records(n_in), -(-n_out // LANES), layout.panel_bytes(n_in)
    found = facts.n_records, facts.n_panels, facts.panel_bytes
    if found != wanted or panels.shape != wanted[1:]:
        raise BoundsError(f"panels {found}, {panels.shape} instead of {wanted}")
    if not panels.flags.c_contiguous:
        raise BoundsError("panels are not contiguous")


def panel_operands(facts: PanelFacts, activations: Memory | int) -> Operands:
    """What products with panels of one kind and width have in common."""
    return Operands(
        multiply=facts.kernel.multiply,
        activations=activations,
        most_items=CHUNK_PANELS,
        n_records=facts.n_records,
        token_bytes=facts.token_bytes,
        panel_bytes=facts.panel_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class PanelTensor(KernelTensor):
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

    @property
    def operands(self) -> tuple[Any, ...]:
        return (self.panels,)

    def _matrix(self, part: PackedTensor, index: int) -> PackedTensor:
        return PanelTensor(
            part.format, part.rows, part.shape, panels=self.panels[index], facts=self.facts
        )

    @cached_property
    def items(self) -> Items:
        return Items(address(self.panels), self.facts.panel_bytes, self.facts.n_panels)

    def check_items(self) -> None:
        check_panels(self.format.name, self.shape, self.facts, self.panels)

    @property
    def packing(self) -> PanelFacts:
        return self.facts

    def operands_with(self, chain: Chain, activations: Memory | int, n_tokens: int) -> Operands:
        return panel_operands(self.facts, activations)


@dataclass(frozen=True, kw_only=True)
class InPlaceTensor(KernelTensor):
    """A matrix, or a stack of them, that is multiplied as it lies in the file.

    Attributes:
        rows: contiguous.
        facts: of one matrix.
    """

    facts: PanelFacts

    def _matrix(self, part: PackedTensor, index: int) -> PackedTensor:
        return InPlaceTensor(part.format, part.rows, part.shape, facts=self.facts)

    @cached_property
    def items(self) -> Items:
        """An item has the rows of a panel; the last one may have fewer."""
        return Items(address(self.rows), LANES * self.rows.shape[1], self.facts.n_panels)

    def check_items(self) -> None:
        self._check_rows()

    @property
    def packing(self) -> PanelFacts:
        return self.facts

    def operands_with(self, chain: Chain, activations: Memory | int, n_tokens: int) -> Operands:
        """For more than one token, threads make panels of rows on the way."""
        facts, panels, group = self.facts, NO_MEMORY, 0
        if n_tokens != 1:
            many = max(1, min(CHUNK_PANELS, MADE_BYTES // facts.panel_bytes))
            group = 1 if n_tokens <= MAX_TILE else many
            n_bytes = n_threads() * group * facts.panel_bytes
            panels = Memory(chain.take(n_bytes), n_bytes)
        return Operands(
            multiply=facts.kernel.multiply,
            activations=activations,
            most_items=CHUNK_PANELS,
            n_records=facts.n_records,
            token_bytes=facts.token_bytes,
            panel_bytes=facts.panel_bytes,
            group=group,
            panels=panels,
        )


@dataclass(frozen=True, kw_only=True)
class RowTensor(KernelTensor):
    """A matrix, or a stack of them, whose rows a kernel reads as they are."""

    kernel: Kernel

    def _matrix(self, part: PackedTensor, index: int) -> PackedTensor:
        return RowTensor(
            part.format, part.rows, part.shape, part.halves_activations, kernel=self.kernel
        )

    @cached_property
    def items(self) -> Items:
        return Items(address(self.rows), self.rows.shape[1], self.shape[0])

    def check_items(self) -> None:
        self._check_rows()

    @cached_property
    def packing(self) -> Packing | None:
        return row_packing(self.format.name, self.shape[-1])

    def operands_with(self, chain: Chain, activations: Memory | int, n_tokens: int) -> Operands:
        most = min(CHUNK_ROWS, CHUNK_BYTES // max(1, self.items.item_bytes))
        most = max(TILE_ROWS, most // TILE_ROWS * TILE_ROWS)
        token_bytes = 0 if self.packing is None else self.packing.token_bytes
        return Operands(self.kernel.multiply, activations, most, token_bytes=token_bytes)


def check_matrix(weight: KernelTensor, name: str, n_in: int) -> None:
    """A matrix whose `items` are as large as a product with rows of `n_in` values takes them."""
    if weight.format.name != name or weight.shape[-1] != n_in or len(weight.shape) != 2:
        raise BoundsError(f"{weight.format.name} {list(weight.shape)} next to {name} of {n_in}")
    weight.check_items()


def kind_of(weight: PackedTensor) -> tuple[str, bool]:
    """What matrices have in common that are multiplied in one step."""
    return weight.format.name, isinstance(weight, KernelTensor) and weight.late_job is not None


def late_item(weight: KernelTensor) -> Memory | int:
    """The item `late` of a `MatrixJob`."""
    return 0 if weight.late_job is None else Memory(weight.late_job, weight.late_job.nbytes)


def has_kernel(weight: PackedTensor) -> bool:
    """Whether products with it can be part of a chain: other workers take whole vectors."""
    return isinstance(weight, KernelTensor) and weight.shape[-1] % LANES == 0
