"""The prompt of `complete`: from -p, from a file, or from stdin if that is asked for."""

from __future__ import annotations

import click
from click.core import ParameterSource

from localkv.cli.parsing.escapes import unescape
from localkv.cli.parsing.prompt import read_file, read_stdin, without_final_newline
from localkv.errors import UsageError

STDIN = "{stdin}"
"""In -p, the place of the text on stdin."""


def prompt_text(prompt: str | None, file: str | None, escape: bool) -> str:
    """The text to continue.

    stdin is read if there is neither -p nor -f, and if they ask for it: `-f -`, or `STDIN` in -p.
    Otherwise it may belong to somebody else, such as the loop of a shell that starts this program.

    Args:
        prompt: the value of -p; after `-f -` it follows the text on stdin and an empty line.
        file: the value of -f.
        escape: process escapes in -p; one of `STDIN`'s own characters makes it plain text.

    Raises:
        UsageError: there is no prompt, or more than one; or a file can't be read.
        LocalKVError: a text is not UTF-8.
    """
    if prompt is not None and file is not None:
        prompt, file = _nearest(prompt, file)
    if prompt is None:
        if file is not None:
            return without_final_newline(read_file(file))
        text = without_final_newline(read_stdin() or "")
        if not text:
            raise UsageError("there is no prompt: give -p TEXT, -f FILE, or text on stdin")
        return text
    pieces = prompt.split(STDIN)
    if escape:
        pieces = [unescape(piece) for piece in pieces]
    if len(pieces) > 1:
        return _piped(f"the text for {STDIN} in -p").join(pieces)
    if file is not None:
        return "\n\n".join(part for part in (_piped("the prompt"), *pieces) if part)
    return pieces[0]


def _piped(what: str) -> str:
    return without_final_newline(read_file("-", what))


def _nearest(prompt: str, file: str) -> tuple[str | None, str | None]:
    """The one of -p and -f that is on the command line; both if -p follows the text of `-f -`."""
    ctx = click.get_current_context()
    given = [
        name
        for name in ("prompt", "file")
        if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE
    ]
    if len(given) == 1:
        return (prompt, None) if given == ["prompt"] else (None, file)
    if file != "-":
        raise UsageError("-p and -f both give the prompt, use one")
    if STDIN in prompt:
        raise UsageError(f"-f - and {STDIN} in -p both read stdin, use one")
    return prompt, file
