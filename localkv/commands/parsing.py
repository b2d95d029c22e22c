"""From the words of a command line to values: `Command` and `Group`.

Before click parses a command's arguments, `check_arguments` looks through them. It answers other
programs' flags. For an unknown option it names the command that has it, or the nearest option. It
takes a word that ends in .gguf for a model, refuses two values where one would be lost, and writes
the rest the way click wants it. It knows which options take a value, so it never takes a value for
a flag.

Options that are not on the command line take their values from the environment, else from the
configuration file: `config.toml` in the platform's configuration folder for localkv
(~/.config/localkv on Linux), or the file that LOCALKV_CONFIG names. It has one TOML table for each
command, whose keys are the options' long names:

    [complete]
    model = "models/tales-4M-Q8_0.gguf"
    cache-type-k = "q8_0"
    stop = ["User:"]
"""

from __future__ import annotations

import copy
import importlib
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import click
from click.core import ParameterSource

from localkv.commands.other_programs import FOREIGN_COMMANDS, ForeignFlag, foreign_flag
from localkv.commands.output import OwnText, did_you_mean, note
from localkv.errors import UsageError, printable
from localkv.quant_formats import with_todays_names
from localkv.system.files import is_endless, read_input

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


ARGUMENTS = "localkv.arguments"
"""Where a context keeps the checked words of the command line, for `values_with`."""


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
            ctx.meta[ARGUMENTS] = args
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
        f"no such command {name!r}{did_you_mean(name, known)}", hint=f"commands: {', '.join(known)}"
    )


def _siblings(ctx: click.Context) -> list[str]:
    """The names of all commands."""
    group = ctx.parent.command if ctx.parent is not None else None
    return group.list_commands(ctx) if isinstance(group, Group) else [ctx.command.name or ""]


class Option(click.Option):
    """An option under a heading of the help.

    Attributes:
        panel: the heading, None for the last one.
    """

    def __init__(self, names: Sequence[str], *, panel: str | None = None, **attributes: Any):
        super().__init__(names, **attributes)
        self.panel = panel


class Argument(click.Argument):
    """An argument that the help describes."""

    def __init__(self, names: Sequence[str], *, help: str, **attributes: Any):
        super().__init__(names, **attributes)
        self._words = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), self._words


_ORDER = (
    ParameterSource.COMMANDLINE,
    ParameterSource.ENVIRONMENT,
    ParameterSource.DEFAULT_MAP,  # the configuration file
)


def distance(ctx: click.Context, name: str) -> int:
    """0 for the command line, then variables, then the configuration file, then the default."""
    source = ctx.get_parameter_source(name)
    return _ORDER.index(source) if source in _ORDER else len(_ORDER)


WHOLE = "--help-all"
"""The option that shows all options."""


class Text(click.types.StringParamType):
    """A string that is valid Unicode. In a variable it is one string, spaces and all."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail("not valid UTF-8", param, ctx)
        return text

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return [rv]


TEXT = Text()


class FileName(Text):
    """The name of a file, or of a model. "" would be the current folder."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = super().convert(value, param, ctx)
        if not text:
            self.fail("empty, expected the name of a file", param, ctx)
        if "\0" in text:
            self.fail("no file has a NUL in its name", param, ctx)
        return text


FILE = FileName()


class Choice(click.Choice[str]):
    """One of some names; the error about another name says which is nearest.

    Args:
        former: names that were called otherwise -> their names now.
        why: they were renamed, for a hint.
    """

    def __init__(
        self,
        choices: Iterable[str],
        case_sensitive: bool = True,
        former: Mapping[str, str] = MappingProxyType({}),
        why: str | None = None,
    ) -> None:
        super().__init__(choices, case_sensitive)
        self._former, self._why = former, why

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            name = str(value).lower()
            if name in self._former:
                error = HintedParameter(f"{name} is called {self._former[name]} now", ctx, param)
                error.hint = self._why
                raise error from None
            raise _not_a_choice(str(value), [*self.choices], param, ctx) from None


class HintedParameter(click.BadParameter):
    """A bad value, with what would help.

    Attributes:
        hint: None if the message says all.
    """

    hint: str | None = None


_MOST_LISTED = 10


def _not_a_choice(
    value: str, names: list[str], param: click.Parameter | None, ctx: click.Context | None
) -> HintedParameter:
    nearest, is_short = did_you_mean(value, names), len(names) <= _MOST_LISTED
    wanted = ("one of " if len(names) > 1 else "") + ", ".join(names)
    if not is_short:
        wanted = "one of its values"
    error = HintedParameter(f"{value!r} is not {wanted}{nearest}", ctx, param)
    if not is_short and ctx is not None:
        error.hint = f"localkv {ctx.command.name} {WHOLE} lists them"
    return error


class Whole(click.types.IntParamType):
    """A whole number from `least` to `most`."""

    def __init__(self, least: int, most: int | None = None) -> None:
        self.least = least
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = super().convert(value, param, ctx)
        if number < self.least:
            self.fail(f"{number} is less than {self.least}", param, ctx)
        if self.most is not None and number > self.most:
            self.fail(f"{number} is more than {self.most}", param, ctx)
        return number


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?)(B?))?B?", re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


