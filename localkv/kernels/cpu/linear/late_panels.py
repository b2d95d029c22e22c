"""Panels that are made while their matrices are in use, so that loading does not wait for them.

Right after loading, products make the panels that they need in the cores' caches
(`linear/late_product.py`). So the file is read once per evaluation, while new memory for panels
would be slow to get. From the second evaluation on each begins with making some panels to stay,
until all are there: a generated token makes a sixteenth, a prompt all. Which of them are there
changes no bit of a product.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.kernels.cpu.arrays import address
from localkv.kernels.cpu.attention.kernels import run
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.linear.arena import Bytes, PanelArena
from localkv.kernels.cpu.linear.jobs import (
    LAYOUTS,
    MADE_BYTES,
    MAX_TILE,
    N_LAID,
    PART_BYTES,
    FillJob,
    LateJob,
)
from localkv.kernels.cpu.linear.matrices import (
    CHUNK_PANELS,
    Items,
    KernelTensor,
    Operands,
    PanelFacts,
    check_panels,
    panel_operands,
)
from localkv.kernels.cpu.runtime.chain import Chain, Memory
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.quant_formats.shared.cpu.panel_layout import LANES
from localkv.system.threads import n_threads

LATE_PRODUCTS = KernelSource("linear/late_product")

TOKENS_TO_LAY = 16
"""Tokens whose evaluation, but for the first, begins with making panels until all are there. The
panels of a token then take about as long as the token itself."""


class Panels:
    """Panels of one matrix, or of a stack of them; none are made yet.

    Args:
        rows: uint8 [..., n_out, bytes of a row], contiguous.
        facts: of one matrix.
        release: called when rows are not read any more.

    Attributes:
        panels: uint8 [..., panels of a matrix, bytes of a panel].
        job: a `LateJob`, which workers read.
    """

    def __init__(
        self,
        name: str,
        rows: Bytes,
        facts: PanelFacts,
        arena: PanelArena,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        *stack, n_out, row_bytes = rows.shape
        shape = (*stack, facts.n_panels, facts.panel_bytes)
        self.rows, self.arena, self.release = rows, arena, release
        self.panels = arena.take(int(np.prod(shape))).reshape(shape)
        layout = LAYOUTS[name]
        job = LateJob(
            multiply=facts.kernel.multiply,
            n_out=n_out,
            row_bytes=row_bytes,
            block_bytes=layout.format.block_bytes,
            record_blocks=layout.record_blocks,
            record_bytes=layout.record_bytes,
            panel_bytes=facts.panel_bytes,
            n_planes=len(layout.table),
            table=address(layout.table),
            rows=address(rows),
            panels=address(self.panels),
        )
        self.job = np.array(job, np.int64)

    @property
    def n_missing(self) -> int:
        return self.panels.size // self.panels.shape[-1] - int(self.job[N_LAID])

    def lay(self, n: int) -> None:
        """Make `n` more of them."""
        facts = LateJob(*self.job.tolist())
        job = FillJob(
            next_panel=0,
            first_panel=facts.n_laid,
            n_panels=n,
            n_out=facts.n_out,
            row_bytes=facts.row_bytes,
            block_bytes=facts.block_bytes,
            record_blocks=facts.record_blocks,
            record_bytes=facts.record_bytes,
            panel_bytes=facts.panel_bytes,
            n_planes=facts.n_planes,
            table=facts.table,
            rows=facts.rows,
            panels=facts.panels,
        )
        run("linear/fill", job, n_threads())
        self.job[N_LAID] += n
        if not self.n_missing:
            self.arena.join_pages(self.panels)
            self.release()


class LatePanels:
    """The panels of a backend's models that are made while these are in use.

    Args:
        arena: where they go.

    Attributes:
        are_laid: all are there, and products read nothing else.
    """

    def __init__(self, arena: PanelArena) -> None:
        self._arena = arena
        self._waiting = list[weakref.ref[Panels]]()
        self._each = 0
        self._is_begun = False
        self.are_laid = True

    def prepare(
        self, weight: PackedTensor, rows: Bytes, facts: PanelFacts, release: Callable[[], None]
    ) -> PackedTensor:
        """A matrix, or a stack of them, that can be multiplied at once."""
        panels = Panels(weight.format.name, rows, facts, self._arena, release)
        self._waiting.append(weakref.ref(panels))
        self.are_laid = self._is_begun = False
        return LateTensor(
            weight.format,
            rows,
            weight.shape,
            late=self,
            made=panels,
            panels=panels.panels,
            facts=facts,
        )

    def begin(self) -> None:
        """The next evaluation is the first one after loading."""
        self._each = -(-sum(panels.panels.nbytes for panels in self._left()) // TOKENS_TO_LAY)
        self._is_begun = True
        self._is_first = True

    def evaluate(self, n_tokens: int) -> bool:
        """Make what is due before `n_tokens` tokens are evaluated.

        Returns:
            Whether products read other memory from now on.
        """
        if self.are_laid or not self._is_begun:
            return False
        if self._is_first:
            self._is_first = False
            return False
        return self._lay(n_tokens * self._each)

    def finish(self) -> bool:
        """Make all; returns what `evaluate` does."""
        return self._lay(None)

    def _left(self) -> list[Panels]:
        found = [reference() for reference in self._waiting]
        return [panels for panels in found if panels is not None and panels.n_missing]

    def _lay(self, n_bytes: int | None) -> bool:
        """Make that many bytes of panels, or all, and at least one of them.

        Returns:
            Whether these were the last.
        """
        left = self._left()
        while left and (n_bytes is None or n_bytes > 0):
            panels = left[0]
            n, each = panels.n_missing, panels.panels.shape[-1]
            if n_bytes is not None:
                n = min(n, -(-n_bytes // each))
                n_bytes -= n * each
            panels.lay(n)
            if not panels.n_missing:
                left.pop(0)
        if left or self.are_laid:
            return False
        self._waiting.clear()
        self.are_laid = True
        return True


@dataclass(frozen=True, kw_only=True)
class LateTensor(KernelTensor):
    """A matrix, or a stack of them, whose panels are made while it is in use.

    Attributes:
        late: whose it is.
        made: the panels of all of the stack that this may be a part of.
        panels: this part's.
        facts: of one matrix.
    """

    late: LatePanels
    made: Panels
    panels: Bytes
    facts: PanelFacts

    @property
    def reads_rows(self) -> bool:
        return not self.late.are_laid

    @property
    def operands(self) -> tuple[Any, ...]:
        return (self.rows if self.reads_rows else self.panels,)

    @property
    def late_job(self) -> NDArray[np.int64] | None:
        return self.made.job if self.reads_rows else None

    def _matrix(self, part: PackedTensor, index: int) -> PackedTensor:
        return replace(self, rows=part.rows, shape=part.shape, panels=self.panels[index])

    @property
    def items(self) -> Items:
        if self.reads_rows:
            return Items(address(self.rows), LANES * self.rows.shape[1], self.facts.n_panels)
        return Items(address(self.panels), self.facts.panel_bytes, self.facts.n_panels)

    def check_items(self) -> None:
        self._check_rows()
        check_panels(self.format.name, self.shape, self.facts, self.panels)

    @property
    def packing(self) -> PanelFacts:
        return self.facts

    def operands_with(self, chain: Chain, activations: Memory | int, n_tokens: int) -> Operands:
        """Operands with which threads make panels on the way, as long as some are missing."""
        operands = panel_operands(self.facts, activations)
        if not self.reads_rows:
            return operands
        group = 1
        if n_tokens > MAX_TILE:
            group = max(1, min(CHUNK_PANELS, MADE_BYTES // self.facts.panel_bytes))
        n_bytes = n_threads() * (group * self.facts.panel_bytes + PART_BYTES)
        return replace(
            operands,
            multiply=specialized(LATE_PRODUCTS)["multiply"],
            group=group,
            panels=Memory(chain.take_for_a_step(n_bytes), n_bytes),
        )
