"""The chat on terminals of every size, down to none at all."""

from __future__ import annotations

import random

import pytest

from localkv.tui.dialogs import ChoiceScreen
from support.chat_pilot import User, user, words
from support.fake_engine import FakeEngine, Wait

ANSWER = (
    "<think>\nHm, a long thought.\n</think>\n\n# A title\n\n- one\n- two 日本語\n\n"
    "| a | b |\n|--:|:-:|\n| 1 | 2 |\n\n```python\n" + "x = 1  # " + "long " * 30 + "\n```\n\nEnd."
)
EDGES = (
    (0, 0),
    (0, 30),
    (1, 1),
    (2, 3),
    (3, 2),
    (5, 160),
    (160, 0),
    (160, 160),
    (104, 1),
    (80, 24),
)


async def resize(me: User, width: int, height: int) -> None:
    await me.pilot.resize_terminal(width, height)
    await me.pilot.pause(0.01)


def sizes(seed: int, n: int) -> list[tuple[int, int]]:
    """Every second edge, and sizes from all magnitudes, up to what shows all at once."""
    rng = random.Random(seed)
    drawn = [(int(160 ** rng.random()), int(160 ** rng.random())) for _ in range(n)]
    return [*EDGES[seed % 2 :: 2], *drawn]


@pytest.mark.slow
async def test_no_room_for_a_single_character() -> None:
    async with user(FakeEngine(words(ANSWER))) as me:
        for size in ((0, 0), *((width, 40) for width in range(1, 12)), (120, 40)):
            await resize(me, *size)
        await me.ask("Hi")
        assert me.texts == ["Hi", ANSWER]


@pytest.mark.slow
async def test_no_size_ends_an_idle_chat() -> None:
    async with user(FakeEngine(words(ANSWER), ["More."])) as me:
        for step in ("empty", "answered", "panel", "typed"):
            if step == "answered":
                await me.ask("Hi")
            elif step == "panel":
                await me.press("f2")
            elif step == "typed":
                await me.write("/s")
            for size in sizes(len(step), 5):
                await resize(me, *size)
        await resize(me, 120, 40)
        me.prompt.fill("")
        await me.ask("And?")
        assert me.texts[-1] == "More."


@pytest.mark.slow
async def test_no_size_ends_an_answer() -> None:
    pieces, pauses = [], []
    drawn = sizes(1, 14)
    for at, word in enumerate(words(ANSWER)):
        pieces.append(word)
        if at % 2 == 0 and len(pauses) < len(drawn):
            pauses.append(Wait())
            pieces.append(pauses[-1])
    async with user(FakeEngine(pieces)) as me:
        await me.send("Hi")
        for pause, size in zip(pauses, drawn, strict=False):
            await me.until(pause.reached.is_set)
            await resize(me, *size)
            pause.over.set()
        await me.ready()
        await resize(me, 120, 40)
        assert me.texts == ["Hi", ANSWER]


@pytest.mark.slow
async def test_no_size_ends_a_dialog() -> None:
    async with user(FakeEngine(words("It goes on"), context_full=True)) as me:
        await me.send("Go")
        await me.until(lambda: isinstance(me.app.screen, ChoiceScreen))
        for size in sizes(2, 4):
            await resize(me, *size)
        await resize(me, 120, 40)
        await me.press("escape", "f1")
        for size in sizes(3, 4):
            await resize(me, *size)
        await me.press("escape", "ctrl+o")
        for size in sizes(4, 4):
            await resize(me, *size)
        await resize(me, 120, 40)
        await me.press("escape")
        assert me.texts == ["Go", "It goes on"]
