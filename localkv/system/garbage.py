"""Python's search for garbage, which takes a fifth of the time of an import of many modules."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Let Python look for no circles of garbage in a block that makes many objects and keeps
    most of them; also a decorator. Objects that nobody refers to are freed as ever."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
