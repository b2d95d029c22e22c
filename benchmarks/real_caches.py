"""What cache types cost two published models in quality, and what each costs in bits.

    python benchmarks/real_caches.py FOLDER --json benchmarks/results/real-caches.json
    python benchmarks/real_caches.py --insert docs/cache-costs.md --plot docs/kv-cache-real.png

FOLDER has the models' files, as `make real` fetches them (`.ci/real_models FOLDER`). Divergence
(KLD) of every prediction from the model's with an f16 cache, by `localkv perplexity --sweep`: an
administrator's handbook (tests/data/handbook.txt), two chunks of 2,048 tokens, whose second halves
are scored. Each pair has the tail and the sink that its types have by themselves. f32 is the floor:
with 8-bit activations any change makes other roundings in all layers above.

Without FOLDER the figures of the JSON file are shown again: a table on stdout, the page's table
(`--insert`), and the picture (`--plot`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from quality_bits import bits_after

from localkv.arch.spec import CacheGroup
from localkv.commands.perplexity import unbeaten
from localkv.commands.pictures import BLUE, GREEN, INK, MUTED, ORANGE, PINK, name_points, quiet
from localkv.config import CacheConfig, preset_pairs
from localkv.quant_formats import KV_FORMATS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "real-caches.json"
HANDBOOK = ROOT / "tests" / "data" / "handbook.txt"
MODELS = {
    "SmolLM2 135M": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "Gemma 3 270M": "gemma-3-270m-q4_k_m.gguf",
}
LENGTHS = (4096, 16384, 131072)
"""Tokens of the texts after which bits are counted."""
HEAD = 128
"""Channels of a head, where a type's bits depend on them."""
BEGIN, END = "<!-- real cost table -->", "<!-- end of real cost table -->"
MOST_BITS = 9.0
NAMED = (
    *preset_pairs(),
    *((name, name) for name in ("q8_0", "q4_0", "nuq4", "kv3_1", "kv2_0", "fp8_e4m3")),
    *(("q4_1c128", "kv2_0"), ("kv3_1c128", "kv2_0"), ("kv3_1c", "kv3_0"), ("q6_0", "q4_0")),
)
"""Pairs whose dots have names."""

ALONE = [name for name in KV_FORMATS if name != "f16" and not name.endswith("_head")]
MIXED = """
    q8_0c/q8_0 q8_0c/q5_1 q8_0c/q5_0 q8_0c/q4_1 q8_0c/q4_0 q8_0/q6_0 q8_0/q5_1 q8_0/q5_0 q8_0/q4_1
    q8_0/q4_0 q6_0/q5_1 q6_0/q4_0 q5_1/q5_0 q5_1/q4_0 q5_0/q4_0
    q4_1c/q8_0 q4_1c/q5_1 q4_1c/q5_0 q4_1c/q4_1 q4_1c/q4_0 q4_1c/iq4_nl q4_1c/nuq4 q4_1c/nuq3
    q4_1c/kv3_1 q4_1c/kv3_0 q4_1c/kv2_1 q4_1c/kv2_0
    kv3_1c/q8_0 kv3_1c/q5_0 kv3_1c/q4_0 kv3_1c/nuq3 kv3_1c/kv3_1 kv3_1c/kv3_0 kv3_1c/kv2_1
    kv3_1c/kv2_0 kv3_1c/nuq2
    q4_1c128/q4_0 q4_1c128/kv3_0 q4_1c128/kv2_0 kv3_1c128/kv3_0 kv3_1c128/kv2_0
    kv2_1c/q4_0 kv2_1c/kv3_0 kv2_1c/kv2_1 kv2_1c/kv2_0 kv2_1c/nuq2
"""
"""Pairs of two types, the first of K."""


@dataclass(frozen=True)
class Cost:
    """What one pair of types costs one model.

    Attributes:
        kld, error: mean divergence in nats, and its standard error.
        kld_99: its 99th percentile.
        same_top: share of tokens whose most likely successor is the same.
    """

    model: str
    type_k: str
    type_v: str
    kld: float
    error: float
    kld_99: float
    same_top: float

    @property
    def pair(self) -> tuple[str, str]:
        return self.type_k, self.type_v


def bits(pair: tuple[str, str], n_tokens: int | None = None) -> float:
    """Bits per value of packed rows, or of a text of `n_tokens`, with its tail and its sink."""
    if n_tokens is None:
        return sum(KV_FORMATS[name].bits_per_value(HEAD) for name in pair) / 2
    group = CacheGroup(1, HEAD, HEAD, 0, (0,))
    return bits_after(CacheConfig(*pair), [group], n_tokens)


def measure(folder: Path, pairs: Sequence[str], threads: int | None) -> list[Cost]:
    """Pairs with both models."""
    found = list[Cost]()
    for name, file in MODELS.items():
        command = [sys.executable, "-m", "localkv", "perplexity", "-m", str(folder / file)]
        command += ["-f", str(HANDBOOK), "-c", "2048", "--chunks", "2", "--json"]
        command += ["--sweep", ",".join(pairs)]
        command += [] if threads is None else ["-t", str(threads)]
        report = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        for one in json.loads(report)["results"]:
            far = one["divergence"]
            cost = Cost(
                name,
                one["type_k"],
                one["type_v"],
                far["kld"]["value"],
                far["kld"]["error"],
                far["kld_percentiles"]["99"],
                far["same_top"]["value"],
            )
            found.append(cost)
    return found


