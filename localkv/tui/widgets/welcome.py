"""The screen of an empty conversation."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import Static

from localkv.chat.cache_figures import cache_figures
from localkv.chat.engine import EngineFacts
from localkv.tui.figures import size
from localkv.tui.widgets.cache_meter import cache_types

_KEYS = "/ lists commands, F1 keys, Ctrl+O sessions"


class Welcome(Static):
    """Which model there is, and how to find out the rest."""

    def show_loading(self, name: str) -> None:
        """The model is not there yet."""
        self.update(
            Content.assemble((name, "bold"), "\n", ("loading; you can write already", "$muted"))
        )

    def show_model(self, facts: EngineFacts, carried: Sequence[str] = ()) -> None:
        """The model is there.

        Args:
            facts: of the engine.
            carried: settings that came along from the chat before.
        """
        lines = [Content.styled(facts.name, "bold")]
        if facts.layers:
            figures = cache_figures(facts)
            f16 = "" if figures.is_f16 else f"   f16 would take {size(figures.f16_bytes)}"
            lines += [
                Content.styled(
                    f"{facts.n_ctx:,} tokens of context in {size(figures.n_bytes)}", "$muted"
                ),
                Content.assemble(cache_types(facts, figures), (f16, "$muted")),
            ]
        else:
            lines.append(Content.styled(facts.server, "$muted"))
        if carried:
            lines += [Content(""), Content.styled("as before: " + ", ".join(carried), "$muted")]
        lines += [Content(""), Content.styled(_KEYS, "$muted")]
        self.update(Content("\n").join(lines))
