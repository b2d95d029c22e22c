"""The chat's screen, whatever models, sessions, errors and links say."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from textual.widgets import Markdown

from localkv.chat.session import ChatSession
from localkv.chat.store import Store
from localkv.errors import LocalKVError
from localkv.sampling.params import SamplingParams
from localkv.system.terminal_text import without_controls
from support.attack.hostile_texts import EVERYTHING, ORDERS, random_text
from support.chat_pilot import User, user
from support.fake_engine import FACTS, FakeEngine

FAST_ANSWERS, LONG_ANSWERS = 6, 400
SECONDS = 30.0
"""Longest time for an answer on the screen, on a busy machine."""

MARKUP = "[b]bold[/b] [@click=app.quit]press[/] [link='file:///etc/passwd']x[/link] [$primary]"


@pytest.fixture
def store() -> Iterator[Store]:
    with closing(Store(":memory:")) as store:
        yield store


def sent(me: User) -> str:
    """All text that the terminal gets, with every link that it would open itself."""
    strips = me.app.screen._compositor.render_strips()
    parts = []
    for strip in strips:
        for text, style, _ in strip:
            parts.append(text)
            assert style is None or not style.link
        parts.append("\n")
    return "".join(parts)


def check(me: User) -> str:
    shown = sent(me)
    assert without_controls(shown) == shown.replace("\n", "")
    me.screen_text()  # every line is as wide as the screen
    return shown


async def test_names_and_warnings() -> None:
    facts = replace(
        FACTS,
        name=f"na{ORDERS[2]}me {MARKUP}",
        architecture=f"ar{EVERYTHING}ch {MARKUP}",
        warnings=(f"look {MARKUP}", EVERYTHING),
    )
    async with user(FakeEngine(["fine"], facts=facts), size=(200, 50)) as me:
        shown = check(me)
        assert shown.count("[@click=app.quit]press[/]") >= 2
        assert "look [b]bold[/b]" in "".join(n.message for n in me.app._notifications)
        assert all(not n.markup for n in me.app._notifications)
        await me.ask(f"{ORDERS[0]} {MARKUP}")
        shown = check(me)
        assert "[@click=app.quit]press[/]" in shown
        assert "na[35;46;9mme" in shown
        await me.ask("/model")
        check(me)


@pytest.mark.parametrize("size", [(40, 12), (120, 40)])
async def test_errors(size: tuple[int, int]) -> None:
    error = LocalKVError(f"fails {EVERYTHING} {MARKUP}", hint=f"try {EVERYTHING} {MARKUP}")
    async with user(FakeEngine([error]), size=size) as me:
        await me.send("hello")
        await me.until(lambda: "fails" in me.notes)
        check(me)
        me.app.notify(f"{EVERYTHING}{MARKUP}", title="title")
        await me.pilot.pause()
        check(me)
    async with user(FakeEngine(loading=[error]), size=size, wait=False) as me:
        await me.until(lambda: "fails" in me.rendered("#load-strip"))
        check(me)


async def test_sessions(store: Store) -> None:
    for text in (EVERYTHING.replace("\0", ""), MARKUP, "plain"):
        session = ChatSession(store, model=f"{text}.gguf", params=SamplingParams())
        session.model_name = text
        session.say(text)
        answer = session.begin_answer()
        session.extend(answer, text)
        session.keep(answer)
        session.rename(text)
    async with user(FakeEngine(), store=store, system_prompt=EVERYTHING) as me:
        await me.press("ctrl+o")
        assert "[@click=app.quit]press[/]" in check(me)
        await me.press("down", "enter")
        await me.ready()
        assert "[@click=app.quit]press[/]" in check(me)
        await me.press("up")
        check(me)


async def test_links(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    hostile = (
        *("file:///etc/passwd", "javascript:alert(1)", "vscode://x", "ssh://-oProxyCommand=x"),
        *("--help", "/etc/passwd", "data:text/html,x", "", "\x1b]0;x\x07", "x" * 10_000, "#there"),
        *(" http://example.org", "FILE:///x", "h\x00ttp://x"),
    )
    answer = f"[one](<{EVERYTHING}>) [two](vscode://x) [three](https://example.org/{ORDERS[0]})"
    async with user(FakeEngine([answer + " <ssh://-oProxyCommand=x> ![p](file:///x)"])) as me:
        await me.ask("links")
        check(me)
        widget = me.chat.query(Markdown).last()
        for url in hostile:
            widget.post_message(Markdown.LinkClicked(widget, url))
            await me.pilot.pause()
            assert opened == []
        check(me)
        for url in ("https://example.org/a", "HTTP://example.org", "mailto:a@example.org"):
            widget.post_message(Markdown.LinkClicked(widget, url))
            await me.until(lambda url=url: url in opened)
        assert "Opened https://example.org/a" in me.notes
        assert "Not opened, as it is no address on the web: vscode://x" in me.notes


ANSWERS: dict[str, str] = {
    "combining characters": "e" + "\u0301" * 200_000,
    "joined": "\u200d".join("👩" * 5_000),
    "quotes": ">" * 5_000 + "x",
    "lists": "* " * 2_000 + "x",
    "brackets": "[" * 20_000,
    "links": "[a](" * 5_000,
    "images": "![" * 5_000 + "](x)",
    "stars": "*a " * 5_000 + "**b" * 5_000,
    "backticks": "".join("`" * i + " " for i in range(1, 300)),
    "fences": "```\n" * 301,
    "a table": "|" + "a|" * 100 + "\n|" + "-|" * 100 + "\n" + ("|" + "b|" * 100 + "\n") * 3,
    "a long line": "word " * 40_000,
    "a long word": "w" * 100_000,
    "addresses": "http://a.b/" * 5_000,
    "mails": "a@b.c" * 5_000,
    "dots": "a." * 20_000,
    "entities": "&amp;&#x1b;&#27;&#155;&#x202e;&NewLine;&#0;" * 200,
    "tags": "<a href='x'>" * 3_000,
    "references": "".join(f"[{i}]: <x{i}>\n" for i in range(2_000)),
    "rules": "---\n\n" * 150,
    "headings": "# x\n" * 200,
    "reasoning": "<think>" * 3_000 + EVERYTHING,
    "code that is no code": "```\x1b[31m python\n\x1b]52;c;eA==\x07\n```\n",
    "lines": "a\n" * 2_000,
    "zero width": "\u200b\u200e\u2060\ufeff" * 20_000,
}


LONG = (
    *("a table", "headings", "rules", "a long line", "fences", "lines", "addresses", "dots"),
    *("entities", "tags", "mails", "a long word", "quotes"),
)
"""Texts that take seconds to be laid out."""
QUICK = ("brackets", "stars")


def _mark(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.attack] if name in LONG else [pytest.mark.slow] * (name not in QUICK)


@pytest.mark.parametrize("name", [pytest.param(n, marks=_mark(n)) for n in ANSWERS])
async def test_answers(name: str) -> None:
    await _show(ANSWERS[name])


async def _show(answer: str, **options: Any) -> None:
    engine = FakeEngine([answer], ["fine"], facts=replace(FACTS, n_ctx=10**6))
    async with user(engine, size=(80, 24), **options) as me:
        started = time.monotonic()
        await me.ask("hello")
        check(me)
        await me.ask("again")
        assert "fine" in check(me)
        assert time.monotonic() - started < SECONDS


def random_answer(seed: int) -> str:
    rng = random.Random(seed)
    marks = (
        "*",
        "_",
        "`",
        "```\n",
        "> ",
        "- ",
        "1. ",
        "# ",
        "|",
        "|-|\n",
        "[",
        "](",
        ")",
        "![",
        "<",
    )
    marks += (
        "http://a.b",
        "\n\n",
        "\n",
        "    ",
        "&#x9b;",
        "<think>",
        "</think>",
        "[b]",
        "[/]",
        "\\",
    )
    return "".join(rng.choice(marks) + random_text(rng) for _ in range(rng.randrange(60)))


async def _check_random(n_answers: int) -> None:
    answers = [random_answer(seed) for seed in range(n_answers)]
    engine = FakeEngine(*([a] for a in answers), facts=replace(FACTS, n_ctx=10**6))
    async with user(engine, size=(80, 24)) as me:
        for answer in answers:
            await me.ask(f"say {without_controls(answer)[:20]}")
            check(me)
            if len(me.path) > 20:
                await me.press("ctrl+n")
                await me.ready()


@pytest.mark.slow
async def test_random_answers() -> None:
    await _check_random(FAST_ANSWERS)


@pytest.mark.attack
async def test_many_random_answers() -> None:
    await _check_random(LONG_ANSWERS)
