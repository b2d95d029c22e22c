"""Defaults from the user's configuration file, one TOML table per command:

    [complete]
    model = "models/tales-4M-Q8_0.gguf"
    cache-type-k = "q8_0"
    stop = ["User:"]

Keys are the options' long names. The file is `config.toml` in the platform's configuration folder
for localkv (~/.config/localkv on Linux), or the one that LOCALKV_CONFIG names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from localkv.cli.output.messages import did_you_mean
from localkv.errors import UsageError, printable
from localkv.system.input_file import is_endless, read_input

MOST_BYTES, MOST_DOTS = 1 << 18, 200
"""Of the file, and of a line of it: to read a dotted key takes the square of its parts."""

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
    tables, path = _read(config_path()), printable(config_path())
    for name, table in tables.items():
        if name not in commands:
            raise UsageError(f"{path}: [{name}] is not a command{did_you_mean(name, commands)}")
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {name} is {_kind(table)}, expected a table [{name}]")
    options = _long_options(command)
    defaults = {}
    for key, value in tables.get(command.name or "", {}).items():
        where = f"{path}: [{command.name}] {key}"
        option = options.get(key.replace("_", "-"))
        if option is None or option.name is None:
            raise UsageError(f"{where}: no such option{did_you_mean(key, options)}")
        defaults[option.name] = _checked(option, value, ctx, where)
    return defaults


def _read(path: Path) -> dict[str, Any]:
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
        if "LOCALKV_CONFIG" in os.environ:
            raise UsageError(f"{shown}: no such file, which LOCALKV_CONFIG names") from None
        return {}
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
    for item in items:
        if type(item) not in _accepted(option):
            wanted = _TYPES[_accepted(option)[0]]
            raise UsageError(f"{where}: {_kind(item)}, expected {wanted}")
        try:
            option.type.convert(item, option, ctx)
        except click.BadParameter as error:
            hint = getattr(error, "hint", None)
            raise UsageError(f"{where}: {error.message.rstrip('.')}", hint) from error
    return items if option.multiple else value


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
