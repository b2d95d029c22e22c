"""The engine, of several, that has evaluated how a request begins.

It is a guess: an engine's own cache compares tokens, so a wrong guess costs time and nothing else.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

CHUNK = 512
"""Characters of a key: some hundred tokens."""
CHARACTERS_PER_TOKEN = 4
"""About; a directory forgets at this rate what an engine has no room for."""


def prefix_keys(text: str) -> list[bytes]:
    """A key for each whole chunk of a text, which stands for all of the text up to its end."""
    keys, digest = list[bytes](), hashlib.blake2b(digest_size=12)
    for end in range(CHUNK, len(text) + 1, CHUNK):
        digest.update(text[end - CHUNK : end].encode(errors="surrogatepass"))
        keys.append(digest.digest())
    return keys


def text_of(body: Mapping[str, Any]) -> str:
    """What the prompt of a request is made of, in the order in which templates write it.

    Args:
        body: of any of the APIs.
    """
    first = [body[name] for name in ("system", "instructions", "tools") if body.get(name)]
    rest = next(
        (body[name] for name in ("messages", "input", "prompt") if body.get(name) is not None), ""
    )
    items = rest if isinstance(rest, list) else [rest]
    return "\n".join(msgspec.json.encode(item).decode() for item in [*first, *items])


class PrefixDirectory:
    """Remembers which engine was sent what.

    Args:
        most: keys of an engine that has not said how many tokens it holds.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._room = dict[str, int]()
        self._keys = dict[str, OrderedDict[bytes, int]]()
        self._engines = dict[bytes, set[str]]()
        self._n_sent = 0

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def hold(self, engine: str, n_tokens: int) -> None:
        """Set how many tokens an engine's cache holds."""
        self._room[engine] = max(1, n_tokens * CHARACTERS_PER_TOKEN // CHUNK)

    def size(self, engine: str) -> int:
        """The chunks that an engine was sent, as far as they are remembered."""
        return len(self._keys.get(engine, ()))

    def loses(self, engine: str) -> int:
        """The number of the request whose beginning another one would push out; 0 if none."""
        known = self._keys.get(engine)
        full = known and len(known) >= self._room.get(engine, self._most)
        return next(iter(known.values())) if known and full else 0

    def known(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many first chunks of a request each engine was sent; engines with 0 are left out."""
        found = dict[str, int]()
        engines = self._engines.get(keys[0], set()) if keys else set()
        for n, key in enumerate(keys, 1):
            engines = engines & self._engines.get(key, set())
            if not engines:
                break
            found.update(dict.fromkeys(engines, n))
        return found

    def add(self, engine: str, keys: Sequence[bytes]) -> None:
        """An engine was sent a request. What it was sent longest ago is forgotten first, and of a
        request its end."""
        known = self._keys.setdefault(engine, OrderedDict())
        self._n_sent += 1
        for key in reversed(keys):
            known[key] = self._n_sent
            known.move_to_end(key)
            self._engines.setdefault(key, set()).add(engine)
        while len(known) > self._room.get(engine, self._most):
            self._forget(engine, known.popitem(last=False)[0])

    def _forget(self, engine: str, key: bytes) -> None:
        engines = self._engines[key]
        engines.discard(engine)
        if not engines:
            del self._engines[key]

    def keep(self, engines: Collection[str]) -> None:
        """Only these are there any more."""
        for gone in set(self._keys).difference(engines):
            for key in self._keys.pop(gone):
                self._forget(gone, key)
            self._room.pop(gone, None)


SLACK = 4
"""More requests than the engine with the fewest may be at one that knows how a request begins."""


def ranked(
    directory: PrefixDirectory, loads: Mapping[str, int], keys: Sequence[bytes], slack: int = SLACK
) -> list[str]:
    """Engines, the best for a request first.

    The best one knows most of the request, unless it has too many requests. Otherwise it is the
    one with the fewest requests. Ties go to an engine with room for another beginning, the one
    with the most first, and then to the engine whose oldest beginning is the oldest of all.

    Args:
        loads: requests that each engine has.
        keys: of the request.
    """
    known, least = directory.known(keys), min(loads.values(), default=0)

    def cost(engine: str) -> tuple[int, int, int, int, str]:
        load = loads[engine]
        n_known = known.get(engine, 0) if load <= least + slack else 0
        return -n_known, load, directory.loses(engine), directory.size(engine), engine

    return sorted(loads, key=cost)