def byte_size_of(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """The callback of a size: 24GiB, 24G (the same), 24GB (a power of ten), 512M, 1073741824."""
    if value is None:
        return None
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise click.BadParameter(
            f"{value!r} is not a size such as 24GiB, 24GB or 512MiB", ctx, param
        )
    number, unit, binary, byte = match.groups()
    base = 1000 if byte and not binary else 1024
    n_bytes = float(number) * (base ** _POWERS[unit.upper()] if unit else 1)
    if math.isinf(n_bytes):
        raise click.BadParameter("the size is too large a number", ctx, param)
    return int(n_bytes)


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


MOST_BYTES, MOST_DOTS = 1 << 18, 200
"""Most bytes of the file, and dots of a line: a dotted key takes the square of its parts."""

_TYPES: dict[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
    list: "an array",
    dict: "a table",
}


def config_path() -> Path:
    """The file that is read, which need not exist unless LOCALKV_CONFIG names it."""
    if named := os.environ.get("LOCALKV_CONFIG"):
        return Path(named)
    from platformdirs import user_config_path

    return user_config_path("localkv", appauthor=False) / "config.toml"


def config_defaults(
    command: click.Command, ctx: click.Context, commands: Sequence[str]
) -> dict[str, Any]:
    """The values of a command's table, by parameter name.

    Raises:
        UsageError: the file can't be read, or a table, key or value in it is not an option's.
    """
    tables, path = read_toml(config_path()), printable(config_path())
    if tables is None and "LOCALKV_CONFIG" in os.environ:
        raise UsageError(f"{path}: no such file, which LOCALKV_CONFIG names")
    for name, table in (tables or {}).items():
        if name not in commands:
            raise UsageError(f"{path}: [{name}] is not a command{did_you_mean(name, commands)}")
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {name} is {_kind(table)}, expected a table [{name}]")
    own = (tables or {}).get(command.name or "", {})
    return table_values(command, ctx, own, f"{path}: [{command.name}]")


def table_values(
    command: click.Command, ctx: click.Context, table: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """The values in a table whose keys are long names of a command's options, by parameter name.

    Raises:
        UsageError: a key or a value is not an option's; `where` names the table.
    """
    options, values = _long_options(command), {}
    for key, value in table.items():
        at = f"{where} {printable(key)}"
        option = options.get(key.replace("_", "-"))
        if option is None or option.name is None:
            raise UsageError(f"{at}: no such option{did_you_mean(key, options)}")
        values[option.name] = _checked(option, value, ctx, at)
    return values


def values_with(
    ctx: click.Context, table: Mapping[str, Any]
) -> tuple[click.Context, dict[str, Any]]:
    """The values of a command line where a table counts before the configuration file.

    Args:
        ctx: of the command as it was given.
        table: values by parameter name.

    Returns:
        a context in which callbacks have run again, and all values.
    """
    inner = click.Context(
        ctx.command,
        parent=ctx.parent,
        info_name=ctx.info_name,
        default_map={**(ctx.default_map or {}), **table},
    )
    with inner.scope(cleanup=False):
        click.Command.parse_args(ctx.command, inner, [*ctx.meta[ARGUMENTS]])
    return inner, dict(inner.params)


_NAMING_TYPES = {
    *(f"cache_type_{side}{part}" for side in "kv" for part in ("", "_swa", "_draft", "_rope")),
    *("kv_ladder", "pairs", "sweep", "types"),
}
"""Options whose values have names of cache types in them."""


def read_toml(path: Path) -> dict[str, Any] | None:
    """The content of a file in TOML; None if there is none.

    Raises:
        UsageError: it can't be read.
    """
    shown = printable(path)
    try:
        if is_endless(path):
            raise UsageError(f"{shown}: not a regular file")
        text = read_input(path, MOST_BYTES, shown).decode()
        if any(line.count(".") > MOST_DOTS for line in text.splitlines()):
            raise UsageError(f"{shown}: more than {MOST_DOTS} dots in one line")
        from tomllib import loads  # a file that isn't there needs none of it

        return loads(text.replace("\r\n", "\n"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"{shown}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{shown}: not UTF-8") from error
    except ValueError as error:  # among them what TOML can't be
        raise UsageError(f"{shown}: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{shown}: too many brackets within each other") from error


def _long_options(command: click.Command) -> dict[str, click.Option]:
    """The options by their long names without dashes."""
    return {
        name[2:]: param
        for param in command.params
        if isinstance(param, click.Option) and param.expose_value
        for name in param.opts
        if name.startswith("--")
    }


def _checked(option: click.Option, value: object, ctx: click.Context, where: str) -> object:
    """A value fit for click, if it is of the option's type."""
    items = value if option.multiple and isinstance(value, list) else [value]
    if option.name in _NAMING_TYPES:
        items = [with_todays_names(item) if isinstance(item, str) else item for item in items]
    for item in items:
        if type(item) not in _accepted(option):
            wanted = _TYPES[_accepted(option)[0]]
            raise UsageError(f"{where}: {_kind(item)}, expected {wanted}")
        try:
            option.type.convert(item, option, ctx)
        except click.BadParameter as error:
            hint = getattr(error, "hint", None)
            raise UsageError(f"{where}: {error.message.rstrip('.')}", hint) from error
    return items if option.multiple else items[0]


def _accepted(option: click.Option) -> tuple[type, ...]:
    if option.is_flag:
        return (bool,)
    if isinstance(option.type, click.types.IntParamType):
        return (int,)
    if isinstance(option.type, click.types.FloatParamType):
        return (float, int)
    return (str,)


def _kind(value: object) -> str:
    return _TYPES.get(type(value), f"a {type(value).__name__}")


_MOST_NAME = 28
"""Columns that names take; a longer one has a line of its own."""


@dataclass(frozen=True)
class HelpPage:
    """What a command's help shows beyond its own text.

    Attributes:
        examples: a purpose and a command line each.
        essentials: spellings of the options in the short help; without any, it has all.
        summaries: names and summaries of the commands in a group.
    """

    examples: Sequence[tuple[str, str]] = ()
    essentials: Sequence[str] = ()
    summaries: Sequence[tuple[str, str]] = ()

    def render(self, command: click.Command, ctx: click.Context, *, whole: bool) -> str:
        """The page, for stdout as it is."""
        shown = command if whole or not self.essentials else self._shortened(command, ctx)
        formatter = _Formatter(ctx, coloured=_shows_colours())
        click.Command.format_usage(shown, ctx, formatter)
        click.Command.format_help_text(shown, ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                formatter.write_examples(self.examples)
        sections = self._sections(shown, ctx)
        widths = [len(name) for rows in sections.values() for name, _ in rows]
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_rows(rows, max(w for w in widths if w <= _MOST_NAME))
        click.Command.format_epilog(shown, ctx, formatter)
        return OwnText(formatter.getvalue().rstrip("\n"))

    def _sections(
        self, command: click.Command, ctx: click.Context
    ) -> dict[str, list[tuple[str, str]]]:
        """Arguments, options and commands under their headings; the help's own options last."""
        found: dict[str, list[tuple[str, str]]] = {}
        for param in command.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                usual = "Options" if isinstance(param, click.Option) else "Arguments"
                found.setdefault(getattr(param, "panel", None) or usual, []).append(record)
        found["Options"] = found.pop("Options")
        if self.summaries:
            found["Commands"] = list(self.summaries)
        return found

    def _shortened(self, command: click.Command, ctx: click.Context) -> click.Command:
        """The command with the arguments and options that are essential, and no epilog."""
        shown, names = copy.copy(command), {*self.essentials, WHOLE}
        n_options = sum(isinstance(param, click.Option) for param in command.get_params(ctx))
        shown.params = []
        for param in command.params:
            if not isinstance(param, click.Option) or names & {*param.opts, *param.secondary_opts}:
                shown.params.append(param)
            if WHOLE in param.opts:
                shown.params[-1] = whole_option(f"Show all {n_options} options.")
        shown.epilog = None
        return shown


class _Formatter(click.HelpFormatter):
    """click's; on a terminal headings are bold, and names and command lines coloured."""

    def __init__(self, ctx: click.Context, *, coloured: bool) -> None:
        super().__init__(width=ctx.terminal_width, max_width=ctx.max_content_width)
        self._coloured = coloured

    def _styled(self, text: str, **style: Any) -> str:
        return click.style(text, **style) if self._coloured else text

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(prog, args, prefix or self._styled("Usage:", bold=True) + " ")

    def write_heading(self, heading: str) -> None:
        self.write(f"{'':>{self.current_indent}}{self._styled(f'{heading}:', bold=True)}\n")

    def write_rows(self, rows: Sequence[tuple[str, str]], width: int) -> None:
        """Names of this width, or on a line of their own, and what they mean."""
        styled = [
            (self._styled(name, fg="cyan") + " " * max(0, width - len(name)), text)
            for name, text in rows
        ]
        self.write_dl(styled, col_max=width)

    def write_examples(self, examples: Sequence[tuple[str, str]]) -> None:
        indent = " " * self.current_indent
        for purpose, line in examples:
            self.write(self._styled(f"{indent}# {purpose}", dim=True) + "\n")
            prompt = self._styled("$", dim=True)
            self.write(f"{indent}{prompt} {self._styled(line, fg='cyan')}\n")


def _shows_colours() -> bool:
    """Whether stdout is a terminal that the user wants colours on."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout is not None and sys.stdout.isatty()


def whole_option(text: str = "Show this message and exit.", *, hidden: bool = False) -> Option:
    """`--help-all`."""

    def show(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            command = cast(Any, ctx.command)
            click.echo(command.page.render(command, ctx, whole=True), color=ctx.color)
            ctx.exit()

    return Option(
        [WHOLE],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help=text,
        hidden=hidden,
    )


def version_option() -> click.Option:
    """`--version`."""

    def show(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            from localkv import __version__

            click.echo(f"localkv {__version__}")
            ctx.exit()

    return Option(
        ["--version"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show the version and exit.",
    )
