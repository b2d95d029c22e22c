"""Copies a code block; asks which one if there are several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from textual.app import App

from localkv.tui.choice_screen import ChoiceScreen


def copy_code(app: App[Any], blocks: Sequence[str]) -> None:
    """Copy the only one of some code blocks, or the one that the user chooses."""

    def copy(chosen: str | None) -> None:
        if chosen is not None:
            code = blocks[int(chosen)]
            app.copy_to_clipboard(code)
            app.notify(f"Copied {code.count(chr(10)) + 1} lines of code")

    if len(blocks) == 1:
        copy("0")
        return
    choices = [
        (str(i), block.splitlines()[0] if block else "", f"{block.count(chr(10)) + 1} lines")
        for i, block in enumerate(blocks)
    ]
    app.push_screen(ChoiceScreen("Which block of code?", choices), copy)
