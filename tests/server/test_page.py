"""The page at `/`, in a browser without a window."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from support.server import RunningServer

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
PHONE = {"width": 390, "height": 844}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (apt install chromium)"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[Page]:
    """A page of a browser that was never here; what it complains of is an error."""
    context = browser.new_context(viewport={"width": 1100, "height": 760})
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(server.url)
    settle(page, max_tokens=24, temperature=0)
    yield page
    context.close()
    assert not problems


def settle(page: Page, **fields: float | str) -> None:
    """Choose settings as a user does."""
    page.keyboard.press("Alt+s")
    for name, value in fields.items():
        page.locator(f"[name={name}]").fill(str(value))
    page.get_by_role("button", name="Save").click()


def say(page: Page, text: str) -> None:
    """Send a message, and wait for the answer."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(page.locator("#send")).to_be_visible()


def picture(page: Page, name: str) -> None:
    """Keep a screenshot for whoever wants to look at it."""
    if folder := os.environ.get("LOCALKV_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_a_conversation_is_answered_and_kept(page: Page):
    say(page, "Once there was a dog named Spot.")
    answer = page.locator(".message.assistant .text")
    expect(answer).not_to_be_empty()
    expect(page.locator(".message.assistant .actions")).to_contain_text("tokens")
    expect(page.locator("#meter-text")).to_contain_text("f16/f16")
    picture(page, "conversation")
    text = answer.text_content()
    page.reload()
    expect(page.locator(".message.assistant .text")).to_have_text(text)
    expect(page.locator("#conversations .open")).to_have_text("Once there was a dog named Spot.")


def test_again_gives_another_answer_beside_the_first(page: Page):
    settle(page, temperature=2)
    say(page, "Hello")
    page.get_by_role("button", name="Again").click()
    expect(page.locator(".actions").last).to_contain_text("2/2")
    page.get_by_role("button", name="‹").click()
    expect(page.locator(".actions").last).to_contain_text("1/2")


def test_escape_stops(page: Page):
    settle(page, max_tokens=2000, temperature=2)
    page.get_by_label("Message", exact=True).fill("Tell me all")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .text")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_visible()


def test_a_message_is_edited(page: Page):
    say(page, "Hello")
    page.get_by_role("button", name="Edit").click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("Hello")
    expect(page.locator(".message")).to_have_count(0)


def test_markdown_is_drawn_and_never_run(page: Page):
    drawn = page.evaluate(
        """async () => {
            const { markdown } = await import("/page/markdown.js");
            const node = document.createElement("div");
            node.append(...markdown(`# Head\\n\\nSome **bold** and \\`code\\`.\\n\\n- one\\n- two\\n
<img src=x onerror="window.harmed = 1"> [bad](javascript:alert(1)) [good](https://example.org)

| a | b |\\n|---|---|\\n| 1 | 2 |\\n\\n\\`\\`\\`py\\nif 1 < 2:\\n    pass\\n\\`\\`\\`\\n`));
            document.body.append(node);
            const names = [...node.querySelectorAll("*")].map((one) => one.localName);
            return [names, node.textContent, node.querySelector("a").href, window.harmed ?? 0];
        }"""
    )
    names, text, href, harmed = drawn
    for name in ("h1", "strong", "code", "ul", "li", "table", "td", "pre"):
        assert name in names
    assert "img" not in names
    assert names.count("a") == 1
    assert href == "https://example.org/"
    assert 'onerror="window.harmed = 1"' in text
    assert "if 1 < 2:\n    pass" in text
    assert harmed == 0


def test_a_phone_has_all_of_it(page: Page):
    page.set_viewport_size(PHONE)
    say(page, "Hello")
    expect(page.locator("#sidebar")).not_to_be_visible()
    picture(page, "phone")
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= PHONE["width"]
    page.get_by_role("button", name="Conversations").click()
    expect(page.locator("#sidebar")).to_be_visible()
    page.wait_for_timeout(300)
    picture(page, "phone-menu")
    page.get_by_role("button", name="New", exact=True).click()
    expect(page.locator(".message")).to_have_count(0)


def test_a_dark_screen(page: Page):
    page.emulate_media(color_scheme="dark")
    say(page, "Hello")
    picture(page, "dark")
    page.keyboard.press("Alt+s")
    picture(page, "settings")
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).not_to_be_visible()
