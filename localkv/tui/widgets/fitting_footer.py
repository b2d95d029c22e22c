"""`FittingFooter`: the keys that there is room for, each with its whole description."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.widget import Widget
from textual.widgets import Footer
from textual.widgets._footer import FooterKey  # its class of a key is not exported

LAST = "help"
"""The action whose key stays when others have to go, since it leads to all of them."""


class FittingFooter(Footer):
    """Textual's footer, which would cut off what does not fit; on a narrow screen it has fewer."""

    def compose(self) -> ComposeResult:
        keys = [widget for widget in super().compose() if isinstance(widget, FooterKey)]
        room = self.app.size.width
        fitting: set[Widget] = set()
        for key in sorted(keys, key=lambda key: (key.action != LAST, _is_palette(key))):
            width = _width(key)
            if width > room:
                break
            room -= width
            fitting.add(key)
        yield from (key for key in keys if key in fitting)

    def on_resize(self) -> None:
        self.refresh(recompose=True)


def _is_palette(key: FooterKey) -> bool:
    return key.has_class("-command-palette")


def _width(key: FooterKey) -> int:
    """Cells of a key, its description and the spaces around both."""
    return len(key.key_display) + 2 + len(key.description) + 1
