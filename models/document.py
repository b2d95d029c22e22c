"""A training document: text in which every part knows what kind of text it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
END = "</s>"
_NO_SPACE_BEFORE = tuple(".,;:!?\n")
_WORD_END = re.compile(r"\W+")


class Kind(IntEnum):
    """What a token is, which decides how much its loss counts and where its accuracy is logged."""

    PROSE = 0
    FRESH = 1  # a key or value that nobody can predict: it is new here
    REQUEST = 2  # what a user or a system prompt says
    CUE = 3  # a story's word that its prompt asked for
    REPEAT = 4
    LIST = 5
    FACT = 6
    PASSKEY = 7
    VARIABLE = 8
    NAME = 9  # who a story is about, where stories are told with care


LOSS_WEIGHTS = {
    Kind.PROSE: 1.0,
    Kind.FRESH: 0.0,
    Kind.REQUEST: 0.25,
    Kind.CUE: 3.0,
    Kind.REPEAT: 1.0,
    Kind.LIST: 3.0,
    Kind.FACT: 5.0,
    Kind.PASSKEY: 5.0,
    Kind.VARIABLE: 5.0,
    Kind.NAME: 3.0,
}


@dataclass(frozen=True)
class Part:
    """A piece of text, or one of the markers above, with its kind."""

    text: str
    kind: Kind
    is_marker: bool = False


@dataclass
class Document:
    """Grows by `say`, `turn` and `end`; spaces between parts are put in as a writer would."""

    parts: list[Part] = field(default_factory=list)

    def say(self, text: str, kind: Kind = Kind.PROSE, glued: bool = False) -> Document:
        """Add text; `glued` text continues the last word without a space."""
        last = self.parts[-1] if self.parts else None
        starts_run = last is None or last.is_marker or last.text.endswith("\n")
        if not starts_run and not glued and not text.startswith(_NO_SPACE_BEFORE):
            text = " " + text
        self.parts.append(Part(text, kind))
        return self

    def say_marked(self, text: str, kinds: Mapping[str, Kind]) -> Document:
        """Add text in which the words that `kinds` lists have the kind listed there."""
        run: list[str] = []
        for word in text.split(" "):
            core = _WORD_END.split(word)[0]
            if core in kinds:
                if run:
                    self.say(" ".join(run))
                    run = []
                self.say(core, kinds[core])
                rest = word[len(core) :]
                if rest:
                    self.say(rest, glued=True)
            else:
                run.append(word)
        if run:
            self.say(" ".join(run))
        return self

    def turn(self, role: str) -> Document:
        """Open the turn of SYSTEM, USER or ASSISTANT."""
        kind = Kind.PROSE if role == ASSISTANT else Kind.REQUEST
        self.parts.append(Part(role, kind, is_marker=True))
        return self

    def end(self) -> Document:
        """Close a story or the assistant's turn."""
        self.parts.append(Part(END, Kind.PROSE, is_marker=True))
        return self

    def runs(self) -> list[str]:
        """The plain texts between the markers."""
        texts = [""]
        for part in self.parts:
            if part.is_marker:
                texts.append("")
            else:
                texts[-1] += part.text
        return [text for text in texts if text]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)
