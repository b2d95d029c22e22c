"""Write docs/chat.svg, a screenshot of a real conversation: `python docs/make_screenshot.py`.

The chat runs with the model that ships, without a terminal; the speeds are this machine's.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from localkv.chat.engine import EngineOptions
from localkv.chat.session import ChatSession
from localkv.chat.store import Store
from localkv.commands.chat import default_threads
from localkv.engine_process.client import EngineProcess
from localkv.sampling.params import SamplingParams
from localkv.tui.app import ChatApp
from localkv.tui.chat_screen import ChatScreen
from localkv.tui.widgets.prompt import PromptSubmitted

PICTURE = Path(__file__).with_name("chat.svg")
MODEL = str(PICTURE.parents[1] / "models" / "tales-4M-F16.gguf")
SIZE = (116, 40)
CONVERSATION = (
    "Remember this: The code of the owl is 735. Mia likes honey.",
    "Tell me a story about a fox named Mia.",
    "What is the code of the owl?",
)


async def screenshot() -> str:
    """The picture as SVG."""
    arguments = {
        "n_ctx": 1024,
        "cache_type_k": "q4_0",
        "cache_type_v": "q8_0",
        "n_threads": default_threads(),
    }
    params = SamplingParams(temperature=0.5, seed=5)
    session = ChatSession(Store(":memory:"), model=MODEL, params=params)
    app = ChatApp(ChatScreen(session, EngineOptions(MODEL, arguments), EngineProcess))
    async with app.run_test(size=SIZE) as pilot:
        while app.chat.meter.facts is None:
            await pilot.pause(0.1)
        for text in CONVERSATION:
            app.chat.post_message(PromptSubmitted(text))
            await pilot.pause(0.2)
            while app.chat.busy:
                await pilot.pause(0.1)
        await pilot.pause(0.5)
        return app.export_screenshot(title="localkv chat")


def main() -> None:
    svg = asyncio.run(screenshot())
    # the exporter makes up names that differ each time
    PICTURE.write_text(re.sub(r"terminal-\d+", "terminal", svg), encoding="utf-8")


if __name__ == "__main__":
    main()
