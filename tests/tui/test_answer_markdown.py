"""Markdown as models write it, on the screen."""

from __future__ import annotations

import pytest
from textual.widgets.markdown import MarkdownFence

from localkv.tui.widgets.answer_markdown import markdown_parser
from support.chat_pilot import User, user, words
from support.fake_engine import FakeEngine


def text_of(markdown: str) -> str:
    """The text that the parser makes of Markdown."""
    found = []
    for token in markdown_parser().parse(markdown):
        if token.type == "inline":
            breaks = {"hardbreak": "\n"}
            parts = [breaks.get(child.type, child.content) for child in token.children or ()]
            found.append("".join(parts))
        elif token.type == "fence":
            found.append(token.content)
    return "\n\n".join(found)


@pytest.mark.parametrize(
    "latex",
    [
        r"\( \frac{a_1}{b_1} \, \{x\} * y * z \)",
        r"\[ \sum_{i=1}^{n} x_i \\ y_i \]",
        "\\[\n\\begin{aligned}\na &= b \\\\\n- c &= *d*\n\\end{aligned}\n\\]",
        "$$\nx_1 = \\{ y \\}\n$$",
        r"$$ a_b + c_d $$",
        r"so $x_1 * y * \,2$ holds",
        r"\{1, 2\} \; 50\% \& more \\ end",
        "\\[\nunfinished _a_ = *b*",
    ],
)
def test_latex_stays(latex: str) -> None:
    assert text_of(latex) == latex


@pytest.mark.parametrize(
    ("markdown", "shown"),
    [
        (r"5 \* 3 and \_x\_", "5 * 3 and _x_"),
        ("it costs $5 and then *$6* more", "it costs $5 and then $6 more"),
        ("`$a$` and `\\(b\\)`", "$a$ and \\(b\\)"),
        ("```\n$$\n\\(\n```", "$$\n\\(\n"),
        ("\\[ x \\] where\n\n- one", "\\[ x \\] where\n\none"),
        ("**\\(x\\)**", "\\(x\\)"),
    ],
)
def test_the_rest_is_markdown(markdown: str, shown: str) -> None:
    assert text_of(markdown) == shown


def lines(me: User) -> list[str]:
    """The lines of the conversation, without its border."""
    panel = me.chat.query_one("#panel").region.x
    return [line[:panel].rstrip() for line in me.screen_text().splitlines()]


def line_with(me: User, text: str) -> str:
    return next(line for line in lines(me) if text in line)


async def test_a_title_is_at_the_left() -> None:
    async with user(FakeEngine(words("# Title here\n\nText."))) as me:
        await me.ask("Hi")
        assert line_with(me, "Title here").index("Title") == line_with(me, "Text.").index("Text")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_columns_are_aligned(is_streamed: bool) -> None:
    table = "| left | middle | right |\n|:--|:-:|--:|\n| a | b | c |\n| d | e | f |\n"
    pieces = [*table] if is_streamed else [table]
    async with user(FakeEngine(pieces), size=(120, 40)) as me:
        await me.ask("Hi")
        left, middle, right = (line_with(me, "left").index(w) for w in ("left", "middle", "right"))
        for row in (line_with(me, " a "), line_with(me, " d ")):
            letters = [at for at, letter in enumerate(row) if letter in "abcdef"]
            assert letters[0] == left
            assert middle < letters[1] < middle + len("middle")
            assert letters[2] == right + len("right") - 1


@pytest.mark.slow
async def test_long_lines_of_code_scroll() -> None:
    code = "```python\nx = [" + ", ".join(f"{n}" for n in range(60)) + ", 'the end']\n```"
    async with user(FakeEngine([code]), size=(80, 24)) as me:
        await me.ask("Hi")
        fence = me.chat.query_one(MarkdownFence)
        assert fence.show_horizontal_scrollbar
        assert "the end" not in me.screen_text()
        await me.press("alt+up", *[">"] * 30)
        assert "the end" in me.screen_text()
        await me.press(*["<"] * 30)
        assert "x = [0" in me.screen_text()


async def test_short_code_has_no_scrollbar() -> None:
    async with user(FakeEngine(["```\nx = 1\n```"]), size=(80, 24)) as me:
        await me.ask("Hi")
        assert not me.chat.query_one(MarkdownFence).show_horizontal_scrollbar
