"""How many tokens of context a model is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localkv.errors import UsageError

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec

DEFAULT_N_CTX = 4096
"""Tokens of context where the user names none and the model can hold more."""


def chosen_context(n_ctx: int | None, config: ModelSpec) -> int:
    """The context that was asked for: 0 is the model's own, None at most `DEFAULT_N_CTX` of it.

    Raises:
        UsageError: there is no such context.
    """
    if n_ctx is None:
        return min(config.n_ctx_train, DEFAULT_N_CTX)
    if n_ctx < 0:
        raise UsageError(f"a context of {n_ctx} tokens is not possible")
    return n_ctx or config.n_ctx_train


def beyond_training(n_ctx: int, config: ModelSpec) -> list[str]:
    """A line for the user if a context is longer than any that the model has seen."""
    trained = config.n_ctx_train
    if n_ctx <= trained:
        return []
    return [
        f"the context of {n_ctx} tokens is longer than the {trained} the model was trained for; "
        "expect poor text beyond that"
    ]
