"""What a caller asks of the scheduler, and how far it has got. Knows no model and no sampler."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from localkv.cache.pages import Sequence
from localkv.engine.prefix import Text

RequestState = Literal["waiting", "running", "done"]


@dataclass(eq=False)
class Request:
    """A text that is to be continued.

    Attributes:
        number: counts all requests, in the order in which they came.
        text: its tokens; whoever draws one adds it.
        arrived: when it came, in seconds of the scheduler's clock.
        most: tokens that the text will have at most.
        priority: those with a larger one are served first.
        deadline: when it ends, if it has not by then; None for never.
        sequence: its rows in the cache, while it runs.
        state: "waiting" for room or for the first step, "running", or "done".
        n_reused: tokens of its prompt that it found evaluated when it ran first.
        n_lost: further ones that were the same, but whose rows were no longer there.
        n_preempted: how often it had to give its pages to others.
        passed: seconds in which others had steps without it, up to `passed_from`.
        passed_from: the end of the last step that it took part in; None before the first.
        ready: tokens that were drawn and that nobody has asked for yet, and the seconds of each.
            Other threads ask for them than run steps.
        reuses: rows that are there of its text already are taken; else only its own, after it had
            to give way.
        most_again: generated tokens that are evaluated once more in a step like any other.
    """

    number: int
    text: Text
    arrived: float
    most: int
    priority: int = 0
    deadline: float | None = None
    sequence: Sequence | None = None
    state: RequestState = "waiting"
    n_reused: int = 0
    n_lost: int = 0
    n_preempted: int = 0
    passed: float = 0.0
    passed_from: float | None = None
    ready: deque[tuple[int, float]] = field(default_factory=deque)
    reuses: bool = True
    most_again: int = 16

    def waited(self, now: float) -> float:
        """Seconds since it came in which it took no part in a step."""
        return self.passed + now - (self.arrived if self.passed_from is None else self.passed_from)

    @property
    def n_unread(self) -> int:
        """Tokens that were drawn and that nobody has asked for yet."""
        return len(self.ready)

    @property
    def n_held(self) -> int:
        """Tokens whose rows the cache has."""
        return 0 if self.sequence is None else self.sequence.length

    @property
    def n_missing(self) -> int:
        """Tokens that are still to be evaluated before the next one can be drawn."""
        return len(self.text.ids) - self.n_held

    @property
    def is_decoding(self) -> bool:
        """Whether all that is missing is the token that was drawn last, or some that drafts were
        taken back with."""
        if self.sequence is None or self.n_held < self.n_prompt:
            return False
        return self.n_missing <= self.most_again

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return self.text.n_prompt

    @property
    def n_alike(self) -> int:
        """Missing tokens up to the last of the same kind: of the prompt, or generated."""
        if self.n_held < self.n_prompt:
            return self.n_prompt - self.n_held
        return self.n_missing
