"""The two themes that localkv brings; Textual's own are there as well.

Text has a contrast of 4.5 to 1 at least, on every background that it has here.
"""

from __future__ import annotations

from collections.abc import Mapping

from textual.color import Color
from textual.theme import Theme

MUTED = 0.75
"""The share of the text's colour in what is said by the way."""

DARK = Theme(
    name="localkv",
    primary="#6cb6b0",
    secondary="#7f8ea3",
    accent="#d9a35f",
    warning="#e0b050",
    error="#e06c75",
    success="#8bbf73",
    foreground="#d8dce3",
    background="#14171c",
    surface="#1b1f26",
    panel="#222731",
    dark=True,
)
LIGHT = Theme(
    name="localkv-light",
    primary="#176b66",
    secondary="#56637a",
    accent="#8a5410",
    warning="#805700",
    error="#a52b40",
    success="#35701f",
    foreground="#23272e",
    background="#fbfaf7",
    surface="#f1efe9",
    panel="#e8e5dd",
    dark=False,
)


def own_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Colours that the chat's styles name and Textual does not have, from those of a theme."""
    text = Color.parse(variables["foreground"])
    return {"muted": text.hex if text.ansi is not None else text.with_alpha(MUTED).hex}
