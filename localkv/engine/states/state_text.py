"""What a saved state says of its text besides the rows: JSON, checked in every part."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import pages_for
from localkv.cache.row_copies import HeldRows, n_held


@dataclass(frozen=True)
class StateText:
    """Lengths and places of a text.

    Attributes:
        n_tokens: of the text.
        checkpoint: a length that it is likely to be cut back to, or 0.
        gone: of each pool, the places of pages that were given back.
        exact_from: of each pool; see `pages.Sequence`.
        states: the lengths after which states of recurrent layers were kept.
        rungs: of the pages, in a cache with a budget; else empty.
    """

    n_tokens: int
    checkpoint: int
    gone: tuple[tuple[int, ...], ...]
    exact_from: tuple[int, ...]
    states: tuple[int, ...]
    rungs: tuple[int, ...] = ()

    def as_json(self) -> str:
        """The text for the file's metadata."""
        found = asdict(self)
        if not self.rungs:
            del found["rungs"]
        return json.dumps(found)

    def held(self, cache: KVCache) -> list[HeldRows]:
        """The rows that are there of each of the cache's pools."""
        return [
            HeldRows(
                n_held(pool, self.n_tokens, rungs := self.rungs if pool is cache.ladder else ()),
                gone,
                exact_from,
                rungs,
            )
            for pool, gone, exact_from in zip(cache.pools, self.gone, self.exact_from, strict=True)
        ]


def read_state_text(text: str, cache: KVCache) -> StateText:
    """The inverse of `StateText.as_json`, for a cache of the same pools.

    Raises:
        ValueError: it is malformed, or can't be of such a cache.
    """
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ValueError("too deep") from error
    names = {"n_tokens", "checkpoint", "gone", "exact_from", "states"}
    if cache.ladder is not None:
        names.add("rungs")
    if not isinstance(data, dict) or data.keys() != names:
        raise ValueError("other keys")
    (n_tokens,) = _whole([data["n_tokens"]], 1, 1 << 31)
    (checkpoint,) = _whole([data["checkpoint"]], 0, n_tokens)
    if not isinstance(data["gone"], list) or len(data["gone"]) != len(cache.pools):
        raise ValueError("other pools")
    gone = []
    for pool, places in zip(cache.pools, data["gone"], strict=True):
        n_places = pages_for(max(0, n_tokens - pool.first))
        gone.append(_ascending(places, pool.kept, n_places - 1))
    exact_from = _whole(data["exact_from"], 0, n_tokens)
    if len(exact_from) != len(cache.pools):
        raise ValueError("other pools")
    states = _ascending(data["states"], 1, n_tokens)
    if states and not cache.states:
        raise ValueError("states without recurrent layers")
    rungs = tuple[int, ...]()
    if cache.ladder is not None:
        rungs = _whole(data["rungs"], 0, len(cache.ladder.sizes.units) - 1)
        if len(rungs) != pages_for(n_tokens) or gone[cache.ladder.index]:
            raise ValueError("other pages")
    return StateText(n_tokens, checkpoint, tuple(gone), exact_from, states, rungs)


def _whole(values: Any, least: int, most: int) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError("not a list")
    for value in values:
        if type(value) is not int or not least <= value <= most:
            raise ValueError("a number is out of its range")
    return tuple(values)


def _ascending(values: Any, least: int, most: int) -> tuple[int, ...]:
    found = _whole(values, least, most)
    if any(later <= earlier for earlier, later in pairwise(found)):
        raise ValueError("numbers are not in order")
    return found
