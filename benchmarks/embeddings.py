"""Embeddings on a CPU: texts of 128 tokens by an encoder of BERT base's shape, beside llama.cpp.

    python benchmarks/embeddings.py --peer LLAMA_EMBEDDING --json FILE

The model has random weights, in F16 and in Q8_0. PROGRAM is llama.cpp's `llama-embedding`, which
is run with batches of 512 tokens and of 2048; tables have the better one. Both programs read the
same texts from a file, on one thread. Figures are seconds of the processor for all texts but one:
the difference of two runs of the whole program. So neither starting nor loading counts, and others
who use the machine count less. Programs take turns; a figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType

TYPES = {"f16": GGMLType.F16, "q8_0": GGMLType.Q8_0}
N_EMBD, N_HEADS, N_FF, N_LAYERS, N_POSITIONS = 768, 12, 3072, 12, 512
CONTROL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = tuple(chr(ord("a") + i) for i in range(26))
PEER_BATCHES = (512, 2048)


def write_model(path: Path, kind: GGMLType) -> None:
    """Random weights, whose norms keep numbers small."""
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "bert")
    writer.add_block_count(N_LAYERS)
    writer.add_context_length(N_POSITIONS)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEADS)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_tokenizer_model("bert")
    writer.add_token_list([*CONTROL, *(f"▁{word}" for word in WORDS)])
    writer.add_token_types([gguf.TokenType.CONTROL] * len(CONTROL) + [1] * len(WORDS))
    writer.add_token_type_count(2)
    for name, token in zip(("padding", "unknown", "bos", "seperator"), (0, 1, 2, 3), strict=True):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.add_uint32("tokenizer.ggml.mask_token_id", 4)

    def add(name: str, *shape: int, is_float: bool = False) -> None:
        values = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
        if len(shape) == 1 or is_float:
            writer.add_tensor(name, values + np.float32("norm.weight" in name))
            return
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(CONTROL) + len(WORDS), N_EMBD)
    add("position_embd.weight", N_POSITIONS, N_EMBD, is_float=True)
    add("token_types.weight", 2, N_EMBD, is_float=True)
    norms = ["token_embd_norm"]
    for i in range(N_LAYERS):
        at = f"blk.{i}."
        norms += [f"{at}attn_output_norm", f"{at}layer_output_norm"]
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{at}{name}.weight", N_EMBD, N_EMBD)
            add(f"{at}{name}.bias", N_EMBD)
        add(f"{at}ffn_up.weight", N_FF, N_EMBD)
        add(f"{at}ffn_up.bias", N_FF)
        add(f"{at}ffn_down.weight", N_EMBD, N_FF)
        add(f"{at}ffn_down.bias", N_EMBD)
    for name in norms:
        add(f"{name}.weight", N_EMBD)
        add(f"{name}.bias", N_EMBD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def cpu_seconds(command: Sequence[str]) -> float:
    """Seconds of a program that runs to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def commands(peer: str | None, model: Path) -> dict[str, list[str]]:
    """The programs, but for their texts."""
    ours = [sys.executable, "-m", "localkv", "embed", "-m", str(model), "-t", "1", "-q"]
    found = {"localkv": [*ours, "--embd-output-format", "array"]}
    for n in PEER_BATCHES if peer else ():
        sizes = ["-c", str(n), "-b", str(n), "-ub", str(n), "-t", "1"]
        found[f"llama.cpp, {n}"] = [
            *(str(peer), "-m", str(model), "--pooling", "mean", "--embd-output-format", "array"),
            *sizes,
        ]
    return found


def measured(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, by type and program."""
    rng, n_words = random.Random(0), args.tokens - 2
    lines = [" ".join(rng.choices(WORDS, k=n_words)) for _ in range(args.texts + 1)]
    many, one = folder / "many.txt", folder / "one.txt"
    many.write_text("\n".join(lines) + "\n")
    one.write_text(lines[0] + "\n")
    found: dict[str, dict[str, list[float]]] = {}
    for name in args.types:
        model = folder / f"{name}.gguf"
        write_model(model, TYPES[name])
        programs = commands(args.peer, model)
        rounds: dict[str, list[float]] = {program: [] for program in programs}
        for _ in range(args.rounds):
            for program, command in programs.items():
                took = [cpu_seconds([*command, "-f", str(file)]) for file in (one, many)]
                rounds[program].append(took[1] - took[0])
        found[name] = rounds
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peer", metavar="PROGRAM", help="llama.cpp's llama-embedding")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128, help="of a text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=[*TYPES])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        found = measured(args, Path(folder))
    n = args.texts * args.tokens
    print("| weights | localkv | llama.cpp | faster |\n|---|---:|---:|---:|")
    for name, rounds in found.items():
        speeds = {program: n / statistics.median(took) for program, took in rounds.items()}
        ours = speeds.pop("localkv")
        best = max(speeds.values(), default=float("nan"))
        print(f"| {name} | {ours:.0f} | {best:.0f} | {ours / best:.2f} |")
    if args.json is not None:
        args.json.write_text(json.dumps({"tokens": n, "seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
