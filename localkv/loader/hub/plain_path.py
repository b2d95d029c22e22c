"""Paths from strangers: those that may become part of a path on this machine, or of a line."""

from __future__ import annotations

from pathlib import PureWindowsPath

MAX_PART_BYTES = 255
"""The longest name that file systems take."""

MAX_BYTES = 1024
"""Of a whole path; the cache's folder comes before it."""


def is_plain_path(path: str) -> bool:
    """Whether a relative path stays where it is put and looks like itself.

    Its parts are names: none is empty, "." or "..", too long, or has a character that can't be
    printed; none means a drive or another folder to any system.
    """
    if not path.isprintable() or "\\" in path or PureWindowsPath(path).anchor:
        return False
    parts = path.split("/")
    return len(path.encode()) <= MAX_BYTES and all(map(_is_name, parts))


def _is_name(part: str) -> bool:
    return part not in ("", ".", "..") and len(part.encode()) <= MAX_PART_BYTES


def is_model_path(path: str) -> bool:
    """Whether a path ends in the name of a GGUF file, in any case."""
    name = path.rsplit("/", 1)[-1].lower()
    return name.endswith(".gguf") and name != ".gguf"
