"""Figures of `cpu_vs_llama_cpp.py`: a file that keeps them, and tables for the documentation."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

TITLES = {
    "tg": "Decoding, tokens per second",
    "pp": "Prompt of 512 tokens, tokens per second",
    "load": "Loading, seconds",
    "load and a token": "Loading and the first token, seconds",
}
OURS, PEER, SECOND_PEER = "localkv", "llama.cpp", "ik_llama.cpp"
REPACKS = "ik_llama.cpp -rtr 1"
"""The second peer when it repacks weights as it loads them."""

PEERS = {PEER: (PEER,), SECOND_PEER: (SECOND_PEER, REPACKS)}
"""Programs of a peer's column, which has the better one's figures."""


@dataclass(frozen=True)
class Figure:
    """What one program took in a test, once for each round.

    Attributes:
        table: that it is part of.
        shape, weights, pair, depth: of the model and the cache.
        values: tokens per second, or seconds of loading; none if the program can't run the model.
        n_bytes: that a decoded token has to read (localkv only).
        reads: the memory's bandwidth before each of its rounds, bytes per second that all threads
            read; where `n_bytes` is known.
    """

    table: str
    shape: str
    weights: str
    pair: str
    depth: int
    test: str
    program: str
    values: Sequence[float]
    n_bytes: float = 0.0
    reads: Sequence[float] = ()

    @property
    def place(self) -> tuple[object, ...]:
        """Two figures of the same place are of the same thing."""
        names = self.table, self.shape, self.weights, self.pair
        return (*names, self.depth, self.test, self.program)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def share(self) -> float:
        """The share of the memory's bandwidth that a decoded token takes; 0 if it is not known."""
        shares = [self.n_bytes * a / b for a, b in zip(self.values, self.reads, strict=False)]
        return statistics.median(shares) if shares else 0.0


