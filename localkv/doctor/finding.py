"""The result of a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "info", "warning", "broken"]
"""info: neither good nor bad. warning: something is slower or missing. broken: no model runs."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: the thing that was checked.
        status: how it is.
        summary: one line.
        hint: one line with a remedy.
        facts: the same for programs, fit for JSON.
    """

    name: str
    status: Status
    summary: str
    hint: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A name, and the function that looks."""

    name: str
    look: Callable[[], Finding]


def examine(checks: Iterable[Check]) -> list[Finding]:
    """The results of all checks; a failing check reports that itself and stops no other."""
    return [_result(check) for check in checks]


def _result(check: Check) -> Finding:
    try:
        return check.look()
    except Exception as error:
        return Finding(
            check.name,
            "warning",
            f"can't be examined: {type(error).__name__}: {error}",
            "a bug: please report it",
        )