def table(costs: Sequence[Cost]) -> list[str]:
    """A row for each pair, from the most bits in a long text to the fewest."""
    header = ["K/V", "bits", *(f"at {n // 1024}k" for n in LENGTHS)]
    header += [f"KLD: {model}" for model in MODELS] + [f"same top: {model}" for model in MODELS]
    rows = dict[tuple[str, str], list[Cost]]()
    for cost in costs:
        rows.setdefault(cost.pair, []).append(cost)
    cells = [
        [
            "/".join(dict.fromkeys(pair)),
            f"{bits(pair):.4g}",
            *(f"{bits(pair, n):.4g}" for n in LENGTHS),
            *(f"{one.kld:.1e}" for one in found),
            *(f"{100 * one.same_top:.1f} %" for one in found),
        ]
        for pair, found in sorted(rows.items(), key=lambda item: -bits(item[0], LENGTHS[1]))
    ]
    lines = [header, ["---"] * len(header), *cells]
    return ["| " + " | ".join(line) + " |" for line in lines]


def insert(lines: Sequence[str], page: Path) -> None:
    """Put the table between the marks of a page."""
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("\n".join([before + BEGIN, "", *lines, "", END + after]))


def draw(costs: Sequence[Cost], path: Path) -> None:
    """Write the picture: divergence over bits after 16,384 tokens, a panel for each model."""
    figure = Figure(figsize=(13, 7.5), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(MODELS), sharey=True)
    panels[0].set_ylabel("mean KL divergence from an f16 cache (nats)", fontsize=10, color=INK)
    figure.supxlabel(
        "bits per cached value after 16,384 tokens: K and V, with scales, tail and sink",
        fontsize=10,
        color=INK,
    )
    for axes, model in zip(panels, MODELS, strict=True):
        axes.set_yscale("log")
        axes.set_xlim(2.4, MOST_BITS)
        axes.set_title(model, fontsize=12, color=INK, loc="left")
        quiet(axes, grid="y")
    figure.canvas.draw()
    for axes, model in zip(panels, MODELS, strict=True):
        panel(axes, [one for one in costs if one.model == model])
    figure.savefig(path, dpi=100)


def panel(axes: Axes, found: Sequence[Cost]) -> None:
    """The dots of one model, and a line along the pairs that nothing smaller beats."""
    shown = [one for one in found if bits(one.pair, LENGTHS[1]) <= MOST_BITS]
    for one in shown:
        axes.plot(
            bits(one.pair, LENGTHS[1]), one.kld, "o", color=colour(one.pair), ms=6, alpha=0.85
        )
    best = unbeaten([(bits(one.pair, LENGTHS[1]), one.kld, "") for one in shown])
    axes.plot(*zip(*((x, y) for x, y, _ in best), strict=True), "-", color=MUTED, lw=1)
    floor = next(one.kld for one in found if one.type_k == "f32")
    axes.axhline(floor, color=MUTED, lw=1, ls=":")
    axes.text(
        2.45, floor * 0.93, "what 8-bit activations make of any change", color=MUTED, va="top"
    )
    points = {one.pair: (bits(one.pair, LENGTHS[1]), one.kld) for one in shown}
    named = [(*points[pair], "/".join(dict.fromkeys(pair)), colour(pair)) for pair in NAMED]
    name_points(axes, named, others=list(points.values()))


def colour(pair: tuple[str, str]) -> str:
    """By the kind of K's type."""
    fmt = KV_FORMATS[pair[0]]
    if fmt.group_tokens > 1:
        return GREEN
    return PINK if fmt.n_centroids else ORANGE if pair[0].startswith("fp8") else BLUE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="with the models' files")
    parser.add_argument("--pairs", help="K/V,K/V,...: only these; others stay as they were")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE", help="all figures")
    parser.add_argument("--insert", type=Path, metavar="PAGE", help="put the table in a page")
    parser.add_argument("--plot", type=Path, metavar="PICTURE", help="draw KLD over bits")
    parser.add_argument("-t", "--threads", type=int)
    args = parser.parse_args()
    if args.folder is not None:
        every = [*(f"{name}/{name}" for name in ALONE), *MIXED.split()]
        pairs = every if args.pairs is None else args.pairs.split(",")
        costs = measure(args.folder, pairs, args.threads)
        if args.pairs is not None:
            known = [Cost(**one) for one in json.loads(args.json.read_text())["costs"]]
            costs = [one for one in known if "/".join(one.pair) not in pairs] + costs
        text = json.dumps({"costs": list(map(asdict, costs))}, indent=1)
        args.json.write_text(text + "\n")
    costs = [Cost(**one) for one in json.loads(args.json.read_text())["costs"]]
    lines = table(costs)
    print("\n".join(lines))
    if args.insert is not None:
        insert(lines, args.insert)
    if args.plot is not None:
        draw(costs, args.plot)


if __name__ == "__main__":
    main()
