"""Looks through a command's arguments before click parses them.

Answers other programs' flags, says of an unknown option which command has it or which option is
nearest, and writes the rest the way click wants it. A value is never taken for a flag: it is known
which options take one.
"""

from __future__ import annotations

import click

from localkv.cli.output.messages import did_you_mean, note
from localkv.cli.parsing.foreign_flags import ForeignFlag, foreign_flag
from localkv.cli.parsing.help_page import WHOLE
from localkv.errors import UsageError

_MOST_OWNERS = 3


def check_arguments(
    command: click.Command, ctx: click.Context, args: list[str]
) -> tuple[list[str], bool]:
    """The arguments for click, and whether help is asked for.

    Raises:
        UsageError: an option is unknown, or another program's that would change the result.
    """
    takes_value = _options(command, ctx)
    may_stand_alone = _with_optional_values(command, ctx)
    takes_arguments = any(isinstance(param, click.Argument) for param in command.params)
    rest = list(args)
    kept: list[str] = []
    notes: list[str] = []
    asks_help = False
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            kept += [arg, *rest]
            break
        if not arg.startswith("-") or arg == "-":
            if not takes_arguments:
                hint = "text goes after -p" if "-p" in takes_value else None
                raise UsageError(f"unexpected argument {arg!r}", hint=hint)
            kept.append(arg)
            continue
        name, value = _split(arg)
        if name in takes_value:
            kept += _own(name, value, takes_value[name], rest, name in may_stand_alone)
            asks_help |= name in (*ctx.help_option_names, WHOLE)
        elif foreign := foreign_flag(command.name, name):
            notes.append(_foreign(name, value, foreign, rest))
        elif takes_value.get(arg[:2]) and _is_number(arg[2:]):
            kept.append(arg)  # -n32
        else:
            raise _unknown(name, ctx, takes_value)
    if not asks_help:
        for line in notes:
            note(line)
    return kept, asks_help


def _unknown(name: str, ctx: click.Context, known: dict[str, bool]) -> UsageError:
    """The error about an option that the command does not have, but others may."""
    group = ctx.parent.command if ctx.parent is not None else None
    owners = []
    if isinstance(group, click.Group):
        for other in group.list_commands(ctx):
            command = group.get_command(ctx, other)
            if command is not None and name in _options(command, ctx):
                owners.append(f"localkv {other}")
    if not owners:
        return UsageError(f"no such option {name}{did_you_mean(name, known)}")
    owners = owners[:_MOST_OWNERS]
    listed = " and ".join(filter(None, (", ".join(owners[:-1]), owners[-1])))
    verb = "have" if len(owners) > 1 else "has"
    return UsageError(
        f"localkv {ctx.command.name} has no option {name}", hint=f"{listed} {verb} it"
    )


def _options(command: click.Command, ctx: click.Context) -> dict[str, bool]:
    """Every spelling of every option, and whether it takes a value."""
    return {
        name: not param.is_flag
        for param in command.get_params(ctx)
        if isinstance(param, click.Option)
        for name in (*param.opts, *param.secondary_opts)
    }


def _with_optional_values(command: click.Command, ctx: click.Context) -> set[str]:
    """The spellings of options whose value may be left out."""
    return {
        name
        for param in command.get_params(ctx)
        if isinstance(param, click.Option) and isinstance(param.flag_value, str)
        for name in param.opts
    }


def _split(arg: str) -> tuple[str, str | None]:
    """An option's name and the value attached with "="; `--ctx_size` is `--ctx-size`, as there."""
    name, equals, value = arg.partition("=")
    if name.startswith("--"):
        name = "--" + name[2:].replace("_", "-")
    return name, value if equals else None


def _own(
    name: str, value: str | None, takes_value: bool, rest: list[str], may_stand_alone: bool
) -> list[str]:
    """An option with its value, which is removed from `rest`."""
    if not takes_value:
        return [name if value is None else f"{name}={value}"]
    if value is not None:
        return [name, value]
    if may_stand_alone and rest and rest[0].startswith("-") and rest[0] != "-":
        return [name]
    return [name, rest.pop(0)] if rest else [name]


def _foreign(name: str, value: str | None, flag: ForeignFlag, rest: list[str]) -> str:
    """The note about a flag, whose values are removed from `rest`."""
    values = [] if value is None else [value]
    if value is None:
        if flag.n_values:
            values = rest[: flag.n_values]
        elif rest and rest[0].lower() in flag.optional_values:
            values = rest[:1]
        del rest[: len(values)]
    shown = " ".join([name, *values])
    if flag.is_refused(values[0].lower() if values else None):
        raise UsageError(f"{shown} is not supported", hint=flag.advice)
    return f"{shown} is not needed: {flag.advice}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
