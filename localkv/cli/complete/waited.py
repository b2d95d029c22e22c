"""`Waited`: the seconds between the command and the first text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from localkv.system.process_age import process_age


@dataclass
class Waited:
    """What a user waits for, in seconds; the sum is the time from the command to the first text.

    Attributes:
        start: from the start of the process until the model is opened.
        load: from then on until the model is ready.
        first_token: from then on until the first text, or the end if there is none.
    """

    start: float
    load: float
    first_token: float = 0.0

    @classmethod
    def for_model(cls, load_seconds: float) -> Self:
        """What it was so far, when a model has just become ready."""
        return cls(process_age() - load_seconds, load_seconds)

    def has_token(self) -> None:
        """There is text now, or the end; only the first call counts."""
        if not self.first_token:
            self.first_token = process_age() - self.start - self.load
