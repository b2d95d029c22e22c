"""The text that models are measured with where the user names none.

A little of many kinds: a story, facts that are asked for again, a table, arithmetic, a program,
JSON, a conversation, other languages. It was written for this and is under the project's licence.
"""

from __future__ import annotations

from importlib import resources


def calibration_text() -> str:
    """Some 1,500 words."""
    return resources.files("localkv.quality").joinpath("calibration.txt").read_text("utf-8").strip()
