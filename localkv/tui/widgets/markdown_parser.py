"""Markdown as chat models mean it: a line break is one, <tags> are text like any other, and LaTeX
stays as it was written."""

from __future__ import annotations

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore

from localkv.tui.widgets.math_rules import keep_latex


def _keep_line_breaks(state: StateCore) -> None:
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"


def markdown_parser() -> MarkdownIt:
    """A parser for `Markdown`."""
    parser = MarkdownIt("gfm-like", {"html": False})
    parser.core.ruler.push("keep_line_breaks", _keep_line_breaks)
    keep_latex(parser)
    return parser
