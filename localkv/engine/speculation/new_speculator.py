"""What guesses the tokens of a new generation, if anything does."""

from __future__ import annotations

from localkv.engine.speculation.config import Speculation, check_drafter
from localkv.engine.speculation.draft_model import DraftModel, ModelSpeculator
from localkv.engine.speculation.prices import Prices
from localkv.engine.speculation.speculator import Speculator


def new_speculator(
    config: Speculation, prices: Prices, draft: DraftModel | None, *, reads_late: bool = False
) -> Speculator | None:
    """What drafts for a new generation, or None.

    Args:
        prices: of the engine's batches.
        draft: the model that drafts, if there is one.
        reads_late: it reads a text when it first drafts for it, and not at the text's beginning.

    Raises:
        UsageError: a model should draft, and there is none.
    """
    if config.drafter != "draft":
        return Speculator(config, prices) if config.is_on else None
    check_drafter(config, draft)
    assert draft is not None
    return ModelSpeculator(config, draft, reads_late=reads_late)
