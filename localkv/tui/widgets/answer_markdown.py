r"""`AnswerMarkdown`: Markdown as chat models write it.

A line break is one, <tags> are text, columns are aligned, code scrolls, and LaTeX stays as it was
written. Models write formulas as \( \), \[ \], $$ $$ and $ $: Markdown would take their backslashes
for escapes, and their underscores, asterisks and lines for its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline
from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Markdown, Static
from textual.widgets._markdown import (
    MarkdownBlock,
    MarkdownFence,
    MarkdownTable,
    MarkdownTableContent,
    MarkdownTH,
)

_BLOCKS = {"\\[": "\\]", "$$": "$$"}
_INLINE = re.compile(
    # the end of one that is being written is not there yet
    r"\\\(.+?(?:\\\)|\Z)|\\\[.+?(?:\\\]|\Z)|\$\$.+?\$\$"
    # as in pandoc, so that "$5 and $6" are prices
    r"|\$(?=\S)[^$\n]*[^\s$\\]\$(?!\d)",
    re.DOTALL,
)
_LATEX_ESCAPES = "()[]{},;:!%&$\\"
"""Characters that LaTeX escapes, and that nobody escapes in prose."""


def keep_latex(parser: MarkdownIt) -> None:
    """Let a parser keep formulas as they are."""
    parser.block.ruler.before("fence", "formula", _block, {"alt": ["paragraph", "list"]})
    parser.inline.ruler.before("escape", "formula", _inline)
    parser.inline.ruler.before("escape", "latex_escape", _escape)


def _block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A formula that begins on a line of its own, up to its end or, without one, an empty line."""
    text = state.src[state.bMarks[start] + state.tShift[start] : state.eMarks[start]].rstrip()
    close = _BLOCKS.get(text[:2])
    if close is None or state.is_code_block(start):
        return False
    text, after = text[2:], start + 1
    while close not in text and after < end and not state.isEmpty(after):
        text = state.src[state.bMarks[after] : state.eMarks[after]].rstrip()
        after += 1
    if close in text and not text.endswith(close):
        return False  # a sentence that begins with a formula
    if not silent:
        state.push("paragraph_open", "p", 1).map = [start, after]
        inline = state.push("inline", "", 0)
        inline.content = state.getLines(start, after, state.blkIndent, False).strip()
        inline.map, inline.children = [start, after], []
        state.push("paragraph_close", "p", -1)
        state.line = after
    return True


def _inline(state: StateInline, silent: bool) -> bool:
    match = _INLINE.match(state.src, state.pos, state.posMax)
    if match is None:
        return False
    if not silent:
        for number, line in enumerate(match[0].split("\n")):
            if number:
                state.push("hardbreak", "br", 0)
            state.push("text", "", 0).content = line.strip() if number else line
    state.pos = match.end()
    return True


def _escape(state: StateInline, silent: bool) -> bool:
    """A backslash that stays, since LaTeX has it before this character."""
    if state.src[state.pos] != "\\" or state.pos + 1 >= state.posMax:
        return False
    following = state.src[state.pos + 1]
    if following not in _LATEX_ESCAPES:
        return False
    if not silent:
        state.pending += "\\" + following
    state.pos += 2
    return True


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


# textual.widgets.markdown exports only some of the blocks


Alignment = Literal["left", "center", "right"]


class _AlignedContent(MarkdownTableContent):
    """The cells of a table, with an alignment for each column."""

    def __init__(
        self, headers: list[Content], rows: list[list[Content]], alignments: Sequence[Alignment]
    ) -> None:
        super().__init__(headers, rows)
        self._alignments = alignments

    def on_mount(self) -> None:
        self._align()

    async def _update_rows(self, updated_rows: list[list[Content]]) -> None:
        await super()._update_rows(updated_rows)
        self._align()

    def _align(self) -> None:
        for at, cell in enumerate(self.query_children(Static)):
            cell.styles.text_align = self._alignments[at % len(self._alignments)]


class _AlignedTable(MarkdownTable):
    """A table whose columns are aligned as the line below its headings says."""

    def compose(self) -> ComposeResult:
        alignments = [_alignment(block) for block in _headings(self)]
        self._headers, self._rows = self._get_headers_and_rows()
        yield _AlignedContent(self._headers, self._rows, alignments or ["left"])


def _headings(block: MarkdownBlock) -> list[MarkdownBlock]:
    found: list[MarkdownBlock] = []
    for inner in block._blocks:
        found += [inner] if isinstance(inner, MarkdownTH) else _headings(inner)
    return found


def _alignment(heading: MarkdownBlock) -> Alignment:
    style = str(heading._token.attrs.get("style", ""))
    return "right" if "right" in style else "center" if "center" in style else "left"


class AnswerMarkdown(Markdown):
    """Markdown of an answer."""

    BLOCKS = {**Markdown.BLOCKS, "table_open": _AlignedTable}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__(text, parser_factory=markdown_parser)

    def scroll_code(self, columns: int) -> None:
        """Move the code that is wider than its block to the left or to the right."""
        for fence in self.query(MarkdownFence):
            fence.scroll_relative(x=columns, animate=False)
