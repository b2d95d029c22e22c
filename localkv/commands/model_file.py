"""From `-m`, `-hf`, `-hff` and `--offline` to a file on this machine, which may have to be fetched.

One syntax for all commands. A path that exists is a path; the rest is Hugging Face's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localkv.commands.output import did_you_mean, say, unguarded
from localkv.commands.parsing import distance
from localkv.errors import ModelFileError, UsageError, byte_size, printable

if TYPE_CHECKING:
    from localkv.loader.hub.cache import CachedModel
    from localkv.loader.hub.download import Advance, Download
    from localkv.loader.hub.reference import HubReference
    from localkv.loader.model_header import ModelHeader


_HUB = "-hf ORG/REPO takes a model from Hugging Face"


def check_model_is_named(values: Mapping[str, Any]) -> None:
    """Find out before anything is read or loaded.

    Raises:
        UsageError: no model is named, or more than one.
    """
    _named(values, None)


def named_or_shipped(values: dict[str, Any]) -> str:
    """Enter the model that ships where none is named; returns what to say then, else nothing.

    Raises:
        UsageError: more than one model is named, or none, and this copy of localkv has none.
    """
    shipped = None
    if all(values[name] is None for name in ("model", "hf_repo", "hf_file")):
        from localkv.loader.local_models import shipped_model

        shipped = shipped_model()
    if shipped is None:
        check_model_is_named(values)
        return ""
    values["model"] = str(shipped)
    return (
        f"no model is named: using {shipped.stem}, a toy that ships with localkv; "
        "-m FILE or -hf ORG/REPO names another"
    )


def model_file(values: Mapping[str, Any], argument: str | None = None) -> Path:
    """The file that the values of `model_options` name.

    Args:
        argument: a word without an option, which counts as `-m`.

    Raises:
        UsageError: no model is named, or more than one.
        HubError: the model can't be had from Hugging Face.
        ModelFileError: there is no such file.
    """
    found = _named(values, argument)
    if isinstance(found, Path):
        return _existing(found)
    from localkv.loader.hub.find import find

    return fetched(find(found, offline=values["offline"])).path


def model_header(values: Mapping[str, Any], argument: str | None = None) -> ModelHeader:
    """The header of `model_file`'s model; if that isn't here, nothing else is fetched.

    Raises:
        UsageError, HubError: as `model_file`.
        ModelFileError: there is no such file, or it is malformed.
    """
    from localkv.loader.gguf_file import open_gguf

    found = _named(values, argument)
    if isinstance(found, Path):
        return open_gguf(_existing(found))
    from localkv.loader.hub.find import HubModel, locate

    located = locate(found, offline=values["offline"])
    if not isinstance(located, HubModel):
        return open_gguf(located.path)
    from localkv.loader.hub.remote_header import remote_header

    return remote_header(located)


def _existing(path: Path) -> Path:
    if path.is_dir():
        found = _model_files(path)
        names = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        hint = f"it has {names}" if found else "it has no file that ends in .gguf"
        raise ModelFileError(f"{printable(path)}: is a directory, not a model file", hint=hint)
    return path if path.exists() else _cached_or_missing(path)


def _named(values: Mapping[str, Any], argument: str | None) -> Path | HubReference:
    given = {
        "-m": (argument or values["model"], _rank("model") if argument is None else 0),
        "-hf": (values["hf_repo"], _rank("hf_repo")),
    }
    if argument is not None and values["model"] not in (None, argument) and _rank("model") == 0:
        raise UsageError("two models: give FILE or -m FILE")
    named = {option: item for option, item in given.items() if item[0] is not None}
    if not named:
        raise UsageError("-m/--model is missing (or set LOCALKV_MODEL)", hint=_HUB)
    strongest = min(rank for _, rank in named.values())
    named = {option: item for option, item in named.items() if item[1] == strongest}
    if len(named) > 1:
        raise UsageError("-m and -hf both name a model, give one")
    option, (text, _) = next(iter(named.items()))
    # A file that is named farther away belongs to another model.
    hf_file = values["hf_file"] if _rank("hf_file") <= strongest else None
    return _read(option, text, hf_file)


def _read(option: str, text: str, hf_file: str | None) -> Path | HubReference:
    from localkv.loader.hub.reference import names_the_hub, parse_reference

    if option == "-hf" or (names_the_hub(text) and not Path(text).exists()):
        return parse_reference(text, hf_file)
    if hf_file is not None:
        raise UsageError(
            "-hff names a file of a repository, and there is none", hint="-hf ORG/REPO names one"
        )
    return Path(text)


def _rank(name: str) -> int:
    return distance(click.get_current_context(), name)


def _cached_or_missing(path: Path) -> Path:
    """The model in the cache that has this name, as `localkv list` shows it.

    Nothing is fetched: a mistyped path should not become a request.
    """
    from localkv.loader.hub.reference import parse_reference

    name = path.as_posix()
    try:
        reference = parse_reference(name)
    except UsageError:
        raise _missing(path, f"{_HUB}; localkv list shows those on this machine") from None
    from localkv.loader.hub.find import find_cached

    if found := find_cached(reference):
        return found.path
    raise _missing(path, f"-hf {name} takes the model of this name from Hugging Face")


def _missing(path: Path, hint: str) -> ModelFileError:
    """The error about a path, with the nearest file in its folder or else a hint."""
    message = f"{printable(path)}: no such file"
    if path.name.lower().endswith(".gguf"):
        return ModelFileError(message + did_you_mean(str(path), _model_files(path.parent)))
    if any(param.name == "synthetic" for param in click.get_current_context().command.params):
        from localkv.loader.known_models import KNOWN_MODELS

        if path.name.lower().partition(":")[0] in KNOWN_MODELS:
            hint = f"--synthetic {path} takes a shape instead of a file"
    return ModelFileError(message, hint=hint)


def _model_files(folder: Path) -> list[str]:
    try:
        names = sorted(item.name for item in os.scandir(folder))
    except OSError:
        return []
    return [str(folder / n) for n in names if n.lower().endswith(".gguf") and n.isprintable()]


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