@dataclass
class Report:
    """All figures of one machine.

    Attributes:
        cpu, n_processors: the machine.
        programs: what each says of itself.
    """

    cpu: str
    n_processors: int
    programs: dict[str, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Report:
        facts = json.loads(path.read_text())
        figures = [Figure(**figure) for figure in facts.pop("figures")]
        return cls(**facts, figures=figures)

    def write(self, path: Path) -> None:
        facts = asdict(self)
        lines = ",\n".join(f"  {json.dumps(figure)}" for figure in facts.pop("figures"))
        head = json.dumps(facts, indent=1).removesuffix("\n}")
        path.write_text(f'{head},\n "figures": [\n{lines}\n ]\n}}\n')

    def add(self, figures: Sequence[Figure]) -> None:
        """Add figures in place of older ones of the same things."""
        new = {figure.place for figure in figures}
        self.figures = [old for old in self.figures if old.place not in new] + list(figures)

    def about(self) -> str:
        """A line on the machine and the programs."""
        threads = f"{self.n_processors} processors"
        reads = [bandwidth / 1e9 for figure in self.figures for bandwidth in figure.reads]
        read = f", memory read at {min(reads):.0f} to {max(reads):.0f} GB/s" if reads else ""
        programs = ", ".join(self.programs.values())
        return f"{self.cpu}, {threads}{read}; {programs}, each alone, with its own defaults."

    def tables(self, name: str) -> str:
        """All that there are figures for in the table `name`."""
        figures = [figure for figure in self.figures if figure.table == name]
        texts = [_table(figures, test) for test in TITLES]
        texts.append(_cost_of_depth(figures))
        texts.append(_several(figures))
        return "\n".join(filter(None, texts))


def several(n: int) -> str:
    """The test that decodes `n` sequences at the same time."""
    return f"tg x{n}"


def ratio(values: Sequence[float], others: Sequence[float]) -> str:
    """Median, least and largest ratio of runs of the same round; of medians if rounds differ."""
    if len(values) != len(others):
        values, others = [statistics.median(values)], [statistics.median(others)]
    ratios = [a / b for a, b in zip(values, others, strict=True)]
    middle = f"{statistics.median(ratios):.2f}"
    return middle if len(ratios) == 1 else f"{middle} ({min(ratios):.2f}-{max(ratios):.2f})"


def rounded(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def markdown(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(header)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, rule, *body))


class _Found:
    """The figures of one test."""

    def __init__(self, figures: Sequence[Figure], test: str) -> None:
        chosen = [figure for figure in figures if figure.test == test and figure.values]
        self.by_place = {(f.shape, f.weights, f.pair, f.depth, f.program): f for f in chosen}
        self.lines = list(dict.fromkeys((f.shape, f.weights, f.pair) for f in chosen))
        self.depths = sorted({f.depth for f in chosen})
        programs = {f.program for f in chosen}
        self.peers = [name for name, all_of in PEERS.items() if programs & {*all_of}]

    def get(self, line: tuple[str, str, str], depth: int, program: str) -> Figure | None:
        return self.by_place.get((*line, depth, program))

    def of_peer(self, line: tuple[str, str, str], depth: int, peer: str) -> Figure | None:
        """The better figure of a peer's programs."""
        found = [self.get(line, depth, program) for program in PEERS[peer]]
        return max((one for one in found if one), key=lambda one: one.median, default=None)

    def share(self, line: tuple[str, str, str], depth: int) -> float:
        """The share of the memory's bandwidth that ours takes; 0 if it is not known."""
        ours = self.get(line, depth, OURS)
        return ours.share if ours else 0.0

    def f16(self, line: tuple[str, str, str], depth: int) -> Figure | None:
        """Ours with an f16 cache."""
        return self.get((*line[:2], "f16"), depth, OURS)

    def head(self) -> list[str]:
        """Titles of the columns that say which model it is: those that differ."""
        return [
            title
            for i, title in enumerate(("Model", "Weights", "K/V"))
            if len({line[i] for line in self.lines}) > 1 or (i == 1 and len(self.lines) == 1)
        ]

    def cells(self, line: tuple[str, str, str]) -> Iterator[str]:
        shape, weights, pair = line
        texts = {
            "Model": shape,
            "Weights": weights.upper(),
            "K/V": pair if "/" in pair else f"{pair}/{pair}",
        }
        return (texts[title] for title in self.head())


def _table(figures: Sequence[Figure], test: str) -> str:
    """One table for a test: a line for each model and pair, columns for each depth."""
    found = _Found(figures, test)
    if not found.lines:
        return ""
    is_speed = test in ("tg", "pp")
    has_f16 = is_speed and len({line[2] for line in found.lines}) > 1
    has_share = any(found.share(line, depth) for line in found.lines for depth in found.depths)
    header = found.head()
    for depth in found.depths:
        at = f"at {depth:,}: " if len(found.depths) > 1 else ""
        header += [f"{at}{OURS}", *found.peers]
        header += [] if not found.peers else ["to the best" if len(found.peers) > 1 else "ratio"]
        header += ["to our f16"] if has_f16 else []
        header += ["of the memory"] if has_share else []
    body = []
    for line in found.lines:
        cells = list(found.cells(line))
        for depth in found.depths:
            ours, f16 = found.get(line, depth, OURS), found.f16(line, depth)
            peers = [found.of_peer(line, depth, peer) for peer in found.peers]
            cells.append(rounded(ours.median) if ours else "")
            cells += [rounded(peer.median) if peer else "" for peer in peers]
            if peers:
                there = [peer for peer in peers if peer]
                best = max(there, key=lambda peer: peer.median, default=None)
                cells.append(ratio(ours.values, best.values) if ours and best else "")
            if has_f16:
                is_other = ours and f16 and line[2] != "f16"
                cells.append(ratio(ours.values, f16.values) if is_other else "")
            if has_share:
                share = found.share(line, depth)
                cells.append(f"{share:.0%}" if share else "")
        body.append(cells)
    return f"{TITLES[test]}:\n\n{markdown(header, body)}"


def _cost_of_depth(figures: Sequence[Figure]) -> str:
    """What 1,000 more tokens of context cost, from depth 0 to each other depth."""
    found = _Found(figures, "tg")
    pairs = {line[2] for line in found.lines}
    if (
        len(found.depths) < 2
        or found.depths[0]
        or len(pairs) < 2
        or not any(f.reads for f in figures)
    ):
        return ""

    def cost(figure: Figure | None, start: Figure | None) -> float:
        """Seconds per token of context."""
        if figure is None or start is None:
            return 0.0
        return (1 / figure.median - 1 / start.median) / figure.depth

    header, peers = found.head(), found.peers or [PEER]
    for depth in found.depths[1:]:
        header += [f"to {depth:,}: {OURS}", "of our f16", "of the memory", *peers]
    body = []
    for line in found.lines:
        cells = list(found.cells(line))
        start = found.get(line, 0, OURS)
        for depth in found.depths[1:]:
            ours = found.get(line, depth, OURS)
            seconds = cost(ours, start)
            f16 = cost(found.f16(line, depth), found.f16(line, 0))
            cells.append(f"{1e6 * seconds:.2f}" if ours else "")
            cells.append(f"{seconds / f16:.2f}" if f16 and ours else "")
            rate = (ours.n_bytes - start.n_bytes) / depth / seconds if ours and start else 0
            reads = [*ours.reads, *start.reads] if rate else []
            cells.append(f"{rate / statistics.median(reads):.0%}" if reads else "")
            for peer in peers:
                of_peer = found.of_peer(line, depth, peer)
                seconds = cost(of_peer, found.of_peer(line, 0, peer))
                cells.append(f"{1e6 * seconds:.2f}" if of_peer else "")
        body.append(cells)
    title = "What 1,000 more tokens of context cost, milliseconds per token"
    return f"{title}:\n\n{markdown(header, body)}"


def _several(figures: Sequence[Figure]) -> str:
    """Sequences at the same time: a line for each number and pair."""
    found = {(f.pair, int(f.test[4:]), f.program): f for f in figures if f.test.startswith("tg x")}
    if not found:
        return ""
    has_peer = any(program == PEER for *_, program in found)
    header = ["K/V", "sequences", OURS, *([PEER, "ratio"] if has_peer else []), "to our one"]
    body = []
    for pair, n in dict.fromkeys((pair, n) for pair, n, _ in found):
        ours, peer = found[pair, n, OURS], found.get((pair, n, PEER))
        one = found.get((pair, 1, OURS))
        cells = [pair if "/" in pair else f"{pair}/{pair}", str(n), rounded(ours.median)]
        if has_peer:
            cells.append(rounded(peer.median) if peer else "")
            cells.append(ratio(ours.values, peer.values) if peer else "")
        cells.append(f"{ours.median / one.median:.2f}" if one and n > 1 else "")
        body.append(cells)
    (depth,) = {figure.depth for figure in found.values()}
    title = f"Decoding several sequences at the same time, at a depth of {depth:,} each"
    return f"{title}, tokens per second of all together:\n\n{markdown(header, body)}"
