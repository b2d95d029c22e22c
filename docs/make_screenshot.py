"""Write docs/chat.svg and docs/page.png, screenshots of real conversations.

    python docs/make_screenshot.py SmolLM2-135M-Instruct.Q4_1.gguf

The chat runs with this model and without a terminal, then a server with it, and its page in
Chromium. Speeds are this machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Error, expect, sync_playwright

from localkv.chat.engine import EngineOptions
from localkv.chat.session import ChatSession
from localkv.chat.store import Store
from localkv.commands.chat import default_threads
from localkv.engine_process.client import EngineProcess
from localkv.sampling.params import SamplingParams
from localkv.tui.app import ChatApp
from localkv.tui.chat_screen import ChatScreen
from localkv.tui.widgets.prompt import PromptSubmitted

DOCS = Path(__file__).resolve().parent
SIZE = (116, 40)
CONVERSATION = (
    "Why is the sky blue? Answer in two sentences.",
    "Write a Python function that returns the mean of a list.",
)


async def screenshot(model: str) -> str:
    """The picture of the chat as SVG."""
    arguments = {
        "n_ctx": 4096,
        "cache_type_k": "q4_1c",
        "cache_type_v": "q4_0",
        "n_threads": default_threads(),
    }
    params = SamplingParams(temperature=0)
    session = ChatSession(Store(":memory:"), model=model, params=params)
    app = ChatApp(ChatScreen(session, EngineOptions(model, arguments), EngineProcess))
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


def photograph(model: str, picture: Path) -> None:
    """Write a picture of the page of a server that has this model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ["-m", model, "--port", port, "--preset", "compact", "-c", "4096", "-np", "2"]
    server = subprocess.Popen([sys.executable, "-m", "localkv", "serve", *options, "-q"])
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            page = browser.new_page(viewport={"width": 1000, "height": 700})
            for _ in range(100):
                try:
                    page.goto(f"http://127.0.0.1:{port}/")
                    break
                except Error:  # the server does not listen yet
                    page.wait_for_timeout(300)
            page.keyboard.press("Alt+s")
            for name, value in {"max_tokens": "220", "temperature": "0"}.items():
                page.locator(f"[name={name}]").fill(value)
            page.get_by_role("button", name="Save").click()
            for number, text in enumerate(CONVERSATION, start=1):
                page.get_by_label("Message", exact=True).fill(text)
                page.keyboard.press("Enter")
                done = page.locator(".message.assistant .actions")
                expect(done).to_have_count(number, timeout=60_000)
                expect(page.locator("#send")).to_be_visible(timeout=60_000)
            page.screenshot(path=picture)
            browser.close()
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a GGUF file with a chat template")
    model = parser.parse_args().model
    svg = asyncio.run(screenshot(model))
    # the exporter makes up names that differ each time
    (DOCS / "chat.svg").write_text(re.sub(r"terminal-\d+", "terminal", svg), encoding="utf-8")
    photograph(model, DOCS / "page.png")


if __name__ == "__main__":
    main()
