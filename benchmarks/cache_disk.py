"""A prompt that is known from before a restart, read from the disk, against evaluating it.

    python benchmarks/cache_disk.py --types f16/f16 q8_0/q4_0
    python benchmarks/cache_disk.py --model llama-1.1b:q8_0 --tokens 4000 --cold

Each time is from a request to its first token, in a process that has just loaded the model. One
process evaluates the prompt and closes its `LLM`, and the next one reads it. The answers have to be
the same. With `--cold` files are written back and dropped from the system's memory before they are
read, so that they come from the disk (Linux).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from random_model import shape_of, write_model

from localkv import LLM
from localkv.system.processor import processor_name


def measured(settings: dict[str, Any]) -> dict[str, Any]:
    """Answer a prompt in this process: seconds to the first token, and what came of the disk."""
    ids = np.random.default_rng(7).integers(1000, 30000, size=settings["n_tokens"]).tolist()
    with LLM(
        settings["model"],
        n_ctx=settings["n_tokens"] + 96,
        cache_type_k=settings["types"][0],
        cache_type_v=settings["types"][1],
        cache_disk=settings["folder"],
        n_threads=settings["threads"],
        progress=False,
    ) as llm:
        llm.engine.prepare()  # as a server does before it is ready
        started = time.perf_counter()
        stream = llm.stream(ids, max_tokens=9, temperature=0, ignore_eos=True)
        pieces = [next(stream)]
        first = time.perf_counter() - started
        pieces += [*stream]
        done = stream.completion
        closing = time.perf_counter()
    closing = time.perf_counter() - closing
    return {
        "first": first,
        "cached": done.usage.cached_tokens,
        "tokens": stream.generation.ids[-9:],
        "closing": closing,
    }


def in_a_process(settings: dict[str, Any]) -> dict[str, Any]:
    """What `one` measures, in a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps(settings)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def drop_from_memory(folder: Path) -> int:
    """Write files back, and have the system forget what it has of them; their bytes."""
    total = 0
    for path in folder.rglob("*-*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                total += os.fstat(file.fileno()).st_size
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add(
        "--model",
        default="llama-1.1b:q4_0",
        help="NAME[@LAYERS]:TYPE with random weights, or a file",
    )
    add("--types", nargs="+", default=["f16/f16", "q8_0/q4_0"], help="of K/V")
    add("--tokens", type=int, default=4000)
    add("--threads", type=int, default=os.cpu_count())
    add("--rounds", type=int, default=3)
    add("--folder", help="for the files; a temporary one is made")
    add("--cold", action="store_true", help="read from the disk, not from the system's memory")
    add("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(json.loads(args.one))))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        model = args.model
        if not Path(model).exists():
            name, _, type_name = model.partition(":")
            model = f"{temporary}/model.gguf"
            write_model(Path(model), shape_of(name), type_name, has_words=True)
        print(f"{args.model}, {args.tokens:,} tokens, {args.threads} threads, {processor_name()}")
        for types in args.types:
            rounds = list[tuple[dict[str, Any], dict[str, Any], int]]()
            for number in range(args.rounds):
                folder = Path(temporary) / f"{types.replace('/', '-')}-{number}"
                settings = {
                    "model": model,
                    "types": types.split("/"),
                    "n_tokens": args.tokens,
                    "threads": args.threads,
                    "folder": str(folder),
                }
                evaluated = in_a_process(settings)
                if args.cold:
                    drop_from_memory(folder)
                n_bytes = sum(path.stat().st_size for path in folder.rglob("*-*") if path.is_file())
                read = in_a_process(settings)
                assert read["tokens"] == evaluated["tokens"], "another answer"
                assert evaluated["cached"] == 0
                rounds.append((evaluated, read, n_bytes))
            first = sorted(one["first"] for one, _, _ in rounds)[len(rounds) // 2]
            again = sorted(one["first"] for _, one, _ in rounds)[len(rounds) // 2]
            closing = sorted(one["closing"] for one, _, _ in rounds)[len(rounds) // 2]
            print(
                f"{types}: evaluated {first:.2f} s, read {again:.3f} s "
                f"({100 * again / first:.1f} %, {rounds[0][1]['cached']:,} tokens cached), "
                f"{rounds[0][2] / (1 << 20):.0f} MiB written in {closing:.2f} s at the end"
                + (", read from the disk" if args.cold else ""),
                flush=True,
            )


if __name__ == "__main__":
    main()
