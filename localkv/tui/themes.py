"""The two themes that localkv brings; Textual's own are there as well."""

from __future__ import annotations

from textual.theme import Theme

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
    primary="#1f7a74",
    secondary="#56637a",
    accent="#a6691b",
    warning="#9a6b00",
    error="#b3364a",
    success="#3f7d2c",
    foreground="#23272e",
    background="#fbfaf7",
    surface="#f1efe9",
    panel="#e8e5dd",
    dark=False,
)
