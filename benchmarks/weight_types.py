"""What types of weights cost: bytes, seconds, divergence, by how they are rounded.

Values are rounded without an importance matrix, with it, and with it and error feedback.

    python benchmarks/weight_types.py SMOLLM2.gguf GEMMA3.gguf [--llama-quantize PROGRAM]

Each model is written in F16 first, rounded or not. The importance matrix is measured on the
calibration text that ships, and divergence from the F16 file on tests/data/handbook.txt. Everything
runs as commands of their own, after one run that compiles kernels. With llama-quantize the bytes
of its files are compared, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from localkv.loader.gguf_copy import read_keys
from localkv.loader.gguf_file import open_gguf
from localkv.quality.scores import calibration_text

TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q4_0", "Q3_K_M", "IQ3_S")
UNFED = ("Q8_0", "Q6_K")
"""Errors are not fed back in types of more than five bits."""
HANDBOOK = Path(__file__).parents[1] / "tests" / "data" / "handbook.txt"


def localkv(*words: object) -> str:
    command = [sys.executable, "-m", "localkv", *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def equal(ours: Path, theirs: Path) -> bool:
    """Whether two files have the same tensors and keys."""
    a, b = open_gguf(ours), open_gguf(theirs)
    if list(a.tensors) != list(b.tensors) or read_keys(ours) != read_keys(theirs):
        return False
    return all((a.data(name) == b.data(name)).all() for name in a.tensors)


def costs(model: Path, base: Path, chunks: int) -> dict[str, Any]:
    """The entry of `localkv perplexity --json`."""
    words = ("-m", model, "-f", HANDBOOK, "--chunks", chunks, "--base", base, "--json")
    found: dict[str, Any] = json.loads(localkv("perplexity", *words))["results"][0]
    return found


def rows(
    model: Path,
    types: list[str],
    chunks: int,
    program: str | None,
    calibration: Path | None,
    folder: Path,
) -> None:
    f16, base, out = folder / "f16.gguf", folder / "base", folder / "out.gguf"
    localkv("quantize", "--allow-requantize", model, f16, "F16")
    (folder / "text.txt").write_text(calibration_text())
    localkv("imatrix", "-m", f16, "-f", folder / "text.txt", "-o", folder / "i.gguf", "--no-ppl")
    words = ("-m", f16, "-f", HANDBOOK, "--chunks", chunks, "--save-base", base)
    print(
        f"| {model.name}, F16 | {f16.stat().st_size / 2**20:.1f} | | "
        f"{localkv('perplexity', *words).split()[-3]} | | | |",
        flush=True,
    )
    for name in types:
        cells = [name]
        weighted = ("--imatrix", folder / "i.gguf")
        fed = (*weighted, "--method", "gptq")
        if calibration is not None:
            fed += ("--calibration", calibration)
        for importance in ((), weighted, fed):
            if "--method" in importance and name in UNFED:
                cells.append("")
                continue
            if not importance:
                localkv("quantize", f16, out, name)  # compiles
            started = time.perf_counter()
            localkv("quantize", *importance, f16, out, name)
            seconds = time.perf_counter() - started
            if not importance:
                cells += [f"{out.stat().st_size / 2**20:.1f}", f"{seconds:.1f}"]
            found = costs(out, base, chunks)
            kld, ppl = found["divergence"]["kld"], found["ppl"]["value"]
            cells.append(f"{kld['value']:.4f} ± {kld['error']:.4f}, {ppl:.2f}")
            if program is not None and "--method" not in importance:
                theirs = folder / "theirs.gguf"
                command = [program, *map(str, importance), str(f16), str(theirs), name, "2"]
                subprocess.run(command, check=True, capture_output=True)
                same = equal(out, theirs)
                cells[-1] += " =" if same else " differs"
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--llama-quantize")
    parser.add_argument("--calibration", type=Path, help="the text for error feedback")
    given = parser.parse_args()
    print("| | MiB | seconds | KLD and PPL | with importance | and gptq |")
    print("|---|---|---|---|---|---|")
    for model in given.models:
        with tempfile.TemporaryDirectory() as folder:
            types = given.types.split(",")
            rows(model, types, given.chunks, given.llama_quantize, given.calibration, Path(folder))


if __name__ == "__main__":
    main()
