"""The panel at the right: the model, the cache meter, speed, settings."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from localkv.chat.engine import EngineFacts
from localkv.tui.figures import size
from localkv.tui.widgets.audit_figures import AuditFigures
from localkv.tui.widgets.cache_meter import CacheMeter
from localkv.tui.widgets.settings import Settings
from localkv.tui.widgets.speed import Speed


class SidePanel(VerticalScroll, can_focus=False):
    """Scrolls where the screen is low."""

    def compose(self) -> ComposeResult:
        yield Static("", id="model")
        yield CacheMeter("", id="meter")
        yield Speed(id="speed")
        yield AuditFigures("", id="audit")
        yield Settings(id="settings")

    def show_model(self, facts: EngineFacts) -> None:
        """Say which model it is."""
        self.query_one("#model", Static).update(
            Content.assemble(
                (facts.name, "bold"),
                "\n",
                (facts.server or _runs_on(facts), "$muted"),
            )
        )


def _runs_on(facts: EngineFacts) -> str:
    return (
        f"{facts.architecture} · {size(facts.weight_bytes)} · "
        f"{facts.backend}, {facts.threads.in_words()}"
    )
