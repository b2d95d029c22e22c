"""What cache types cost in quality: the model that ships and its outlier twins, every type, rotated
and not, every side alone, and mixed pairs.

    python benchmarks/quality.py --json quality.json --plot quality.png

- The divergence (KLD) of every prediction from that with an f16 cache, not rotated, and how often
  the most likely token is the same: text of the corpus generator that nothing was trained on,
  through the cache, the second half of each row (as `localkv perplexity` counts).
- Recall: eight facts, stories, a question about one of the facts, at several distances. Whether the
  greedy answer is right, and the log-probability of the right answer.
- Twins (models/outliers.py) compute the same function with outliers in K and V, as large models
  have them. They are made on the spot.

Prints a Markdown table. `--from FILE` shows again what `--json FILE` wrote.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "models"))

from corpus import make_row  # noqa: E402
from curriculum import STAGES  # noqa: E402
from outliers import Outliers, write_twin  # noqa: E402
from quality_caches import DRY_RUN, ROTATIONS, caches, pairs  # noqa: E402
from quality_plot import draw  # noqa: E402
from quality_recall import encoder_of, make_series, recall  # noqa: E402
from quality_table import Measured, Report, full_table, insert_tables  # noqa: E402

from localkv import LLM  # noqa: E402
from localkv.config import CacheConfig, KVScales  # noqa: E402
from localkv.errors import LocalKVError  # noqa: E402
from localkv.memory.plan import mean_bits  # noqa: E402
from localkv.model import Transformer  # noqa: E402
from localkv.quality.calibration import calibrate  # noqa: E402
from localkv.quality.scores import TokenScores, base_cache, joined, score_chunks  # noqa: E402
from localkv.quality.statistics import divergence  # noqa: E402
from localkv.system.threads import n_threads  # noqa: E402

TWINS = {
    "K x8, V x2": Outliers(),
    "K x16, V x4": Outliers(k_strength=16, v_strength=4),
}
ROW_TOKENS = 1024
DISTANCES = (128, 512, 1024, 1800)
CALIBRATION_ROWS = 4
N_CTX = 2048  # holds the list of facts, the stories and the question


def rows(llm: LLM, count: int, length: int, seed: str) -> list[list[int]]:
    """Rows of what the model was trained with last, from another seed than the training's."""
    rng = random.Random(seed)
    encoder = encoder_of(llm)
    return [make_row(rng, encoder, STAGES[-1].genres, length)[0] for _ in range(count)]


def scales(llm: LLM, text: Sequence[Sequence[int]], length: int) -> dict[str, KVScales]:
    """Scales for types that are scaled by head, by rotation."""
    found = {}
    for rotation in ROTATIONS:
        *_, found[rotation] = calibrate(llm.engine.model, text, n_ctx=length, kv_rotation=rotation)
    return found


def divergences(
    model: Transformer, text: Sequence[Sequence[int]], measured: Sequence[CacheConfig]
) -> Iterator[list[TokenScores]]:
    """Scores of all rows with every cache; tells how far it is on stderr."""
    base = base_cache(measured[0].n_ctx)
    for number, scores in enumerate(score_chunks(model, text, measured, base=base), start=1):
        progress(f"divergence: row {number} of {len(text)}")
        yield scores


def measure(name: str, path: Path, args: argparse.Namespace) -> list[Measured]:
    """All caches with one model."""
    llm = LLM(path, n_ctx=N_CTX, device=args.device, n_threads=args.threads)
    model, length = llm.engine.model, args.row_tokens
    text = rows(llm, args.rows, length, f"text:{args.seed}")
    found_scales = scales(
        llm, rows(llm, CALIBRATION_ROWS, length, f"calibration:{args.seed}"), length
    )
    series = make_series(encoder_of(llm), args.distances, args.series, args.seed)
    measured = caches(args.pairs, length, found_scales)
    by_cache = zip(*divergences(model, text, measured), strict=True)
    results = []
    for number, (cache, scores) in enumerate(zip(measured, by_cache, strict=True), start=1):
        progress(f"recall: cache {number} of {len(measured)}")
        found = divergence(joined(scores))
        results.append(
            Measured(
                model=name,
                type_k=cache.type_k,
                type_v=cache.type_v,
                rotation=cache.kv_rotation,
                bits_per_value=mean_bits((cache.type_k, cache.type_v), llm.config),
                kld=found.kld,
                kld_99=found.kld_percentiles[99],
                same_top=found.same_top,
                recall=recall(model, replace(cache, n_ctx=N_CTX), series),
            )
        )
    progress("")
    return results


def measure_all(args: argparse.Namespace, twins: Mapping[str, Outliers]) -> Report:
    """The model and its twins."""
    started = time.perf_counter()
    results = measure("plain", args.model, args)
    with tempfile.TemporaryDirectory() as folder:
        for name, outliers in twins.items():
            path = Path(folder) / "twin.gguf"
            write_twin(args.model, path, outliers)
            results += measure(name, path, args)
    return Report(
        model=args.model.name,
        rows=args.rows,
        row_tokens=args.row_tokens,
        seed=args.seed,
        threads=n_threads(),
        seconds=time.perf_counter() - started,
        results=tuple(results),
    )


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = ROOT / "models" / "tales-4M-F16.gguf"
    parser.add_argument("-m", "--model", type=Path, default=model, help="one of models/train.py")
    parser.add_argument("--rows", type=int, default=8, help="rows of text (default 8)")
    parser.add_argument("--series", type=int, default=3, help="lists of 8 facts (default 3)")
    parser.add_argument("--seed", type=int, default=1, help="of text and facts (default 1)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw KLD over bits per value")
    parser.add_argument(
        "--insert", type=Path, metavar="PAGE", help="put short tables in a page, between its marks"
    )
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="measure nothing")
    parser.add_argument("--dry-run", action="store_true", help="a few caches on hardly any text")
    args = parser.parse_args()
    if min(args.rows, args.series) < 1:
        parser.error("--rows and --series must be at least 1")
    args.pairs, args.distances, args.row_tokens = pairs(), DISTANCES, ROW_TOKENS
    if args.dry_run:
        args.pairs, args.distances, args.row_tokens = list(DRY_RUN), (64, 128), 128
        args.rows, args.series = 2, 1
    return args


def main() -> None:
    args = options()
    if args.source is not None:
        report = Report.from_json(json.loads(args.source.read_text()))
    else:
        twins = dict(list(TWINS.items())[:1]) if args.dry_run else TWINS
        try:
            report = measure_all(args, twins)
        except LocalKVError as error:
            sys.exit(f"error: {error}")
    print("\n".join(full_table(report)))
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    if args.plot is not None:
        draw(report, args.plot)
    if args.insert is not None:
        insert_tables(report, args.insert)


if __name__ == "__main__":
    main()
