"""Runs the chat on a screen without a terminal, with scripted engines, as a user would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

from textual.pilot import Pilot
from textual.widgets import OptionList, Static
from textual.widgets.markdown import MarkdownBlock

from localkv.chat.conversation import Message
from localkv.chat.engine import EngineOptions
from localkv.chat.model_choice import Models, OfferedModel
from localkv.chat.session import ChatSession
from localkv.chat.store import KeptStates, Store
from localkv.errors import LocalKVError
from localkv.sampling.params import SamplingParams
from localkv.tui.app import ChatApp
from localkv.tui.chat_screen import ChatScreen
from localkv.tui.dialogs import ChoiceScreen
from localkv.tui.widgets.prompt import Prompt
from localkv.tui.widgets.transcript import Note
from support.fake_engine import FakeEngine

SECONDS = 20.0
"""Longest wait for something that must happen."""


class FakeModels(Models):
    """Models that are only names.

    Attributes:
        names: those on this machine.
        errors: why a model can't be loaded, by name.
        checked: what was asked about.
    """

    def __init__(self, *names: str, errors: Mapping[str, LocalKVError] | None = None) -> None:
        super().__init__()
        self.names = names
        self.errors = errors or {}
        self.checked: list[EngineOptions] = []

    def all(self) -> list[OfferedModel]:
        return [OfferedModel(name, name, 5 << 20) for name in self.names]

    def find(self, name: str) -> str:
        return name

    def completions(self, text: str) -> list[str]:
        return [name for name in self.names if name.startswith(text)]

    def check(self, options: EngineOptions, **where: Any) -> None:
        self.checked.append(options)
        if options.model in self.errors:
            raise self.errors[options.model]


@dataclass
class User:
    """Somebody at the keyboard, who sees the screen.

    Attributes:
        engines: those that were started, the newest last.
        asked_for: what each was told to load.
    """

    app: ChatApp
    pilot: Pilot[None]
    engines: list[FakeEngine] = field(default_factory=list)
    asked_for: list[EngineOptions] = field(default_factory=list)

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    @property
    def chat(self) -> Any:
        return self.app.chat

    @property
    def path(self) -> list[Message]:
        """The messages that are shown."""
        return [view.message for view in self.chat.transcript.views()]

    @property
    def texts(self) -> list[str]:
        return [message.content for message in self.path]

    @property
    def prompt(self) -> Prompt:
        return self.chat.query_one(Prompt)

    @property
    def notes(self) -> str:
        """What the program said, and what it notified of."""
        said = [str(note.render()) for note in self.chat.query(Note)]
        return "\n".join([*said, *(n.message for n in self.app._notifications)])

    def rendered(self, selector: str) -> str:
        return str(self.app.screen.query_one(selector, Static).render())

    def markdown(self) -> str:
        """The text of the last answer as the screen has it."""
        blocks = self.chat.transcript.views()[-1].query(MarkdownBlock)
        return "\n".join(str(block._content) for block in blocks)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def write(self, text: str) -> None:
        """Type into the prompt."""
        self.prompt.insert(text)
        await self.pilot.pause()

    async def send(self, text: str) -> None:
        await self.write(text)
        await self.press("enter")

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for something to become true."""
        deadline = asyncio.get_running_loop().time() + SECONDS
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, "it did not happen"
            await asyncio.sleep(0.01)
        await self.pilot.pause()

    async def ready(self) -> None:
        """Wait until nothing goes on."""
        await self.until(lambda: self.chat.meter.facts is not None and not self.chat.busy)

    async def ask(self, text: str) -> None:
        """Send, and wait for the answer."""
        await self.send(text)
        await self.until(lambda: self.path and self.path[-1].role == "assistant")
        await self.ready()

    def screen_text(self) -> str:
        """What the terminal shows, without trailing spaces."""
        width, height = self.app.size
        lines = self.app.screen._compositor.render_strips()
        text = "\n".join("".join(s.text for s in strip).rstrip() for strip in lines[:height])
        assert all(strip.cell_length == width for strip in lines[:height])
        return text + "\n"


@asynccontextmanager
async def user(
    *engines: FakeEngine,
    size: tuple[int, int] = (120, 40),
    store: Store | None = None,
    session_id: int | None = None,
    wait: bool = True,
    models: Models | None = None,
    states: KeptStates | None = None,
    otherwise: EngineOptions | None = None,
    **session: Any,
) -> AsyncIterator[User]:
    """A user of the chat, whose engines are these, one after the other."""
    waiting = list(engines)
    made: list[FakeEngine] = []
    options: list[EngineOptions] = []

    def new_engine(wanted: EngineOptions) -> FakeEngine:
        options.append(wanted)
        made.append(waiting.pop(0))
        return made[-1]

    with nullcontext(store) if store else closing(Store(":memory:")) as sessions:
        chat = ChatSession(sessions, model="tiny.gguf", **{"params": SamplingParams(), **session})
        if session_id is not None:
            chat = chat.resumed(session_id)
        app = ChatApp(
            ChatScreen(
                chat,
                EngineOptions("tiny.gguf", {"n_threads": 3}),
                new_engine,
                models or FakeModels(),
                states,
                otherwise=otherwise,
            )
        )
        async with app.run_test(size=size, notifications=True) as pilot:
            somebody = User(app, pilot, made, options)
            await somebody.until(lambda: made)
            if wait:
                await somebody.ready()
            yield somebody
    # exceptions of handlers are raised by run_test


def words(text: str) -> Sequence[str]:
    """A text in pieces, as a model would say it."""
    pieces, start = [], 0
    for at, letter in enumerate(text):
        if letter == " ":
            pieces.append(text[start:at])
            start = at
    return [*pieces, text[start:]]


async def choose(me: User, answer: str) -> None:
    """Answer a question."""
    await me.until(lambda: isinstance(me.app.screen, ChoiceScreen))
    options = me.app.screen.query_one(OptionList)
    options.highlighted = options.get_option_index(answer)
    await me.press("enter")
