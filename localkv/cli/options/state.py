"""The options about saved states, and what they do before and after a completion."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localkv.cli.options import flag, option
from localkv.cli.output.messages import note, say
from localkv.errors import UsageError, byte_size, counted, printable
from localkv.system.whole_file import check_place

if TYPE_CHECKING:
    from localkv.engine.text.stream import Completion
    from localkv.llm import LLM

_STATE_OPTIONS = ("save_state", "load_state", "prompt_cache", "prompt_cache_all", "prompt_cache_ro")


def state_options() -> list[click.Parameter]:
    """What `SavedStates.of` reads."""
    return [
        option(
            "--load-state",
            panel="Saved state",
            metavar="FILE",
            help="Go on from the text that --save-state has put there, as far as the prompt begins "
            'like it; -p "" continues all of it. Other types of K and V are converted.',
        ),
        option(
            "--save-state",
            panel="Saved state",
            metavar="FILE",
            help="Write prompt and answer there at the end, with their rows of K and V.",
        ),
        option(
            "--prompt-cache",
            panel="Saved state",
            metavar="FILE",
            help="Load this file as --load-state does, if there is one, and write the prompt to it "
            "as --save-state does, if it is another one.",
        ),
        flag(
            "--prompt-cache-all",
            panel="Saved state",
            help="Write the answer to --prompt-cache, too.",
        ),
        flag(
            "--prompt-cache-ro",
            panel="Saved state",
            help="Leave the file of --prompt-cache as it is.",
        ),
    ]


@dataclass
class SavedStates:
    """What is loaded before a completion, and saved after it.

    Attributes:
        source: a file, or None.
        target: the same, to be written.
        saves_answer: the answer is saved, not only the prompt.
        if_new: only if the prompt was not in the file already.
    """

    source: str | None
    target: str | None
    saves_answer: bool
    if_new: bool

    @classmethod
    def of(cls, values: dict[str, Any]) -> SavedStates:
        """Take the options of `state_options` out of a command's.

        Raises:
            UsageError: they contradict each other, a file to load is missing, or one can't be
                written.
        """
        save, load, cache, every, read_only = (values.pop(name) for name in _STATE_OPTIONS)
        if cache is None:
            for name, value in (("all", every), ("ro", read_only)):
                if value:
                    raise UsageError(f"--prompt-cache-{name} is about --prompt-cache FILE")
            return cls(load, _checked(save), True, False)
        if load is not None or save is not None:
            raise UsageError(
                "--prompt-cache loads and saves a state itself",
                hint="use it alone, or --load-state and --save-state",
            )
        if every and read_only:
            raise UsageError("--prompt-cache-all writes the file that --prompt-cache-ro keeps")
        is_there = os.path.exists(cache) and (read_only or Path(cache).stat().st_size > 0)
        if read_only and not is_there:
            raise UsageError(
                f"the state {printable(cache)}: no such file",
                hint="leave out --prompt-cache-ro, and it is made",
            )
        target = None if read_only else _checked(cache)
        return cls(cache if is_there else None, target, every, not every)

    def load(self, llm: LLM, *, quiet: bool) -> list[int]:
        """Load the file, if there is one; returns the tokens of its text."""
        if self.source is None:
            return []
        started = time.perf_counter()
        ids = llm.load_state(self.source, convert=True, on_note=note)
        if not quiet:
            seconds = time.perf_counter() - started
            name = printable(self.source)
            say(f"loaded {counted(len(ids), 'token')} from {name} in {seconds:.2f} s")
        return ids

    def save(self, llm: LLM, completion: Completion, *, quiet: bool) -> None:
        """Save what was evaluated, if it is wanted; say if what was loaded was of no use."""
        usage = completion.usage
        if self.source is not None and usage.cached_tokens <= len(llm.tokenize("")):
            note(f"the prompt does not begin like the text of {printable(self.source)}")
        if self.target is None:
            return
        if self.if_new and usage.cached_tokens >= usage.prompt_tokens - 1 > 0:
            return
        if not self.saves_answer:
            llm.engine.truncate(usage.prompt_tokens)
        n_tokens = llm.save_state(self.target)
        if not quiet:
            size = byte_size(os.stat(self.target).st_size)
            say(f"saved {counted(n_tokens, 'token')} to {printable(self.target)}, {size}")


def _checked(target: str | None) -> str | None:
    """A file that is to be written, unless that shows to fail before a prompt is evaluated."""
    if target is not None:
        try:
            check_place(target)
        except OSError as error:
            raise UsageError(
                f"the state {printable(target)}: cannot be written: {error.strerror}"
            ) from error
    return target
