"""What cache types cost in quality, measured on the model that ships and on its outlier twins.

It measures every type, rotated and not, every side alone, mixed pairs, tails and sinks, smoothing,
and types by layer.

    python benchmarks/quality.py --json quality.json --plot quality.png

- The divergence (KLD) of every prediction from the one with an f16 cache, not rotated, and how
often
  the most likely token is the same. Nothing was trained on the text, which the corpus generator
  makes. The second half of each row counts, as `localkv perplexity` counts it.
- Recall: eight facts, stories, a question about one of the facts, at several distances. Whether the
  greedy answer is right, and the log-probability of the right answer.
- Twins (models/outliers.py) compute the same function with outliers in K and V, as large models
  have them. They are made on the spot.
- Scales, codebooks, smoothing and types by layer are measured on other rows of text.

Prints a Markdown table. `--from FILE` shows again what `--json FILE` wrote.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "models"))

from outliers import Outliers, write_twin  # noqa: E402
from quality_bench import Bench, Scope, text_options  # noqa: E402
from quality_plot import draw  # noqa: E402
from quality_report import Measured, Report  # noqa: E402
from quality_table import full_table, insert_tables  # noqa: E402

from localkv.errors import LocalKVError  # noqa: E402
from localkv.system.threads import n_threads  # noqa: E402

TWINS = {"K x8, V x2": Outliers(), "K x16, V x4": Outliers(k_strength=16, v_strength=4)}


def measure_all(args: argparse.Namespace, scope: Scope, twins: Mapping[str, Outliers]) -> Report:
    """The model and its twins."""
    started, used = time.perf_counter(), time.process_time()
    results = list[Measured]()

    def measure(name: str, path: Path) -> None:
        bench = Bench(name, path, scope, device=args.device, threads=args.threads, seed=args.seed)
        results.extend(bench.measure())

    measure("plain", args.model)
    with tempfile.TemporaryDirectory() as folder:
        for name, outliers in twins.items():
            path = Path(folder) / "twin.gguf"
            write_twin(args.model, path, outliers)
            measure(name, path)
    return Report(
        model=args.model.name,
        rows=scope.rows,
        row_tokens=scope.row_tokens,
        seed=args.seed,
        threads=n_threads(),
        seconds=time.perf_counter() - started,
        processor_seconds=time.process_time() - used,
        results=tuple(results),
    )


def options() -> argparse.Namespace:
    parser = text_options(__doc__, rows=Scope.rows)
    parser.add_argument(
        "--series", type=int, default=Scope.series, help="lists of 8 facts (default 2)"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw KLD over bits per value")
    parser.add_argument(
        "--insert",
        type=Path,
        nargs="+",
        metavar="PAGE",
        help="put short tables in pages, between their marks",
    )
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="measure nothing")
    parser.add_argument("--dry-run", action="store_true", help="a few caches on hardly any text")
    args = parser.parse_args()
    if min(args.rows, args.series) < 1:
        parser.error("--rows and --series must be at least 1")
    return args


def main() -> None:
    args = options()
    if args.source is not None:
        report = Report.from_json(json.loads(args.source.read_text()))
    else:
        scope = Scope.dry_run() if args.dry_run else Scope(rows=args.rows, series=args.series)
        twins = dict(list(TWINS.items())[:1]) if args.dry_run else TWINS
        try:
            report = measure_all(args, scope, twins)
        except LocalKVError as error:
            sys.exit(f"error: {error}")
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    print("\n".join(full_table(report)))
    if args.plot is not None:
        draw(report, args.plot)
    if args.insert is not None:
        insert_tables(report, args.insert)


if __name__ == "__main__":
    main()
