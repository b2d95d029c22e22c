r"""LaTeX in Markdown: between its delimiters, every character is text.

Models write formulas as \( \), \[ \], $$ $$ and $ $. Markdown would take their backslashes for
escapes, and their underscores, asterisks and lines for its own.
"""

from __future__ import annotations

import re

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

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
