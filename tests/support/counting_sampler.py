"""`CountingSampler`: greedy, and keeps what it was told and shown."""

from __future__ import annotations

import numpy as np

from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler


class CountingSampler(Sampler):
    """Greedy, and keeps what it was told and shown."""

    def __init__(self, n_vocab: int = 96) -> None:
        super().__init__(SamplingParams(temperature=0.0), n_vocab=n_vocab)
        self.accepted: list[int] = []
        self.seen: list[np.ndarray] = []

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)
        super().accept(token_id)

    def sample(self, logits: np.ndarray) -> int:
        self.seen.append(logits.copy())
        return super().sample(logits)
