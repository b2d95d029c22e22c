"""K kept before RoPE, as KVQuant has it, beside K after RoPE: codebooks, rotated and smoothed.

    python benchmarks/before_rope.py

The divergence of predictions from those with an f16 cache, with K alone in a `nuq` type and
codebooks of normal numbers, by the reference backend; "smoothed" as `localkv calibrate` does it.
Prints the Markdown table of docs/cache-methods.md.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "models"))

from outliers import write_twin  # noqa: E402
from quality import TWINS  # noqa: E402
from quality_bench import Bench, Scope, text_options  # noqa: E402
from quality_caches import CODEBOOKS  # noqa: E402

from localkv.config import CacheConfig  # noqa: E402
from localkv.kernels.select import select_backend  # noqa: E402
from localkv.loader.weights import load_model  # noqa: E402
from localkv.model import Transformer  # noqa: E402
from localkv.quality.scores import base_cache, divergence, joined, score_chunks  # noqa: E402

ROW_TOKENS = 512
TWIN = "K x16, V x4"
STORED = {  # K before RoPE, smoothed
    "before RoPE": (True, False),
    "after RoPE": (False, False),
    "after RoPE, smoothed": (False, True),
}


def loaded(bench: Bench, *, before_rope: bool, smoothed: bool) -> Transformer:
    """The model on the reference backend."""
    backend = select_backend("reference", k_before_rope=before_rope)
    smoothing = bench.smoothing if smoothed else None
    return load_model(bench.llm.gguf, backend, smoothing=smoothing)[0]


def klds(model: Transformer, text: list[list[int]], *, rotation: str) -> list[float]:
    """The divergence with each type, in nats."""
    caches = [
        CacheConfig(type_k=name, n_ctx=ROW_TOKENS, kv_rotation=rotation) for name in CODEBOOKS
    ]
    rows = score_chunks(model, text, caches, base=base_cache(ROW_TOKENS))
    return [divergence(joined(scores)).kld.value for scores in zip(*rows, strict=True)]


def main() -> None:
    args = text_options(__doc__, rows=2).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        twin = Path(folder) / "twin.gguf"
        write_twin(args.model, twin, TWINS[TWIN])
        benches = [
            Bench(
                name, path, Scope(args.rows, ROW_TOKENS), device="cpu", threads=None, seed=args.seed
            )
            for name, path in (("plain", args.model), (f"twin {TWIN}", twin))
        ]
        names = [f"{bench.name}: {name}" for bench in benches for name in CODEBOOKS]
        print(f"| K is stored | rotated | {' | '.join(names)} |")
        print(f"|---|---|{'---|' * len(names)}")
        for stored, (before_rope, smoothed) in STORED.items():
            models = [
                loaded(bench, before_rope=before_rope, smoothed=smoothed) for bench in benches
            ]
            for rotation, rotated in (("off", "no"), ("on", "yes")):
                found = [
                    f"{kld:.1e}"
                    for bench, model in zip(benches, models, strict=True)
                    for kld in klds(model, bench.text, rotation=rotation)
                ]
                print(f"| {stored} | {rotated} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
