"""The screen of an empty conversation."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from localkv.chat.cache_figures import cache_figures
from localkv.chat.engine import EngineFacts
from localkv.tui.figures import size

_MUTED = "$foreground 60%"


class Welcome(Static):
    """Which model there is, and how to find out the rest."""

    def show_loading(self, name: str) -> None:
        """The model is not there yet."""
        self.update(
            Content.assemble((name, "bold"), "\n", ("loading; you can write already", _MUTED))
        )

    def show_model(self, facts: EngineFacts) -> None:
        """The model is there."""
        figures = cache_figures(facts)
        self.update(
            Content.assemble(
                (facts.name, "bold"),
                "\n",
                (f"{facts.n_ctx:,} tokens of context in {size(figures.n_bytes)}", _MUTED),
                "\n",
                ("K ", "bold $primary"),
                f"{figures.type_k}   ",
                ("V ", "bold $accent"),
                figures.type_v,
                (f"   f16 would take {size(figures.f16_bytes)}", _MUTED),
                "\n\n",
                ("/ lists commands, F1 keys, Ctrl+O sessions", _MUTED),
            )
        )
