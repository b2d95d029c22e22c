"""`ChunkProgress`: how far a command is through the chunks of a text."""

from __future__ import annotations

import time

from localkv.cli.output.progress_line import ProgressLine


class ChunkProgress(ProgressLine):
    """Which chunk it is at, and how long the others will take."""

    def __init__(self, n_chunks: int) -> None:
        super().__init__()
        self.n_chunks = n_chunks
        self._started = time.perf_counter()

    def show_chunk(self, n_done: int, text: str) -> None:
        left = (time.perf_counter() - self._started) / n_done * (self.n_chunks - n_done)
        self.show(f"chunk {n_done} of {self.n_chunks}: {text}, {left:.0f} s left")
