"""`AnswerMarkdown`: Textual's Markdown, with columns aligned as asked for and code that scrolls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Markdown, Static

# textual.widgets.markdown exports only some of the blocks
from textual.widgets._markdown import (
    MarkdownBlock,
    MarkdownFence,
    MarkdownTable,
    MarkdownTableContent,
    MarkdownTH,
)

from localkv.tui.widgets.markdown_parser import markdown_parser

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
