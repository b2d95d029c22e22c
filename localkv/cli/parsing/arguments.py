"""Looks through a command's arguments before click parses them.

Answers other programs' flags, names the command that has an unknown option or the option nearest to
it, takes a word that ends in .gguf for a model, refuses two values where one would be lost, and
writes the rest the way click wants it. A value is never taken for a flag, since it is known which
options take one.
"""

from __future__ import annotations

import re

import click

from localkv.cli.output.messages import did_you_mean, note
from localkv.cli.parsing.foreign_flags import ForeignFlag, foreign_flag
from localkv.cli.parsing.option_types import WHOLE, Text
from localkv.errors import UsageError, printable

_MOST_OWNERS = 3
_MOST_SHOWN = 200
"""Most characters of a value in a message."""
_MODEL = "-m"
"""The option that a word ending in .gguf belongs to."""


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
    given = _Given(command, ctx)
    asks_help = False
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            kept += [arg, *rest]
            break
        if not arg.startswith("-") or arg == "-":
            if _MODEL in takes_value and arg.lower().endswith(".gguf"):
                kept += [_MODEL, arg]
                given.add(_MODEL, arg)
                continue
            if not takes_arguments:
                hint = "text goes after -p" if "-p" in takes_value else None
                raise UsageError(f"unexpected argument {arg!r}", hint=hint)
            kept.append(arg)
            continue
        name, value = _split(arg)
        if name in takes_value:
            own = _own(name, value, takes_value[name], rest, name in may_stand_alone)
            kept += own
            if len(own) > 1 or not takes_value[name] or name in may_stand_alone:
                given.add(name, own[-1])
            asks_help |= name in (*ctx.help_option_names, WHOLE)
        elif foreign := foreign_flag(command.name, name):
            notes.append(_foreign(name, value, foreign, rest, ctx))
        elif takes_value.get(arg[:2]) and _is_number(arg[2:]):
            kept.append(arg)  # -n32
            given.add(arg[:2], arg[2:])
        else:
            raise _unknown(name, ctx, takes_value)
    if not asks_help:
        for line in (*notes, *given.overridden()):
            note(line)
    return kept, asks_help


class _Given:
    """The values of options on a command line, to find an option with two."""

    def __init__(self, command: click.Command, ctx: click.Context) -> None:
        self._params = {
            name: param
            for param in command.get_params(ctx)
            if isinstance(param, click.Option)
            for name in (*param.opts, *param.secondary_opts)
        }
        self._values = dict[str, list[str]]()

    def add(self, name: str, value: str) -> None:
        """Note a value, or a flag by its name."""
        value = printable(value) if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]!r}..."
        param = self._params[name]
        if not (param.multiple or param.count or (param.is_eager and param.is_flag)):
            if param.is_flag:
                value = (param.secondary_opts if name in param.secondary_opts else param.opts)[-1]
            self._values.setdefault(param.name or "", []).append(value)

    def overridden(self) -> list[str]:
        """Notes about numbers and choices with two values: the last one counts, as in llama.cpp.

        Raises:
            UsageError: there are two texts or files, and nobody expects to lose one.
        """
        notes = []
        by_name = {param.name: param for param in self._params.values()}
        for name, values in self._values.items():
            others = [value for value in dict.fromkeys(values) if value != values[-1]]
            if not others:
                continue
            param = by_name[name]
            shown = "/".join(param.opts)
            if isinstance(param.type, Text):
                listed = " and ".join((*others, values[-1]))
                hint = "a word that ends in .gguf counts as -m" if _MODEL in param.opts else None
                raise UsageError(f"{shown} is given {len(others) + 1} times: {listed}", hint=hint)
            if param.is_flag:
                notes.append(f"{values[-1]} counts, not {' or '.join(others)} before it")
            else:
                notes.append(f"{shown}: {values[-1]} counts, not {' or '.join(others)} before it")
        return notes


def _unknown(name: str, ctx: click.Context, known: dict[str, bool]) -> UsageError:
    """The error about an option that the command does not have, but others may."""
    owners = _owners(name, ctx)
    if not owners:
        return UsageError(f"no such option {name}{did_you_mean(name, known)}")
    owners = owners[:_MOST_OWNERS]
    listed = " and ".join(filter(None, (", ".join(owners[:-1]), owners[-1])))
    verb = "have" if len(owners) > 1 else "has"
    return UsageError(
        f"localkv {ctx.command.name} has no option {name}", hint=f"{listed} {verb} it"
    )


def _owners(name: str, ctx: click.Context) -> list[str]:
    """The commands that have an option, as "localkv COMMAND"."""
    group = ctx.parent.command if ctx.parent is not None else None
    if not isinstance(group, click.Group):
        return []
    commands = {other: group.get_command(ctx, other) for other in group.list_commands(ctx)}
    return [
        f"localkv {other}"
        for other, command in commands.items()
        if command is not None and name in _options(command, ctx)
    ]


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


def _foreign(
    name: str, value: str | None, flag: ForeignFlag, rest: list[str], ctx: click.Context
) -> str:
    """The note about a flag, whose values are removed from `rest`."""
    values = [] if value is None else [value]
    if value is None:
        if flag.n_values:
            values = rest[: flag.n_values]
        elif rest and rest[0].lower() in flag.optional_values:
            values = rest[:1]
        del rest[: len(values)]
    shown = " ".join([name, *values])
    advice = _within(flag.advice, ctx)
    answer = flag.answer(values[0].lower() if values else None)
    if answer == "refused":
        raise UsageError(f"{shown} is not supported", hint=advice)
    state = "not supported yet, and left out" if answer == "left out" else "not needed"
    return f"{shown} is {state}: {advice}"


_NAMED_OPTION = re.compile(r"(?<![\w-])(localkv \w+ (?:[\w\"$()]+ )?)?(--?[a-zA-Z][\w-]*)")


def _within(advice: str, ctx: click.Context) -> str:
    """The advice for one command: an option that it lacks is named with a command that has it."""
    own = _options(ctx.command, ctx)

    def named(found: re.Match[str]) -> str:
        before, option = found.groups()
        if before or option in own or not (owners := _owners(option, ctx)):
            return found[0]
        return f"{owners[0]} {option}"

    return _NAMED_OPTION.sub(named, advice)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
