"""From an exception to a line on stderr and an exit code.

0 success, 1 something failed, 2 the command line or a setting is wrong, 130 interrupted, 141 the
reader of stdout went away (128 + SIGPIPE, as a shell reports for any program in a pipe).
LOCALKV_DEBUG=1 adds the traceback.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from localkv.cli.output.messages import say
from localkv.errors import LocalKVError
from localkv.system.limits import exhausted

if TYPE_CHECKING:
    from click.core import ParameterSource

_OURS = ("OMP_WAIT_POLICY",)
FAILURE, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


def report(error: Exception) -> int:
    """Print the error; returns the exit code."""
    if os.environ.get("LOCALKV_DEBUG", "0") not in ("", "0"):
        import traceback

        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, LocalKVError):
        message, hint, code = error.message, error.hint, error.exit_code
    elif isinstance(error, click.ClickException):
        message, code = _click_message(error), error.exit_code
        hint = getattr(error, "hint", None)
    elif (known := exhausted(error)) is not None:
        message, hint, code = known.message, known.hint, known.exit_code
    else:
        message, hint, code = _other_message(error)
    say(f"error: {_shortened(message)}")
    if hint:
        say(f"hint: {hint}")
    return code


_MOST_CHARACTERS = 600
"""Most characters of a line, which may repeat what was typed."""


def _shortened(text: str) -> str:
    """The beginning and the end of a text that is too long for a line."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    third = _MOST_CHARACTERS // 3
    return f"{text[: 2 * third]} ... {text[-third:]}"


def _other_message(error: Exception) -> tuple[str, str | None, int]:
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror}", None, FAILURE
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    hint = "a bug: LOCALKV_DEBUG=1 shows where, please report it"
    if isinstance(error, ValueError) and (names := _library_settings()):
        hint = f"try it without {', '.join(names)} in the environment; otherwise {hint}"
    return what, hint, FAILURE


def _library_settings() -> list[str]:
    """Variables that are set for the libraries that models run on, which refuse some values."""
    prefixes = ("NUMBA_", "TORCH_", "PYTORCH_", "TRITON_", "OMP_", "MKL_", "KMP_")
    return sorted(name for name in os.environ if name.startswith(prefixes) and name not in _OURS)


def _click_message(error: click.ClickException) -> str:
    if isinstance(error, click.MissingParameter) and error.param is not None:
        variable = error.param.envvar
        name = variable[0] if isinstance(variable, list) and variable else None
        also = f" (or set {name})" if name else ""
        return f"{_names(error.param)} is missing{also}"
    message = error.message.rstrip(".")
    if isinstance(error, click.BadParameter) and error.param is not None:
        return f"{_source(error)}: {message}"
    return message[:1].lower() + message[1:]


def _source(error: click.BadParameter) -> str:
    """Where the bad value came from: the option's names, or the variable that was set."""
    assert error.param is not None
    source: ParameterSource | None = None
    if error.ctx is not None and error.param.name is not None:
        source = error.ctx.get_parameter_source(error.param.name)
    if source == click.core.ParameterSource.ENVIRONMENT:
        for variable in error.param.envvar or ():
            if os.environ.get(variable):
                return variable
    return _names(error.param)


def _names(param: click.Parameter) -> str:
    if isinstance(param, click.Argument):
        return param.make_metavar(click.Context(click.Command(None)))
    return "/".join(param.opts)


def silence_stdout() -> None:
    """Drop text that is still buffered for stdout: Python would write it once more at exit."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError, AttributeError):
        pass
