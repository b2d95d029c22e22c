"""Write docs/commands.md from the commands' own help: `python docs/make_commands.py`."""

from __future__ import annotations

from pathlib import Path

import click

from localkv.cli import COMMANDS, cli

PAGE = Path(__file__).with_name("commands.md")
INTRODUCTION = """# Commands

What `localkv COMMAND --help` says. `docs/make_commands.py` writes this page, and a test compares.
"""


def help_of(*names: str) -> str:
    """The help of a command, in 80 columns."""
    settings = {"terminal_width": 80, "help_option_names": ["-h", "--help"]}
    ctx = click.Context(cli, info_name="localkv", **settings)
    command: click.Command = cli
    for name in names:
        found = cli.get_command(ctx, name)
        assert found is not None
        ctx, command = click.Context(found, ctx, info_name=name, **settings), found
    return command.get_help(ctx)


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for names in ((), *((name,) for name in COMMANDS)):
        title = " ".join(("localkv", *names))
        parts.append(f"## {title}\n\n```console\n$ {title} --help\n{help_of(*names)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
