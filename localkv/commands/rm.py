"""`localkv rm`: delete models from Hugging Face's cache on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from localkv.commands.options import Panel, hf_file_option, reference_argument
from localkv.commands.output import one_line, say
from localkv.commands.parsing import Command
from localkv.errors import UsageError, byte_size

if TYPE_CHECKING:
    from localkv.loader.hub.cache import Removal

_OPTIONS = Panel("Options")


def _run(*, reference: str, hf_file: str | None, yes: bool) -> int:
    from pathlib import Path

    from localkv.loader.hub.cache import plan_removal, remove
    from localkv.loader.hub.reference import parse_reference

    if Path(reference).exists():
        raise UsageError(
            f"{reference} is a file of yours, which rm leaves alone",
            hint="it deletes models that were fetched from Hugging Face",
        )
    removal = plan_removal(parse_reference(reference, hf_file))
    what = f"{_described(removal)}, {byte_size(removal.n_bytes)}"
    if not (yes or _asked(what)):
        say("nothing was deleted")
        return 1
    remove(removal)
    say(f"deleted {what}")
    return 0


def _described(removal: Removal) -> str:
    names = [item.name for item in removal.models]
    if removal.partial_bytes:
        names.append(f"interrupted downloads of {removal.repo}")
    return " and ".join(names)


def _asked(what: str) -> bool:
    """Whether the user says yes."""
    if sys.stdin is None or sys.stderr is None or not sys.stdin.isatty():
        raise UsageError("stdin is not a terminal to ask on", hint=f"--yes deletes {what}")
    print(f"delete {one_line(what)}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


rm = Command(
    "rm",
    examples=[("One model", "localkv rm ORG/REPO:Q8_0")],
    params=[
        reference_argument("Or ORG/REPO/FILE.gguf."),
        hf_file_option(),
        _OPTIONS.flag("-y --yes", help="Do not ask."),
    ],
    callback=_run,
    help="Delete a model that was fetched from Hugging Face, all revisions of it. Names are those "
    "that `localkv list` shows.",
)
