"""`FullContextScreen`: the choices when the conversation no longer fits the context."""

from __future__ import annotations

from localkv.chat.cache_figures import CacheFigures, cache_figures
from localkv.chat.engine import EngineFacts
from localkv.tui.choice_screen import ChoiceScreen
from localkv.tui.figures import size


class FullContextScreen(ChoiceScreen):
    """Dismissed with "drop", "larger" or "new"; None leaves everything as it is.

    Args:
        what: the event that is reported.
        facts: of the engine.
        larger: the cache that "larger" stands for, if there can be one.
    """

    def __init__(self, what: str, facts: EngineFacts, larger: CacheFigures | None) -> None:
        drop = (
            "drop",
            "Drop the oldest turns",
            "They are no longer part of the prompt; you still see them",
        )
        new = ("new", "New chat", "This one is kept")
        super().__init__(what, [drop, _larger_choice(facts, larger), new])


def _larger_choice(facts: EngineFacts, larger: CacheFigures | None) -> tuple[str, str, str]:
    if larger is None:
        return (
            "",
            "A larger context",
            f"Not with this model, which was trained for {facts.n_ctx_train:,} tokens",
        )
    now = cache_figures(facts)
    return (
        "larger",
        f"{larger.n_ctx:,} tokens, with K {larger.type_k} and V {larger.type_v}",
        f"The cache takes {size(larger.n_bytes)} instead of {size(now.n_bytes)}; the engine "
        "starts again",
    )
