"""Errors about grammars, from what llguidance says."""

from __future__ import annotations

import re

from localkv.errors import LocalKVError, UsageError

NOTHING = "nothing satisfies it"
_NO_EXTENSION = "NoExtension"
_TOO_MUCH = re.compile("max is|fuel|too many|too large|limit", re.IGNORECASE)
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")


def refusal(what: str, message: str) -> UsageError:
    """The error about a grammar that llguidance refuses, in one line."""
    found = _UNIMPLEMENTED.search(message)
    if found is not None:
        keys = found[1].replace('"', "").split(", ")
        return UsageError(
            f"the {what} can't be used: no grammar for {', '.join(keys)}",
            hint="leave it out, and check the finished text",
        )
    if message.startswith("oneOf "):
        return UsageError(
            f"the {what} can't be used: alternatives of oneOf may overlap",
            hint="use anyOf, or a required property with a const of its own in each of them",
        )
    if message.startswith("panic"):
        return UsageError(f"the {what} is too large", hint="a smaller one would work")
    reason = one_line(message)
    if reason.startswith(_NO_EXTENSION):
        reason = NOTHING
    return UsageError(f"the {what} can't be used: {reason}")


def failure(message: str) -> LocalKVError:
    """The error about a grammar that took too much while a text was written, or about a text that
    it does not allow."""
    reason = one_line(message)
    if reason.startswith(_NO_EXTENSION):
        reason = "nothing can follow here"
    words = f"the grammar can't be followed any further: {reason}"
    if _TOO_MUCH.search(reason):
        hint = "fewer alternatives or optional properties at one place would work"
        return UsageError(words, hint)
    return LocalKVError(words)


def one_line(message: str) -> str:
    """An error of llguidance: what it says, without the pictures of where."""
    head = message.partition("\n<state>")[0]
    lines = [line.strip() for line in head.splitlines()]
    kept = [line for i, line in enumerate(lines) if i == 0 or line.startswith("error:")]
    return " ".join(kept) or "unknown"
