"""Muon for the matrices inside the blocks, AdamW for the embedding and the norms."""

from __future__ import annotations

from typing import Any

import torch
from hybrid import AnyNetwork
from torch import Tensor

_MOMENTUM = 0.95
_WEIGHT_DECAY = 0.01
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon:
    """Momentum whose update is made orthogonal; matrices of one shape are updated together."""

    def __init__(self, matrices: list[Tensor]) -> None:
        self._groups: dict[tuple[int, ...], list[Tensor]] = {}
        for matrix in matrices:
            self._groups.setdefault(tuple(matrix.shape), []).append(matrix)
        self._momenta = {
            shape: torch.zeros(len(group), *shape) for shape, group in self._groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for shape, group in self._groups.items():
            gradient = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            momentum = self._momenta[shape].mul_(_MOMENTUM).add_(gradient)
            update = _orthogonalise(gradient + _MOMENTUM * momentum)
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for matrix, change in zip(group, update, strict=True):
                matrix.mul_(1 - rate * _WEIGHT_DECAY).add_(change, alpha=-rate * scale)

    def state(self) -> list[Tensor]:
        return list(self._momenta.values())

    def load(self, state: list[Tensor]) -> None:
        for momentum, saved in zip(self._momenta.values(), state, strict=True):
            momentum.copy_(saved)


class Optimizer:
    """Both optimisers under one learning-rate factor."""

    def __init__(self, network: AnyNetwork, matrix_rate: float, other_rate: float) -> None:
        matrices = [weight for weight in network.blk.parameters() if weight.ndim == 2]
        chosen = {id(matrix) for matrix in matrices}
        others = [weight for weight in network.parameters() if id(weight) not in chosen]
        self._muon = Muon(matrices)
        self._adam = torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._matrix_rate, self._other_rate = matrix_rate, other_rate

    def step(self, factor: float) -> None:
        self._muon.step(self._matrix_rate * factor)
        for group in self._adam.param_groups:
            group["lr"] = self._other_rate * factor
        self._adam.step()

    def state(self) -> dict[str, Any]:
        return {"muon": self._muon.state(), "adam": self._adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self._muon.load(state["muon"])
        self._adam.load_state_dict(state["adam"])


def _orthogonalise(update: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards the nearest orthogonal matrix."""
    a, b, c = _NEWTON_SCHULZ
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).float()
