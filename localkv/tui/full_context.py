"""A conversation that no longer fits the context: what could help, and the question.

Nothing is cut unless the user chooses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from localkv.chat.cache_figures import CacheFigures, cache_figures, larger_cache
from localkv.chat.engine import EngineFacts, EngineOptions
from localkv.chat.session import ChatSession
from localkv.config import MIXED
from localkv.tui.dialogs import ChoiceScreen
from localkv.tui.engine_driver import ContextMeasured
from localkv.tui.figures import size


@dataclass(frozen=True)
class FullContext:
    """A conversation that was measured, and the engine whose context it does not fit.

    Args:
        measured: its tokens.
        session: the conversation.
        facts: of the engine.
        options: the engine was loaded with these.
    """

    measured: ContextMeasured
    session: ChatSession
    facts: EngineFacts
    options: EngineOptions

    @property
    def refusal(self) -> str:
        """What to say where nothing helps."""
        return (
            f"the message alone takes {self.measured.n_last:,} of {self.facts.n_ctx:,} tokens: "
            "shorten it (Alt+Up, e)"
        )

    async def larger_cache(self, check: Callable[[EngineOptions], None]) -> CacheFigures | None:
        """A cache that the conversation fits, if there is memory for it.

        Args:
            check: raises an error if the engine can't be loaded with these options.
        """
        larger = larger_cache(self.facts, self.measured.n_tokens)
        if larger is not None:
            try:
                await asyncio.to_thread(check, self.options_with(larger))
            except Exception:  # whatever it is, the choice could not work
                return None
        return larger

    def options_with(self, cache: CacheFigures) -> EngineOptions:
        """The engine's options with another cache."""
        arguments = {**self.options.arguments, "n_ctx": cache.n_ctx}
        if MIXED not in (cache.type_k, cache.type_v):  # else layers keep types of their own
            arguments |= {"cache_type_k": cache.type_k, "cache_type_v": cache.type_v}
        return replace(self.options, arguments=arguments)

    def choices(self, larger: CacheFigures | None) -> list[str]:
        """The choices that can work: "drop", "larger" (if there is such a cache), "new"."""
        conversation = self.session.conversation
        last_fits = self.measured.n_last < self.facts.n_ctx
        choices = []
        if last_fits and len(conversation.turns()) > 1:
            choices.append("drop")
        if larger is not None:
            choices.append("larger")
        if not self.session.awaits_answer or (last_fits and len(conversation.path()) > 1):
            choices.append("new")
        return choices


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
