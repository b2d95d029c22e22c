"""Time choices of the GPU kernels' tiles, which `packed_attention.py` and `tile_sizes.py` make.

    python benchmarks/gpu_tiles.py [--kinds decode prefill token tokens] [--out FOLDER]

Compiles every choice in as many processes as there are cores, then times each against the choice
that the package makes, whose results the others have to give, too. Prints the fastest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from gpu import OutOfTimeError, Run, Sizes, attention_calls, seconds_of  # noqa: E402

KINDS = ("token", "decode", "tokens", "few", "prefill")
DECODE_PAIRS = ("f16", "q8_0", "q4_0", "q4_0/q8_0")
PREFILL_PAIRS = ("f16", "q8_0", "q4_0/q8_0")
TOKEN_TYPES = ("f16", "q8_0", "q4_0", "q4_K", "q6_K")
TOKENS_TYPES = ("f16", "q4_0", "q4_K")
MATRICES = ((14336, 4096), (4096, 14336), (4096, 4096))


@dataclass(frozen=True)
class Case:
    """A measurement.

    Attributes:
        kind: of `KINDS`.
        name: the cache's pair or the weight's type.
        size: context, rows x columns, or tokens.
        choice: what is chosen, by name; empty for the package's own.
        setting: puts the choice in place, and returns what undoes it.
        calls: makes the calls that are timed.
        n_bytes, n_flop: that a call reads and computes.
    """

    kind: str
    name: str
    size: str
    choice: str
    setting: Callable[[], Callable[[], None]]
    calls: Callable[[Run], list[Callable[[], Any]]]
    n_bytes: float = 0.0
    n_flop: float = 0.0


def patched(*changes: tuple[Any, str, Any]) -> Callable[[], Callable[[], None]]:
    def put() -> Callable[[], None]:
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
        for owner, name, value in changes:
            setattr(owner, name, value)
        return lambda: [setattr(*item) for item in before] and None

    return put


_made: dict[Any, Any] = {}


def kept(key: Any, make: Callable[[], Any]) -> Any:
    """Only the last input is kept: cases with the same one follow one another."""
    if key not in _made:
        _made.clear()
        _made[key] = make()
    return _made[key]


def attention_cases(kind: str, pairs: tuple[str, ...], n_new: int, contexts: tuple[int, ...],
                    choices: list[dict[str, int]]) -> Iterator[Case]:  # fmt: skip
    from localkv.kernels.gpu.attention import packed_attention
    from localkv.kernels.gpu.attention.packed_attention import TileConfig

    name = "decode_config" if n_new == 1 else "prefill_config"
    for pair, n_ctx in itertools.product(pairs, contexts):

        def calls(run: Run, pair: str = pair, n_ctx: int = n_ctx) -> Any:
            made = kept((kind, pair, n_ctx), lambda: attention_calls(run, pair, n_new, n_ctx))
            return made.calls if n_new == 1 else made.calls[:2]

        flop = 4 * 128 * 32 * n_new * (n_ctx - (n_new - 1) / 2)
        for choice in [{}, *choices]:
            changes: list[tuple[Any, str, Any]] = []
            if choice:
                queries = choice.get("queries", 8)
                tiles = TileConfig(queries, choice["keys"], choice["warps"], choice["stages"])
                changes.append((packed_attention, name, lambda *_, _t=tiles, **__: _t))
            if "programs" in choice:
                changes.append((packed_attention, "PROGRAMS_PER_PROCESSOR", choice["programs"]))
                changes.append((packed_attention, "MOST_SPLITS", 128))
            text = " ".join(f"{key} {value}" for key, value in choice.items())
            yield Case(kind, pair, str(n_ctx), text, patched(*changes), calls, n_flop=flop)


def product_cases(kind: str, types: tuple[str, ...], n_tokens: int,
                  matrices: tuple[tuple[int, int], ...],
                  choices: list[dict[str, int]]) -> Iterator[Case]:  # fmt: skip
    import torch

    from localkv.kernels.gpu.products import products
    from localkv.kernels.gpu.products.tile_sizes import TileSizes
    from localkv.kernels.gpu.triton_backend import triton_backend
    from localkv.kernels.layer_weights import Linear
    from localkv.loader.synthetic import random_rows
    from localkv.quant_formats import FORMATS
    from localkv.quant_formats.packed_tensor import PackedTensor

    own = products.tile_sizes
    for name, (n_out, n_in) in itertools.product(types, matrices):
        fmt = FORMATS[name]
        n_bytes = fmt.row_bytes(n_in) * n_out

        def make(run: Run, fmt: Any = fmt, n_out: int = n_out, n_in: int = n_in) -> Any:
            backend = triton_backend(run.device)
            rows = torch.from_numpy(random_rows(fmt, n_out, n_in)).to(run.device)
            copies = max(1, min(16, -(-run.sizes.cold_bytes // rows.nbytes)))
            layers = [
                Linear(backend.prepare(PackedTensor(fmt, rows, (n_out, n_in))))
                for _ in range(copies)
            ]
            x = torch.randn(n_tokens, n_in, device=run.device)
            return layers, products.activations(x, [layer.weight for layer in layers[:1]])

        def calls(run: Run, key: Any = (kind, name, n_out, n_in), make: Any = make) -> Any:
            layers, x = kept(key, lambda: make(run))
            return [lambda w=w: products.linears(x, (w,))[0] for w in layers]

        flop = 2 * n_tokens * n_out * n_in
        for choice in [{}, *choices]:
            changes: list[tuple[Any, str, Any]] = []
            if choice:

                def sizes(*args: Any, _c: dict[str, int] = choice, **named: Any) -> TileSizes:
                    return replace(
                        own(*args, **named), **{"tokens": 1, "stages": 1, "n_splits": 1, **_c}
                    )

                changes.append((products, "tile_sizes", sizes))
            text = " ".join(f"{key} {value}" for key, value in choice.items())
            yield Case(kind, name, f"{n_out}x{n_in}", text, patched(*changes), calls, n_bytes, flop)


def grid(**values: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def cases(kinds: list[str]) -> Iterator[Case]:
    if "decode" in kinds:
        choices = grid(keys=(32, 64, 128), warps=(4, 8), stages=(1, 2, 3), programs=(2, 4, 8))
        yield from attention_cases("decode", DECODE_PAIRS, 1, (4096, 32768), choices)
    if "token" in kinds:
        choices = grid(rows=(2, 4, 8), values=(512, 1024, 2048), n_warps=(1, 2, 4))
        yield from product_cases("token", TOKEN_TYPES, 1, MATRICES[:2], choices)
    if "few" in kinds:
        choices = grid(
            tokens=(8,), rows=(16, 32, 64, 128), values=(128, 256), n_warps=(4, 8), stages=(2, 4)
        )
        yield from product_cases("few", TOKENS_TYPES, 8, MATRICES[:1], choices)
    if "prefill" in kinds:
        choices = grid(queries=(64, 128), keys=(64, 128), warps=(4, 8), stages=(2, 3))
        yield from attention_cases("prefill", PREFILL_PAIRS, 2048, (2048, 10240), choices)
    if "tokens" in kinds:
        choices = grid(
            tokens=(128, 256), rows=(64, 128), values=(64, 128), n_warps=(4, 8), stages=(3, 4)
        )
        yield from product_cases("tokens", TOKENS_TYPES, 512, MATRICES[:1], choices)


def key_of(case: Case) -> tuple[str, ...]:
    """Cases with the same key launch the same kernels, but for their grids."""
    choice = case.choice.partition(" programs")[0]
    return case.kind, case.name, choice


def compile_part(run: Run, kinds: list[str], part: int, of: int) -> None:
    import torch

    seen: dict[tuple[str, ...], None] = {}
    for case in cases(kinds):
        key = key_of(case)
        if key in seen:
            continue
        seen[key] = None
        if len(seen) % of != part:
            continue
        undo = case.setting()
        try:
            case.calls(run)[0]()
            torch.cuda.synchronize()
        except Exception as error:
            if "CUDA error" in str(error):
                raise
        finally:
            undo()


def measured(run: Run, kinds: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    wanted = None
    for case in cases(kinds):
        row: dict[str, Any] = {
            "kind": case.kind, "name": case.name, "size": case.size, "choice": case.choice
        }  # fmt: skip
        undo = case.setting()
        try:
            run.seconds_left()
            calls = case.calls(run)
            got = calls[0]()
            if not case.choice:
                wanted = got
            off = float((got.float() - wanted.float()).norm() / wanted.float().norm())
            row |= {"us": 1e6 * seconds_of(run, calls), "off": off}
            if case.n_flop:
                row["tflop_per_s"] = case.n_flop / row["us"] * 1e-6
            if case.n_bytes:
                row["gb_per_s"] = case.n_bytes / row["us"] * 1e-3
        except OutOfTimeError:
            break
        except Exception as error:
            if "CUDA error" in str(error):
                raise
            row["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0:1]}"
        finally:
            undo()
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]], n_best: int) -> None:
    def group(row: dict[str, Any]) -> tuple[str, ...]:
        return row["kind"], row["name"], row["size"]

    for key, of_key in itertools.groupby(rows, group):
        whole = list(of_key)
        timed = sorted((row for row in whole if "us" in row), key=lambda row: row["us"])
        own = next((row["us"] for row in timed if not row["choice"]), 0.0)
        print(*key, f"own {own:.1f} us", f"{len(whole) - len(timed)} failed", sep="  ")
        for row in timed[:n_best]:
            rate = row.get("gb_per_s") or row.get("tflop_per_s", 0.0)
            print(
                f"    {row['us']:9.1f} us {row['us'] / own if own else 0:6.3f}  {rate:7.0f}  "
                f"off {row['off']:.1e}  {row['choice'] or 'own'}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--best", type=int, default=4, help="choices shown for each case")
    parser.add_argument("--out", type=Path, metavar="FILE", help="all measurements, as JSON")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--of", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    started = time.perf_counter()
    run = Run("cuda", replace(Sizes(), repeats=7), options.minutes)
    run.end = started + 60 * options.minutes
    if options.part is not None:
        compile_part(run, options.kinds, options.part, options.of)
        return
    n_parts = min(16, os.cpu_count() or 1)
    command = [sys.executable, __file__, "--kinds", *options.kinds, "--of", str(n_parts), "--part"]
    parts = [subprocess.Popen([*command, str(i)]) for i in range(n_parts)]
    print("compiled:", [part.wait() for part in parts], f"{time.perf_counter() - started:.0f} s")
    rows = []
    for kind in options.kinds:
        rows += measured(run, [kind])
        if options.out:
            options.out.write_text(json.dumps(rows, indent=0))
    show(rows, options.best)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
