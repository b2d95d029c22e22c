"""Compiling a grammar in a process of its own, in which time, memory and stack are limited.

llguidance follows chains of references by recursion, so a chain of a thousand ends the process that
compiles it. Compiled grammars are kept by their content, and so are refusals.
"""

from __future__ import annotations

import hashlib
import marshal
import signal
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from threading import Lock
from typing import NamedTuple

from localkv.errors import UsageError
from localkv.structured.grammar_child import MAX_MEMORY
from localkv.system.limited_process import ChildEndedError, LimitedProcesses

COMPILE_SECONDS = 3.0
"""How long a grammar may take; the grammar of a hundred tools takes 0.1 s."""

MAX_TEXT = 1 << 20
"""Most characters of a grammar or a schema, as it is given."""

MOST_KEPT, MOST_KEPT_TEXT = 256, 16 << 20
"""Grammars that are kept, and characters of all of them."""

_HINT = "a smaller one, with fewer rules and shorter chains of references, would work"

processes = LimitedProcesses(
    "localkv.structured.grammar_child",
    does="compiles",
    many="grammars",
    memory=MAX_MEMORY,
    refused=partial(UsageError, hint=_HINT),
)


class _Kept(NamedTuple):
    """A compiled grammar: its source, or why there is none."""

    source: str = ""
    error: str = ""
    hint: str | None = None


_kept = OrderedDict[bytes, _Kept]()
_n_kept_text = 0
_lock = Lock()


def compiled_apart(notation: str, texts: Sequence[str], what: str) -> str:
    """A grammar as llguidance takes it.

    Args:
        notation: one of `grammar_child.NOTATIONS`.
        texts: the grammar; two texts if `notation` joins two.
        what: names it in errors.

    Raises:
        UsageError: it is malformed, no text is one of it, or it takes too much of anything.
        LocalKVError: no process can be started.
    """
    n_characters = sum(map(len, texts))
    if n_characters > MAX_TEXT * (4 if notation == "either" else 1):
        raise UsageError(
            f"the {what} has {n_characters:,} characters; at most {MAX_TEXT:,} are allowed"
        )
    request = (notation, tuple(texts), what)
    digest = hashlib.sha256(marshal.dumps(request)).digest()
    with _lock:
        kept = _kept.get(digest)
        if kept is not None:
            _kept.move_to_end(digest)
    if kept is None:
        kept = _compiled(request, what)
        _keep(digest, kept)
    if kept.error:
        raise UsageError(kept.error, kept.hint)
    return kept.source


def _compiled(request: tuple[str, tuple[str, ...], str], what: str) -> _Kept:
    try:
        return _Kept(**processes.ask(request, f"the {what}", COMPILE_SECONDS))
    except ChildEndedError as error:
        if error.signal == signal.SIGSEGV:
            return _Kept(error=f"the {what} is nested or chained too deeply", hint=_HINT)
        if error.signal == signal.SIGABRT:
            return _Kept(error=f"the {what} takes too much memory", hint=_HINT)
        return _Kept(error=error.message, hint=_HINT)


def _keep(digest: bytes, kept: _Kept) -> None:
    global _n_kept_text
    with _lock:
        if digest in _kept:
            return
        _kept[digest] = kept
        _n_kept_text += len(kept.source)
        while len(_kept) > MOST_KEPT or _n_kept_text > MOST_KEPT_TEXT:
            _, oldest = _kept.popitem(last=False)
            _n_kept_text -= len(oldest.source)


def forget_kept() -> None:
    """Forget all compiled grammars."""
    global _n_kept_text
    with _lock:
        _kept.clear()
        _n_kept_text = 0
