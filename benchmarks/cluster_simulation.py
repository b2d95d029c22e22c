"""What sending requests where their beginning is known is worth, for one engine to a thousand.

    python benchmarks/cluster_simulation.py --plot docs/cluster.png --json FILE

Nothing is computed but time. Sessions of agents are played: a system prompt that many share, then
turns that each add to it, with pauses between. There are enough to keep engines busy for --load of
the time. The engines read prompts one after the other and keep what they read, as much as their
caches hold, what was used longest ago going first. Requests go by `ranked`, as on a real cluster;
to the engine with the fewest requests; or to any.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localkv.server.cluster.prefix_directory import PrefixDirectory, ranked

COUNTS = (1, 10, 100, 1000)
BLOCK = 128
"""Tokens of a key, about what `prefix_keys` takes."""
SYSTEM, SYSTEMS = 4096, 20
TURN, ANSWER, TURNS = 1024, 256, 12
PAUSE_S = 15.0
READ_PER_S, WRITE_PER_S = 2000.0, 40.0
CACHE_TOKENS = 393_216


@dataclass
class Engine:
    """A queue, and a cache.

    Attributes:
        free_at: when all that it has is read.
        ends: of its requests, in order.
        blocks: that its cache has, the newest last.
    """

    free_at: float = 0.0
    ends: list[float] = field(default_factory=list)
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def serve(self, now: float, keys: list[bytes]) -> tuple[float, int]:
        """Seconds to the first token, and the tokens that were known."""
        n_known = next((n for n, key in enumerate(keys) if key not in self.blocks), len(keys))
        for key in reversed(keys):
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        while len(self.blocks) > CACHE_TOKENS // BLOCK:
            self.blocks.popitem(last=False)
        reading = (len(keys) - n_known) * BLOCK / READ_PER_S
        self.free_at = max(self.free_at, now) + reading
        heapq.heappush(self.ends, self.free_at + ANSWER / WRITE_PER_S)
        return self.free_at - now, n_known * BLOCK

    def load(self, now: float) -> int:
        """Its requests."""
        while self.ends and self.ends[0] <= now:
            heapq.heappop(self.ends)
        return len(self.ends)


def session(number: int, rng: random.Random) -> list[list[bytes]]:
    """The keys of each turn of a session."""
    keys = [b"s%d.%d" % (rng.randrange(SYSTEMS), n) for n in range(SYSTEM // BLOCK)]
    turns = []
    for turn in range(rng.randrange(2, 2 * TURNS - 1)):
        keys = [*keys, *(b"%d.%d.%d" % (number, turn, n) for n in range((TURN + ANSWER) // BLOCK))]
        turns.append(keys)
    return turns


def arrivals(n_engines: int, load: float, n_turns: int, seed: int) -> Iterator[tuple[float, int]]:
    """When sessions begin: so often that engines are busy for `load` of the time if nothing but
    what is new has to be read."""
    rng, now = random.Random(seed), 0.0
    work = TURNS * (TURN + ANSWER) / READ_PER_S + SYSTEM / READ_PER_S / 4
    for number in range(n_turns // TURNS):
        now += rng.expovariate(n_engines * load / work)
        yield now, number


Policy = Callable[[PrefixDirectory, dict[str, int], list[bytes], random.Random], str]
POLICIES: dict[str, Policy] = {
    "by beginning": lambda directory, loads, keys, rng: ranked(directory, loads, keys)[0],
    "fewest requests": lambda directory, loads, keys, rng: min(
        loads, key=lambda name: (loads[name], rng.random())
    ),
    "any": lambda directory, loads, keys, rng: rng.choice(list(loads)),
}


def simulate(policy: str, n_engines: int, load: float, n_turns: int) -> dict[str, float]:
    """Play the sessions.

    Returns:
        the share of prompts' tokens that were known, times to the first token, keys of the
        directory, and microseconds of a decision.
    """
    rng, choose = random.Random(2), POLICIES[policy]
    engines = {f"e{n:04d}": Engine() for n in range(n_engines)}
    directory = PrefixDirectory()
    for name in engines:
        directory.hold(name, CACHE_TOKENS)
    events = [(at, number, 0) for at, number in arrivals(n_engines, load, n_turns, 1)]
    heapq.heapify(events)
    sessions = dict[int, list[list[bytes]]]()
    waits, n_known, n_all, deciding = list[float](), 0, 0, 0.0
    while events:
        now, number, turn = heapq.heappop(events)
        turns = sessions.setdefault(number, session(number, random.Random(number)))
        keys = turns[turn]
        loads = {name: engine.load(now) for name, engine in engines.items()}
        began = time.perf_counter()
        name = choose(directory, loads, keys, rng)
        deciding += time.perf_counter() - began
        if policy == "by beginning":
            directory.add(name, keys)
        wait, known = engines[name].serve(now, keys)
        waits.append(wait)
        n_known += known
        n_all += len(keys) * BLOCK
        if turn + 1 < len(turns):
            pause = wait + ANSWER / WRITE_PER_S + rng.expovariate(1 / PAUSE_S)
            heapq.heappush(events, (now + pause, number, turn + 1))
        else:
            del sessions[number]
    waits.sort()
    return {
        "turns": len(waits),
        "known": n_known / n_all,
        "first_p50_s": waits[len(waits) // 2],
        "first_p99_s": waits[int(0.99 * len(waits))],
        "directory_keys": len(directory),
        "decision_us": 1e6 * deciding / len(waits),
    }


def plot(found: dict[str, dict[int, dict[str, float]]], path: Path) -> None:
    """Hits, and the slowest of hundred first tokens, over the number of engines."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for policy, by_count in found.items():
        counts = list(by_count)
        axes[0].plot(counts, [100 * by_count[n]["known"] for n in counts], "o-", label=policy)
        axes[1].plot(counts, [by_count[n]["first_p99_s"] for n in counts], "o-", label=policy)
    axes[0].set(title="Tokens of prompts that were known, %", ylim=(0, 100))
    axes[1].set(title="Time to the first token, p99, s", yscale="log")
    for axis in axes:
        axis.set(xscale="log", xlabel="engines")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--load", type=float, default=0.5)
    parser.add_argument("--turns", type=int, default=200, help="for each engine, at most 20,000")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    found: dict[str, dict[int, dict[str, float]]] = {}
    print(
        "| Requests go | engines | tokens known | first token p50, s | p99, s | keys | choice, µs |"
    )
    print("| --- |" + " --- |" * 6)
    for policy in POLICIES:
        for n in COUNTS:
            one = simulate(policy, n, arguments.load, min(20_000, arguments.turns * n))
            found.setdefault(policy, {})[n] = one
            print(
                f"| {policy} | {n:,} | {one['known']:.0%} | {one['first_p50_s']:.2f} | "
                f"{one['first_p99_s']:.1f} | {one['directory_keys']:,.0f} | "
                f"{one['decision_us']:.0f} |",
                flush=True,
            )
    result: dict[str, Any] = {"load": arguments.load, "figures": found}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        plot(found, arguments.plot)


if __name__ == "__main__":
    main()
