"""The page at `/`, in a browser without a window."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from support.paths import MODELS
from support.server import RunningServer

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
PHONE = {"width": 390, "height": 844}
NARROW = {"width": 320, "height": 640}

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
    page.reload()
    expect(page.locator(".message")).to_have_count(2)


def test_a_conversation_that_is_deleted_while_it_is_answered_is_gone(page: Page):
    settle(page, max_tokens=2000, temperature=2)
    page.get_by_label("Message", exact=True).fill("Tell me all")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .text")).not_to_be_empty()
    page.get_by_role("button", name="Delete").click()
    expect(page.locator("#conversations .open")).to_have_count(0)
    expect(page.locator("#send")).to_be_visible()
    page.reload()
    expect(page.locator("#model")).not_to_have_text("…")
    expect(page.locator("#conversations .open")).to_have_count(0)


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


def answer_with(page: Page, *deltas: dict[str, object]) -> None:
    """Let the server give these answers."""
    ends = [({}, "stop")]
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        for delta, reason in [*((delta, None) for delta in deltas), *ends]
    ]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.context.route(
        "**/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )


HOSTILE = {
    "lists": "- " * 3000 + "end",
    "numbered lists": "1. " * 5000 + "end",
    "quotes": ">" * 20000 + "end",
    "lists in quotes": "> - 1. " * 3000 + "end",
    "indented lists": "\n".join(" " * (2 * n) + "- x" for n in range(500)) + " end",
    "stars": "*" * 50000 + "end",
    "emphasis": "*a **b " * 10000 + "** c* " * 10000 + "end",
    "underlines": "_a __b " * 20000 + "end",
    "backticks": " ".join("`" * n for n in range(1, 500)) + "end",
    "brackets": "[" * 50000 + "]" * 50000 + "end",
    "links in links": "[" * 3000 + "a" + "](https://a.example)" * 3000 + "end",
    "half links": "[a](" * 30000 + "end",
    "addresses": "https://" + "." * 100000 + "end",
    "dashes": "a|b\n" + "-" * 100000 + "end",
    "columns": "|" * 50000 + "\n" + "|-" * 50000 + "\n" + "|" * 50000 + "end",
    "rows": "|a|b|\n|-|-|\n" + "|1|2|\n" * 20000 + "|end|",
    "fences": "```\n" * 20001 + "end",
    "hashes": "#" + " #" * 50000 + "end",
    "spaces": "# " + " " * 100000 + "end",
    "tags": "<div>" * 20000 + "end",
    "a line": "a" * 1000000 + "end",
    "paragraphs": "a\n\n" * 50000 + "end",
    "lines": "a\n" * 50000 + "end",
}


def test_any_answer_is_drawn_soon_and_not_deep(page: Page):
    page.set_viewport_size(NARROW)
    for name, text in HOSTILE.items():
        seconds, depth, width, end = page.evaluate(
            """async (text) => {
                const { draw } = await import("/page/markdown.js");
                const list = document.getElementById("messages");
                const node = document.createElement("div");
                const item = document.createElement("li");
                item.className = "message assistant";
                node.className = "text";
                item.append(node);
                list.replaceChildren(item);
                const began = performance.now();
                draw(node, text);
                const took = (performance.now() - began) / 1000;
                let depth = 0;
                for (let one = node; one; one = [...one.children].at(-1)) depth++;
                return [took, depth, list.scrollWidth, node.textContent.slice(-9)];
            }""",
            text,
        )
        assert seconds < 2, name  # 0.2 on a machine that does nothing else
        assert depth < 50, name
        assert width <= NARROW["width"], name
        assert "end" in end, name


@pytest.mark.parametrize("name", ["lists", "quotes"])
def test_an_answer_that_no_screen_could_draw_is_kept(page: Page, name: str):
    answer_with(page, {"content": HOSTILE[name]})
    say(page, "Hello")
    answer = page.locator(".message.assistant .text")
    expect(answer).to_contain_text("end")
    page.reload()
    expect(answer).to_contain_text("end")


def test_what_markdown_says_nothing_of_stays_text(page: Page):
    lines = [
        "- one", " two", "", "5. five", "7. seven", "1. a", "- b",
        "[page](docs/page.md) [bad](javascript:alert(1))",
        "```py title=x", "code", "```not the end", "snake_case_name 2 * 3 * 4", "```",
        "| a | b |", "|---|---|", "| 1 | 2 | 3 |", "C:\\path\\[x] \\(y\\)",
    ]  # fmt: skip
    shown = page.evaluate(
        """async (text) => {
            const { markdown } = await import("/page/markdown.js");
            const node = document.createElement("div");
            node.append(...markdown(text));
            for (const one of node.querySelectorAll("li[value]")) one.prepend(`${one.value}. `);
            return node.textContent;
        }""",
        "\n".join(lines),
    )
    for part in (
        "one", "two", "5. five", "7. seven", "1. a", "docs/page.md", "javascript:alert(1)",
        "title=x", "not the end", "snake_case_name 2 * 3 * 4", "3", "C:\\path\\[x] \\(y\\)",
    ):  # fmt: skip
        assert part in shown


CODE = "x = " + "1 + " * 40 + "2\n"


def test_code_is_copied_by_keyboard(page: Page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer_with(page, {"content": f"See:\n\n```py\n{CODE}```\nThat is all."})
    say(page, "Hello")
    button = page.get_by_role("button", name="Copy code")
    button.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".code .copy")).to_have_text("Copied")
    expect(page.locator("#said")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == CODE.rstrip("\n")
    expect(button).to_have_text("Copy")  # again, soon
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.keyboard.press("Enter")  # the button has the focus still
    expect(page.locator(".code .copy")).to_have_text("Copied")


def test_a_narrow_screen_scrolls_no_page(page: Page):
    page.set_viewport_size(NARROW)
    long = "without_a_space_" * 20
    call = {"name": "get_weather", "arguments": json.dumps({"city": long})}
    text = f"{long}\n\n- {long}\n\n> {long}\n\n```\n{CODE}```\n\n|a|b|c|\n|-|-|-|\n|{long}|2|3|"
    answer_with(
        page,
        {"reasoning_content": long},
        {"content": text},
        {"tool_calls": [{"index": 0, "function": call}]},
    )
    say(page, f"Hello {long}")
    page.get_by_text("Reasoning").click()
    expect(page.locator(".calls")).to_contain_text("get_weather")
    picture(page, "narrow")
    page.context.unroute("**/chat/completions")
    error = json.dumps({"error": {"message": f"the prompt is too long: {long}"}})
    page.context.route(
        "**/chat/completions", lambda route: route.fulfill(body=f"data: {error}\n\n")
    )
    page.get_by_role("button", name="Again").click()
    expect(page.locator(".error")).to_contain_text("too long")
    widths = (
        "[document.documentElement, document.getElementById('messages')].map((x) => x.scrollWidth)"
    )
    assert max(page.evaluate(widths)) <= NARROW["width"]


def test_an_answer_that_was_cut_with_the_page_says_so(page: Page):
    page.evaluate(
        """() => {
            const chunk = { choices: [{ index: 0, delta: { content: "Once upon" } }] };
            const body = new ReadableStream({ start: (to) =>
                to.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(chunk)}\n\n`)) });
            const known = window.fetch;
            window.fetch = (path, ...rest) =>
                path.endsWith("completions") ? new Response(body) : known(path, ...rest);
        }"""
    )
    page.get_by_label("Message", exact=True).fill("Hello")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .text")).to_have_text("Once upon")
    page.reload()
    expect(page.locator(".message.assistant .text")).to_have_text("Once upon")
    expect(page.locator(".message.assistant .error")).to_contain_text("cut")


def test_an_answer_that_drawing_fails_on_is_shown_as_it_was_written(page: Page):
    text = "Once **upon** a time"
    shown = page.evaluate(
        """async (text) => {
            const { draw } = await import("/page/markdown.js");
            const node = document.createElement("div"), known = document.createElement;
            document.createElement = (name) => {
                if (name === "strong") throw new RangeError("too deep");
                return known.call(document, name);
            };
            draw(node, text);
            return node.textContent;
        }""",
        text,
    )
    assert shown == text


@pytest.mark.slow
def test_the_menu_chooses_among_several_models(browser: Browser, tmp_path: Path):
    for name in ("one", "two"):
        shutil.copy(MODELS / "tales-4M-Q8_0.gguf", tmp_path / f"{name}.gguf")
    server = RunningServer("--models-dir", str(tmp_path), model=None)
    page = browser.new_page()
    try:
        page.goto(server.url)
        menu = page.get_by_label("Model", exact=True)
        expect(menu).to_be_visible()
        menu.select_option("two")
        page.reload()
        expect(menu).to_have_value("two")
        page.get_by_label("Message", exact=True).fill("Hello")
        page.keyboard.press("Enter")
        expect(page.locator(".message.assistant .text")).not_to_be_empty(timeout=30_000)
        states = [one["status"]["value"] for one in server.get("/v1/models")[1]["data"]]
        assert states == ["unloaded", "loaded"]
    finally:
        page.close()
        assert server.stop() == 0
