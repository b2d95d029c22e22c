"""The file names of split models: `NAME-00001-of-00003.gguf`."""

from __future__ import annotations

import re

_SPLIT_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def split_name(name: str) -> tuple[str, int, int] | None:
    """What precedes the numbers, the part's number from 1, and how many parts there are."""
    match = _SPLIT_NAME.fullmatch(name)
    return (match["prefix"], int(match["number"]), int(match["count"])) if match else None


def part_names(prefix: str, n_parts: int) -> list[str]:
    """The names of all parts, in order."""
    return [f"{prefix}-{number:05}-of-{n_parts:05}.gguf" for number in range(1, n_parts + 1)]
