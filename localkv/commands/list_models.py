"""`localkv list`: the models on this machine, from the headers of their files."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from localkv.commands.options import OUTPUT, json_option
from localkv.commands.output import one_line, table, warn
from localkv.commands.parsing import Command
from localkv.errors import ModelFileError, byte_size

if TYPE_CHECKING:
    from localkv.loader.local_models import LocalModel


def _run(*, quiet: bool, as_json: bool) -> None:
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
    from localkv.loader.model_summary import ModelSummary, model_summary

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
    callback=_run,
    help="List the models on this machine: those in models/ here, and those in Hugging Face's "
    "cache. -m takes every name as it is shown.",
)
