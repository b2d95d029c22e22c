"""Write docs/commands.md from the commands' own help: `python docs/make_commands.py`."""

from __future__ import annotations

from pathlib import Path

import click

from localkv.cli import COMMANDS, cli
from localkv.commands.parsing import Command, Group

PAGE = Path(__file__).with_name("commands.md")
INTRODUCTION = """# Commands

What `localkv COMMAND --help-all` says, or `--help` where that shows all options.
`docs/make_commands.py` writes this page, and a test compares.
"""


def help_of(*names: str) -> tuple[str, str]:
    """The option that asks for all of a command's help, and that help in 80 columns."""
    settings = {"terminal_width": 80, "help_option_names": ["-h", "--help"]}
    ctx = click.Context(cli, info_name="localkv", **settings)
    command: click.Command = cli
    for name in names:
        found = cli.get_command(ctx, name)
        assert found is not None
        ctx, command = click.Context(found, ctx, info_name=name, **settings), found
    assert isinstance(command, Command | Group)
    flag = "--help-all" if command.page.essentials else "--help"
    return flag, command.page.render(command, ctx, whole=True)


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for names in ((), *((name,) for name in COMMANDS)):
        title = " ".join(("localkv", *names))
        flag, text = help_of(*names)
        parts.append(f"## {title}\n\n```console\n$ {title} {flag}\n{text}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
