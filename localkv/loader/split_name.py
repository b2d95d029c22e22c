"""The file names of split models: `NAME-00001-of-00003.gguf`."""

from __future__ import annotations

import re

_SPLIT_NAME = re.compile(
    r"(?P<prefix>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL
)


def split_name(name: str) -> tuple[str, int, int] | None:
    """The text before the numbers, the part's number from 1, and the number of parts.

    None for any other name, also one whose numbers name no part: 0 of 3, 4 of 3, 1 of 0.
    """
    match = _SPLIT_NAME.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return None
    return match["prefix"], int(match["number"]), int(match["count"])


def part_names(prefix: str, n_parts: int) -> list[str]:
    """The names of all parts, in order."""
    return [f"{prefix}-{number:05}-of-{n_parts:05}.gguf" for number in range(1, n_parts + 1)]
