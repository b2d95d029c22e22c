"""The documentation says what the program does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_commands_page_is_current() -> None:
    path = ROOT / "docs" / "make_commands.py"
    spec = importlib.util.spec_from_file_location("make_commands", path)
    assert spec is not None
    assert spec.loader is not None
    make_commands = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_commands)
    written = (ROOT / "docs" / "commands.md").read_text()
    assert written == make_commands.page(), "run python docs/make_commands.py"


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "benchmarks/README.md",
        "docs/architecture.md",
        "docs/chat.md",
        "docs/kv-cache.md",
        "docs/quality.md",
        "models/README.md",
    ],
)
def test_links_and_paths_exist(page: str) -> None:
    path = ROOT / page
    targets = re.findall(r"\]\(([^)#:]+)\)", path.read_text())
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert missing == []


def test_chat_page_has_every_key_and_command() -> None:
    from localkv.tui.help_screen import KEYS, MESSAGE_KEYS
    from localkv.tui.slash_commands import COMMANDS

    page = (ROOT / "docs" / "chat.md").read_text()
    for key, _ in (*KEYS, *MESSAGE_KEYS):
        assert f"| {key} |" in page
    for command in COMMANDS:
        assert f"| `{command.usage}` | {command.description} |" in page
