"""What a shell may do to the process: exit codes, Ctrl-C, and the standard streams.

An exception becomes a line on stderr and an exit code: 0 success, 1 something failed, 2 the command
line or a setting is wrong, 130 interrupted, 141 the reader of stdout went away (128 + SIGPIPE, as a
shell reports for any program in a pipe). LOCALKV_DEBUG=1 adds the traceback.

Ctrl-C raises Python's exception, except where that would harm: where nobody can catch it, or a
library catches it and goes on, the process ends at once.

The result goes to stdout: if it can't be written, that is an error. Everything else goes to stderr:
if that can't be written, nobody is there to read it, and the result comes all the same.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from localkv.commands.output import say
from localkv.errors import LocalKVError
from localkv.system.limits import exhausted

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

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


_IMPORTS = "<frozen importlib._bootstrap>"


def interrupt(number: int, frame: FrameType | None) -> None:
    """The effect of SIGINT.

    An exception in the middle of an import is taken for a part that is missing by NumPy and others,
    which go on without it or blame something else.
    """
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTS:
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def end_unseen() -> None:
    """Let an interrupt end the process that comes in a finaliser or a callback of Python's own.

    Python would show a traceback and go on as if nothing had been pressed.
    """
    show = sys.unraisablehook

    def hook(ignored: UnraisableHookArgs) -> None:
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            os._exit(INTERRUPTED)
        show(ignored)

    sys.unraisablehook = hook


def prepare_streams() -> None:
    """Take over the standard streams of this process, before anything is written or opened."""
    _occupy_closed()
    if sys.stdout is None:
        sys.stdout = _ClosedOutput()
    if sys.stderr is not None:
        buffer = io.BufferedWriter(_PatientOutput(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(
            buffer, sys.stderr.encoding, sys.stderr.errors, line_buffering=True
        )


def _occupy_closed() -> None:
    """Open the null device in place of closed descriptors.

    The next file to be opened would get their numbers, a database say, and libraries that print to
    stderr would print into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


class _PatientOutput(io.FileIO):
    """Accepts text that can't be written, and drops it."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return len(data) if written is None else written


class _ClosedOutput(io.TextIOBase):
    """A stream that was closed when the program started. Only writing shows it."""

    encoding, errors = "utf-8", "replace"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, "stdout is closed")
