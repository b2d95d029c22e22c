"""A download as the user sees it: one line, and on a terminal one bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from localkv.cli.output.messages import say
from localkv.cli.output.terminal import unguarded
from localkv.errors import byte_size

if TYPE_CHECKING:
    from localkv.loader.hub.cache import CachedModel
    from localkv.loader.hub.download import Advance, Download


def fetched(found: CachedModel | Download) -> CachedModel:
    """The model, after it has been fetched if it has to be.

    Raises:
        HubError: it can't be fetched.
    """
    from localkv.loader.hub.download import Download, fetch

    if not isinstance(found, Download):
        return found
    if not found.missing:
        return fetch(found, lambda _: None)
    parts = f" in {len(found.model.files)} parts" if len(found.model.files) > 1 else ""
    present = f", {byte_size(found.present_bytes)} of them here" if found.present_bytes else ""
    say(
        f"fetching {found.reference.repo}/{found.model.path}{parts}: "
        f"{byte_size(found.n_bytes)}{present}"
    )
    with _bar(found) as advance:
        return fetch(found, advance)


@contextmanager
def _bar(download: Download) -> Iterator[Advance]:
    """One bar for all files, on stderr, gone when it is done; none where that is no terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=Console(file=unguarded(sys.stderr)), transient=True
    ) as progress:
        task = progress.add_task("", total=download.n_bytes, completed=download.present_bytes)
        yield lambda n_bytes: progress.advance(task, n_bytes)
