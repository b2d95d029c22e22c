"""Text can be read in both themes: its contrast on every screen, from the colours that are sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import pytest
from rich.color import ColorTriplet
from rich.style import Style

from localkv.chat.engine import EngineStoppedError
from localkv.errors import ModelFileError
from localkv.tui.dialogs import ChoiceScreen
from support.chat_pilot import FakeModels, User, user, words
from support.fake_engine import FACTS, FakeEngine, Wait

LEAST = 4.5
"""WCAG 2's contrast for text, level AA."""

ANSWER = """<think>
Both sides matter.
</think>

# One
## Two
### Three
#### Four

Reading **packed** *rows* with `q4_0` ~~costs~~ [less](https://example.org).

> A quotation

1. first
- other

| type | bits |
|:-----|-----:|
| q4_0 | 4.5 |

```python
def scale(code: int) -> float:
    # a comment
    return (code - 8) * 0.5 if code is not None else "text"
```

---

The end."""


def luminance(color: ColorTriplet) -> float:
    def linear(value: float) -> float:
        return value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(part / 255) for part in color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(style: Style) -> float:
    assert style.color is not None
    assert style.bgcolor is not None
    assert not style.dim
    text, ground = (luminance(c.get_truecolor()) for c in (style.color, style.bgcolor))
    if style.reverse:
        text, ground = ground, text
    return (max(text, ground) + 0.05) / (min(text, ground) + 0.05)


def hard_to_read(me: User) -> list[str]:
    """Texts on the screen whose contrast is too small; borders and bars are none.

    Behind a dialog the screen is dimmed, as nothing on it can be used then.
    """
    found = []
    screen = me.app.screen
    dialog = screen.query(".dialog")
    shown = (dialog.first() if dialog else screen).region
    strips = screen._compositor.render_strips()
    for strip in strips[shown.y : shown.bottom]:
        for text, style, _ in strip.crop(shown.x, shown.right):
            if any(letter.isalnum() for letter in text) and style is not None:
                value = contrast(style)
                if value < LEAST:
                    found.append(f"{value:.2f} {style} {text.strip()!r}")
    return found


Opened = AbstractAsyncContextManager[User]


@asynccontextmanager
async def empty() -> AsyncIterator[User]:
    async with user(FakeEngine()) as me:
        yield me


@asynccontextmanager
async def loading() -> AsyncIterator[User]:
    wait = Wait()
    async with user(FakeEngine(loading=[wait]), wait=False) as me:
        await me.until(wait.reached.is_set)
        yield me
        wait.over.set()


@asynccontextmanager
async def answered() -> AsyncIterator[User]:
    async with user(FakeEngine(words(ANSWER), ["More."]), size=(120, 90)) as me:
        await me.ask("Is it slower?")
        await me.press("ctrl+r")
        await me.ready()
        await me.press("alt+up", "left", "ctrl+t")
        await me.send("/stats")
        yield me


@asynccontextmanager
async def narrow() -> AsyncIterator[User]:
    async with user(FakeEngine(words("It is so.")), size=(80, 30)) as me:
        await me.ask("Is it?")
        await me.send("/nonsense")
        me.app.notify("a fact")
        me.app.notify("a warning", severity="warning")
        await me.write("/s")
        yield me


@asynccontextmanager
async def writing() -> AsyncIterator[User]:
    pause = Wait()
    async with user(FakeEngine(["Once", pause])) as me:
        await me.send("A story")
        await me.until(pause.reached.is_set)
        await me.send("this waits")
        await me.press("alt+up")
        yield me
        pause.over.set()


@asynccontextmanager
async def full() -> AsyncIterator[User]:
    facts = replace(FACTS, n_ctx=16)
    async with user(FakeEngine(["Short."], ["Long."], facts=facts)) as me:
        await me.ask("one two three four five six")
        await me.send("a b c d e")
        await me.until(lambda: isinstance(me.app.screen, ChoiceScreen))
        yield me


@asynccontextmanager
async def dropped() -> AsyncIterator[User]:
    async with full() as me:
        await me.press("enter")
        await me.until(lambda: me.texts[-1] == "Long.")
        yield me


@asynccontextmanager
async def stopped() -> AsyncIterator[User]:
    async with user(FakeEngine(["Half", EngineStoppedError("it stopped", "Killed")])) as me:
        await me.send("Speak")
        await me.until(lambda: me.chat.query_one("#load-strip").display)
        yield me


@asynccontextmanager
async def sessions() -> AsyncIterator[User]:
    async with user(FakeEngine(["A fox."])) as me:
        await me.ask("Tell of a fox")
        await me.press("ctrl+o", "ctrl+d")
        yield me


@asynccontextmanager
async def models() -> AsyncIterator[User]:
    names = FakeModels("models/a.gguf", "org/repo:Q8_0", errors={"x": ModelFileError("no")})
    async with user(FakeEngine(), models=names) as me:
        await me.send("/model")
        yield me


@asynccontextmanager
async def help_page() -> AsyncIterator[User]:
    async with user(FakeEngine()) as me:
        await me.press("f1")
        yield me


@pytest.mark.slow
@pytest.mark.parametrize(
    "screen",
    [
        empty,
        loading,
        answered,
        narrow,
        writing,
        full,
        dropped,
        stopped,
        sessions,
        models,
        help_page,
    ],
)
async def test_all_text_can_be_read(screen: Callable[[], Opened]) -> None:
    async with screen() as me:
        for theme in ("localkv", "localkv-light"):
            me.app.theme = theme
            await me.pilot.pause(0.3)
            assert hard_to_read(me) == [], theme
