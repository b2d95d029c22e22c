"""`FullContextScreen`: the choices when the conversation no longer fits the context."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.chat.cache_figures import CacheFigures, cache_figures
from localkv.chat.engine import EngineFacts
from localkv.tui.choice_screen import ChoiceScreen
from localkv.tui.figures import size


class FullContextScreen(ChoiceScreen):
    """Dismissed with "drop", "larger" or "new"; None leaves everything as it is.

    Args:
        what: the event that is reported.
        facts: of the engine.
        choices: those that can work.
        larger: the cache that "larger" stands for.
        is_unanswered: it is the last message that has no answer; else an answer was cut.
    """

    def __init__(
        self,
        what: str,
        facts: EngineFacts,
        choices: Sequence[str],
        larger: CacheFigures | None,
        is_unanswered: bool,
    ) -> None:
        then = "your message is answered" if is_unanswered else "the answer goes on"
        offers = {
            "drop": (
                "Drop the oldest turns",
                f"They are no longer part of the prompt, but you still see them; {then}",
            ),
            "new": (
                "New chat with this message" if is_unanswered else "New chat",
                "This one is kept without it" if is_unanswered else "This one is kept",
            ),
        }
        if larger is not None:
            takes, now = size(larger.n_bytes), size(cache_figures(facts).n_bytes)
            instead = "as now" if takes == now else f"instead of {now}"
            offers["larger"] = (
                f"{larger.n_ctx:,} tokens, with K {larger.type_k} and V {larger.type_v}",
                f"The cache takes {takes} {instead}; the engine starts again, and {then}",
            )
        super().__init__(what, [(name, *offers[name]) for name in choices])
