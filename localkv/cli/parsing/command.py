"""`Command` and `Group`: how every command parses its arguments and finds defaults."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import click

from localkv.cli.output.messages import did_you_mean
from localkv.cli.parsing.arguments import check_arguments
from localkv.cli.parsing.config_file import config_defaults
from localkv.cli.parsing.foreign_commands import FOREIGN_COMMANDS
from localkv.cli.parsing.help_page import HelpPage, whole_option
from localkv.errors import UsageError

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Command(click.Command):
    """One command of `localkv`.

    Its options take their values from the command line, else from the environment, else from the
    command's table in the configuration file. Other programs' flags that have no meaning here are
    answered before click sees them.

    Args:
        examples: for the help, a purpose and a command line each.
        essentials: spellings of the options in the short help, with spaces between them, if it does
            not have all of them.
        reads_config: whether the configuration file is read, which then must be right.
    """

    def __init__(
        self,
        name: str,
        *,
        examples: Sequence[tuple[str, str]] = (),
        essentials: str = "",
        reads_config: bool = True,
        **attributes: Any,
    ) -> None:
        super().__init__(name=name, context_settings=dict(_SETTINGS), **attributes)
        self.page = HelpPage(examples, essentials.split())
        self.params.append(whole_option(hidden=not essentials))
        self.reads_config = reads_config

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            args, asks_help = check_arguments(self, ctx, args)
            if self.reads_config and not asks_help:
                ctx.default_map = config_defaults(self, ctx, _siblings(ctx))
        return super().parse_args(ctx, args)

    def get_help(self, ctx: click.Context) -> str:
        return self.page.render(self, ctx, whole=False)


class Group(click.Group):
    """Commands that are imported when they are asked for.

    Args:
        commands_at: command -> the module that holds it under the same name, or MODULE:NAME, and
            its short help.
        examples: for the help, a purpose and a command line each.
    """

    def __init__(
        self,
        name: str,
        *,
        commands_at: Mapping[str, tuple[str, str]],
        examples: Sequence[tuple[str, str]],
        **attributes: Any,
    ) -> None:
        super().__init__(
            name=name, context_settings=dict(_SETTINGS), no_args_is_help=True, **attributes
        )
        self.commands_at = dict(commands_at)
        summaries = [(name, text) for name, (_, text) in commands_at.items()]
        self.page = HelpPage(examples, summaries=summaries)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise UsageError(
                f"no such option {error.option_name}",
                hint="options follow a command, as in: localkv complete -m FILE -p TEXT",
            ) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and args[0] not in self.commands_at:
            raise _unknown_command(args[0], self.commands_at)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands_at)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands_at:
            return None
        place, short_help = self.commands_at[cmd_name]
        module, _, name = place.partition(":")
        command = getattr(importlib.import_module(module), name or cmd_name)
        assert isinstance(command, click.Command)
        command.short_help = short_help
        return command

    def get_help(self, ctx: click.Context) -> str:
        return self.page.render(self, ctx, whole=True)


def _unknown_command(name: str, known: Mapping[str, Any]) -> UsageError:
    if name.lower().endswith(".gguf"):
        shown = name if name.isprintable() else "FILE"
        return UsageError(
            f"no such command {name!r}",
            hint=f"localkv chat {shown} talks with a model, localkv show {shown} says what it is",
        )
    if hint := FOREIGN_COMMANDS.get(name):
        return UsageError(f"no such command {name!r}", hint=hint)
    return UsageError(
        f"no such command {name!r}{did_you_mean(name, known)}",
        hint=f"commands: {', '.join(known)}",
    )


def _siblings(ctx: click.Context) -> list[str]:
    """The names of all commands."""
    group = ctx.parent.command if ctx.parent is not None else None
    return group.list_commands(ctx) if isinstance(group, Group) else [ctx.command.name or ""]
