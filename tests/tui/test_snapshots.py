"""The main screens, letter by letter.

After a change that is meant: LOCALKV_UPDATE_SNAPSHOTS=1 pytest tests/tui/test_snapshots.py, and
read the difference.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from localkv.chat.engine import EngineStoppedError
from localkv.chat.store import Store
from localkv.tui.dialogs import ChoiceScreen
from support.chat_pilot import User, user, words
from support.fake_engine import FACTS, FakeEngine, Wait

FOLDER = Path(__file__).parent / "snapshots"
SIZES = pytest.mark.parametrize("size", [(80, 24), (120, 36)], ids=["80x24", "120x36"])

ANSWER = """<think>
Both sides of the cache matter.
</think>

Reading a packed cache costs **less**:

- `q4_0` moves 4.5 bits a value
- scales are folded into the weights

```python
values = (codes - 8) * scale
```

日本語 and 🦊 keep their columns."""


async def check(me: User, name: str) -> None:
    """Compare the screen with the one that is kept."""
    await me.pilot.pause(0.1)
    # what depends on the clock: the spinner and the seconds of loading
    shown = re.sub("[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏]", "⠋", me.screen_text())
    shown = re.sub(r"kernels   \d+ s", "kernels   0 s", shown)
    width, height = me.app.size
    path = FOLDER / f"{name}-{width}x{height}.txt"
    if os.environ.get("LOCALKV_UPDATE_SNAPSHOTS"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8"), f"{path.name} differs"


@SIZES
async def test_loading(size: tuple[int, int]) -> None:
    loading = Wait()
    async with user(FakeEngine(loading=[loading]), size=size, wait=False) as me:
        await me.until(lambda: "weights 3/16" in me.rendered("#load-strip"))
        await check(me, "loading")
        loading.over.set()


@SIZES
async def test_empty(size: tuple[int, int]) -> None:
    async with user(FakeEngine(), size=size) as me:
        await check(me, "empty")


@SIZES
async def test_answer(size: tuple[int, int]) -> None:
    async with user(FakeEngine(words(ANSWER)), size=size) as me:
        await me.ask("Is a packed cache slower? 混ぜる")
        await check(me, "answer")


@SIZES
async def test_writing(size: tuple[int, int]) -> None:
    pause = Wait()
    async with user(FakeEngine([*words("Once upon a time"), pause]), size=size) as me:
        await me.send("A story")
        await me.until(pause.reached.is_set)
        await me.until(lambda: "time" in me.markdown())
        await me.write("Typed meanwhile")
        await check(me, "writing")
        pause.over.set()


@pytest.mark.slow
@SIZES
async def test_branches_and_commands(size: tuple[int, int]) -> None:
    async with user(FakeEngine(["One."], ["Two."]), size=size) as me:
        await me.ask("Count")
        await me.press("ctrl+r")
        await me.until(lambda: me.texts[-1] == "Two.")
        await me.ready()
        await me.send("/stats")
        await me.write("/s")
        await check(me, "commands")


@SIZES
async def test_nearly_full_and_asked(size: tuple[int, int]) -> None:
    facts = replace(FACTS, n_ctx=16)
    engine = FakeEngine(words("It goes on and on and on and"), facts=facts, context_full=True)
    async with user(engine, size=size) as me:
        await me.send("Write five words to me")
        await me.until(lambda: isinstance(me.app.screen, ChoiceScreen))
        await check(me, "full")


@SIZES
async def test_stopped_engine(size: tuple[int, int]) -> None:
    stopped = EngineStoppedError("the engine stopped (SIGKILL)", "Killed")
    async with user(FakeEngine(["Half an answer", stopped]), size=size) as me:
        await me.send("Speak")
        await me.until(lambda: me.chat.query_one("#load-strip").display)
        await check(me, "stopped")


@pytest.mark.slow
@SIZES
async def test_sessions(store: Store, size: tuple[int, int]) -> None:
    async with user(FakeEngine(["A fox."], ["An owl."]), size=size, store=store) as me:
        await me.ask("Tell of a fox")
        await me.press("ctrl+n")
        await me.ask("Tell of an owl")
        await me.press("ctrl+o", "down")
        await check(me, "sessions")


async def test_help() -> None:
    async with user(FakeEngine(), size=(80, 24)) as me:
        await me.press("f1")
        await check(me, "help")


@pytest.mark.slow
async def test_panel_on_a_small_screen() -> None:
    async with user(FakeEngine(words("a b c")), size=(80, 24)) as me:
        await me.ask("Hi")
        await me.press("f2")
        await check(me, "panel")
