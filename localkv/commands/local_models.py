"""`localkv pull`, `list` and `rm`: models by name on this machine.

`pull` fetches one from Hugging Face and prints the path of its file, `list` shows what headers of
files say, and `rm` deletes what was fetched.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localkv.commands.model_file import fetched
from localkv.commands.options import OUTPUT, Panel, hf_file_option, json_option, reference_argument
from localkv.commands.output import TextOutput, note, one_line, say, table, warn
from localkv.commands.parsing import Command
from localkv.errors import ModelFileError, UsageError, byte_size

if TYPE_CHECKING:
    from localkv.loader.hub.cache import Removal
    from localkv.loader.local_models import LocalModel


def _pull(*, reference: str, hf_file: str | None) -> None:
    from localkv.loader.hub.download import Download
    from localkv.loader.hub.find import find
    from localkv.loader.hub.reference import parse_reference

    found = find(parse_reference(reference, hf_file), update=True)
    is_new = isinstance(found, Download) and found.missing
    model = fetched(found)
    if not is_new:
        note(f"{model.name} is up to date")
    with TextOutput(None) as out:
        out.write(str(model.path))


pull = Command(
    "pull",
    examples=[
        ("The usual file of a repository", "localkv pull ORG/REPO"),
        ("One of a certain type of weights", "localkv pull ORG/REPO:Q8_0"),
        ("And talk with it", "localkv chat -m ORG/REPO:Q8_0"),
    ],
    params=[
        reference_argument("Or ORG/REPO/FILE.gguf, or an address on huggingface.co."),
        hf_file_option(),
    ],
    callback=_pull,
    help="Fetch a model from Hugging Face, or bring it up to date.\n\n"
    "QUANT is a type of weights such as Q8_0, in any case; without it Q4_K_M is fetched, else "
    "Q8_0, else the only model there is. Split files are fetched whole. An interrupted "
    "download continues where it stopped, and every file's checksum is verified.",
    epilog="HF_HOME (the cache), HF_TOKEN (for private and gated models), HF_ENDPOINT and "
    "HF_HUB_OFFLINE mean the same as to Hugging Face's own tools.",
)


def _list(*, quiet: bool, as_json: bool) -> None:
    from localkv.loader.local_models import local_models

    entries = local_models()
    if as_json:
        lines = [json.dumps({"models": [_facts(entry) for entry in entries]})]
    elif quiet:
        lines = [one_line(entry.name) for entry in entries]
    else:
        rows = [("NAME", "SIZE", "QUANT", "ARCH", "CONTEXT", "MODIFIED")]
        lines = table([*rows, *map(_row, entries)])
    for line in lines:
        click.echo(line)


def _facts(entry: LocalModel) -> dict[str, Any]:
    """A model as JSON; facts that its header lacks are null."""
    from localkv.loader.metadata import ModelSummary, model_summary

    summary = ModelSummary(None, None, None)
    try:
        summary = model_summary(entry.path)
    except ModelFileError as error:
        warn(error.message)
    return {
        "name": entry.name,
        "path": str(entry.path),
        "bytes": entry.n_bytes,
        "quant": summary.quant,
        "architecture": summary.architecture,
        "context": summary.n_ctx_train,
        "modified": _date(entry.modified),
    }


def _date(seconds: float) -> str | None:
    """A time in ISO 8601; None for one that a file can have and a calendar can't."""
    try:
        return datetime.fromtimestamp(int(seconds), UTC).isoformat()
    except (OSError, OverflowError, ValueError):
        return None


def _row(entry: LocalModel) -> tuple[str, ...]:
    facts = _facts(entry)
    shown = (facts["quant"], facts["architecture"], facts["context"])
    return (
        one_line(entry.name),
        byte_size(entry.n_bytes),
        *("-" if fact is None else one_line(str(fact)) for fact in shown),
        _age(time.time() - entry.modified),
    )


def _age(seconds: float) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


list_models = Command(
    "list",
    examples=[("Names, sizes and types", "localkv list"), ("For scripts", "localkv list --json")],
    params=[OUTPUT.flag("-q --quiet", help="Print the names only."), json_option()],
    callback=_list,
    help="List the models on this machine: those in models/ here, and those in Hugging Face's "
    "cache. -m takes every name as it is shown.",
)


def _remove(*, reference: str, hf_file: str | None, yes: bool) -> int:
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
        Panel("Options").flag("-y --yes", help="Do not ask."),
    ],
    callback=_remove,
    help="Delete a model that was fetched from Hugging Face, all revisions of it. Names are those "
    "that `localkv list` shows.",
)
