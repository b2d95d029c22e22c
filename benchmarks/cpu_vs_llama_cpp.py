"""localkv and llama.cpp on the same CPU, the same random 1.1B Llama model, in turn.

    python benchmarks/cpu_vs_llama_cpp.py --peer PYTHON [--types q4_0 q8_0 q4_K]
        [--pairs f16 q8_0 q4_0/q8_0 q8_0/q4_0 q4_0] [--depths 0 4096] [--rounds 5] [--json FILE]
        [--tests load tg pp]

PYTHON is an interpreter that has llama-cpp-python; without `--peer` only localkv runs. For every
pair of cache types each program loads the model in a process of its own. All fill their caches
with a prompt of the depth's length, then they take turns, so that they meet the same noise: a round
is, for every process, a decode of `--decode` tokens (tg) and a prompt of 512 tokens (pp), both
behind what the cache holds. Beyond `--peer-depth` only localkv runs, whose pairs are compared with
its own f16. With `--tests load` the programs load the model and decode a token in turn, `--rounds`
times, after once that does not count: libraries and the file are in memory then.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SETTLE_SECONDS = 4
"""From imports to loading. A virtual machine gives memory that a program has freed back to its host
within seconds; who loads right after another program would get it sooner than who imports longer.
"""

LOAD_TESTS = ("load", "load and a token")

N_VOCAB, N_EMBD, N_LAYERS, N_HEADS, N_KV_HEADS, N_FF = 32000, 2048, 16, 32, 8, 8192
PROMPT = 512


def write_model(path: Path, name: str) -> None:
    """A Llama of 1.1 billion weights in one type, but for an output matrix as llama-quantize's."""
    import gguf
    import numpy as np

    from localkv.formats import FORMATS
    from localkv.loader.synthetic import random_rows

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(1 << 17)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYERS)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(N_EMBD // N_HEADS)
    writer.add_vocab_size(N_VOCAB)
    writer.add_tokenizer_model("no_vocab")

    def matrix(tensor: str, kind: str, n_out: int, n_in: int) -> None:
        rows = random_rows(FORMATS[kind], n_out, n_in).numpy()
        kinds = gguf.GGMLQuantizationType
        writer.add_tensor(f"{tensor}.weight", rows, raw_dtype=kinds[kind.upper()])

    def norm(tensor: str) -> None:
        writer.add_tensor(f"{tensor}.weight", np.ones(N_EMBD, np.float32))

    n_kv = N_EMBD // N_HEADS * N_KV_HEADS
    matrix("token_embd", name, N_VOCAB, N_EMBD)
    norm("output_norm")
    matrix("output", "q8_0" if name == "q8_0" else "q6_K", N_VOCAB, N_EMBD)
    for layer in range(N_LAYERS):
        at = f"blk.{layer}"
        norm(f"{at}.attn_norm")
        norm(f"{at}.ffn_norm")
        matrix(f"{at}.attn_q", name, N_EMBD, N_EMBD)
        matrix(f"{at}.attn_k", name, n_kv, N_EMBD)
        matrix(f"{at}.attn_v", name, n_kv, N_EMBD)
        matrix(f"{at}.attn_output", name, N_EMBD, N_EMBD)
        matrix(f"{at}.ffn_gate", name, N_FF, N_EMBD)
        matrix(f"{at}.ffn_up", name, N_FF, N_EMBD)
        matrix(f"{at}.ffn_down", name, N_EMBD, N_FF)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


Evaluate = Callable[[list[int], int], None]
"""Evaluate ids at a position; what the cache holds from there on is forgotten first."""


def load_localkv(path: str, pair: str, n_ctx: int, n_threads: int) -> Evaluate:
    from localkv.llm import LLM

    type_k, type_v = sides(pair)
    llm = LLM(path, n_ctx=n_ctx, cache_type_k=type_k, cache_type_v=type_v, n_threads=n_threads)
    engine = llm.engine

    def evaluate(ids: list[int], position: int) -> None:
        engine.truncate(position)
        engine.evaluate(ids, generated=len(ids) == 1)

    return evaluate


def load_llama_cpp(path: str, pair: str, n_ctx: int, n_threads: int) -> Evaluate:
    import llama_cpp

    @llama_cpp.llama_log_callback
    def silent(level, text, data):
        pass

    load_llama_cpp.keep = silent
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = n_ctx, PROMPT, PROMPT
    options.n_threads = options.n_threads_batch = n_threads
    kinds = {"f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
    options.type_k, options.type_v = (kinds[name] for name in sides(pair))
    context = llama_cpp.llama_init_from_model(model, options)
    memory = llama_cpp.llama_get_memory(context)
    batch = llama_cpp.llama_batch_init(PROMPT, 0, 1)

    def evaluate(ids: list[int], position: int) -> None:
        llama_cpp.llama_memory_seq_rm(memory, 0, position, -1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i == len(ids) - 1
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_get_logits_ith(context, len(ids) - 1)  # waits

    return evaluate


LOADERS = {"localkv": load_localkv, "llama.cpp": load_llama_cpp}
MODULES = {"localkv": "localkv.llm", "llama.cpp": "llama_cpp"}


def sides(pair: str) -> tuple[str, str]:
    """The types of K and V: "q4_0/q8_0", or "f16" for both."""
    type_k, _, type_v = pair.partition("/")
    return type_k, type_v or type_k


def ids_at(position: int, n: int) -> list[int]:
    return [((position + i) * 7919 + 13) % N_VOCAB for i in range(n)]


def work(program: str, path: str, pair: str, n_ctx: int, n_threads: int) -> None:
    """Answer commands with seconds; the first answer is for the imports.

    "load 1" loads the model. The other answers are seconds per token: "fill N" makes the depth N,
    "tg N" decodes N tokens there, "pp N" evaluates a prompt there.
    """
    started = time.perf_counter()
    __import__(MODULES[program])
    print(time.perf_counter() - started, flush=True)
    depth = 0
    for line in sys.stdin:
        command, count = line.split()
        n = int(count)
        started = time.perf_counter()
        if command == "load":
            evaluate = LOADERS[program](path, pair, n_ctx, n_threads)
        elif command == "fill":
            for start in range(depth, n, PROMPT):
                evaluate(ids_at(start, min(PROMPT, n - start)), start)
            depth, n = n, max(1, n - depth)
        elif command == "pp":
            evaluate(ids_at(depth, n), depth)
        else:
            for i in range(n):
                evaluate(ids_at(depth + i, 1), depth + i)
        print((time.perf_counter() - started) / n, flush=True)


class Program:
    """A process that has loaded the model with a pair of cache types."""

    def __init__(self, interpreter: str, name: str, pair: str, path: Path, n_ctx: int, n: int):
        worker = ["--worker", name, str(path), pair, str(n_ctx), "--threads", str(n)]
        # as the command line runs: idle threads sleep, or one process's slow down the other's
        env = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        self.process = subprocess.Popen(
            [interpreter, __file__, *worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.name, self.pair = name, pair
        self._answer()
        time.sleep(SETTLE_SECONDS)
        self.load_seconds = self.ask("load", 1)

    def _answer(self) -> float:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended without an answer")
        return float(line)

    def ask(self, command: str, n: int) -> float:
        self.process.stdin.write(f"{command} {n}\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def spread(values: list[float]) -> list[float]:
    return [min(values), statistics.median(values), max(values)]


def measure(programs: list[Program], depth: int, options: argparse.Namespace) -> list[dict]:
    """Tokens per second of every program at a depth, in turn."""
    for program in programs:
        print(f"fill {program.name} {program.pair} to {depth}", file=sys.stderr, flush=True)
        program.ask("fill", depth)
    counts = {"tg": options.decode, "pp": PROMPT}
    rows = []
    for test in (test for test in options.tests if test in counts):
        speeds: dict[tuple[str, str], list[float]] = {}
        for turn in range(-1, options.rounds):
            for program in programs:
                speed = 1 / program.ask(test, counts[test] if turn >= 0 or test == "pp" else 2)
                if turn >= 0:  # the first is for warming up
                    speeds.setdefault((program.name, program.pair), []).append(speed)
        for (name, pair), values in speeds.items():
            row = {"test": test, "depth": depth, "pair": pair, "program": name, "t/s": values}
            for title, other in (("llama.cpp", ("llama.cpp", pair)), ("f16", (name, "f16"))):
                if other in speeds and other != (name, pair):
                    ratios = [a / b for a, b in zip(values, speeds[other], strict=True)]
                    row[f"/ {title}"] = spread(ratios)
            rows.append(row)
    return rows


def measure_loads(
    interpreters: dict[str, str], path: Path, options: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """Seconds by test and program, in turn, after the imports.

    A program that only maps the file reads it with the first token, so that counts, too.
    """
    seconds = {test: {name: list[float]() for name in interpreters} for test in LOAD_TESTS}
    for turn in range(-1, options.rounds):
        for name, interpreter in interpreters.items():
            program = Program(interpreter, name, options.pairs[0], path, 1024, options.threads)
            first_token = program.ask("tg", 1)
            program.close()
            if turn >= 0:
                load = program.load_seconds
                for test, value in zip(LOAD_TESTS, (load, load + first_token), strict=True):
                    seconds[test][name].append(value)
    return seconds


def show_loads(weights: str, seconds: dict[str, dict[str, list[float]]]) -> list[dict]:
    rows = []
    for test, of_programs in seconds.items():
        for name, values in of_programs.items():
            row = {"test": test, "weights": weights, "program": name, "s": values}
            low, middle, high = spread(values)
            cells = f"| {test} | {weights} | | {name} | {middle:.2f} ({low:.2f}-{high:.2f}) s |"
            if name != "llama.cpp" and "llama.cpp" in of_programs:
                pairs = zip(values, of_programs["llama.cpp"], strict=True)
                low, middle, high = row["/ llama.cpp"] = spread([a / b for a, b in pairs])
                cells += f" {middle:.2f} ({low:.2f}-{high:.2f})"
            print(f"{cells} | |", flush=True)
            rows.append(row)
    return rows


def show(weights: str, rows: list[dict]) -> None:
    for row in rows:
        cells = [f"{row['test']} @ {row['depth']}", weights, row["pair"], row["program"]]
        cells.append(f"{statistics.median(row['t/s']):.2f}")
        for title in ("/ llama.cpp", "/ f16"):
            low, middle, high = row.get(title, [0.0] * 3)
            cells.append(f"{middle:.2f} ({low:.2f}-{high:.2f})" if middle else "")
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--peer", help="interpreter with llama-cpp-python")
    add("--types", nargs="+", default=["q4_0", "q8_0", "q4_K"], help="of the weights")
    add("--pairs", nargs="+", default=["f16", "q8_0", "q4_0/q8_0", "q8_0/q4_0", "q4_0"])
    add("--depths", nargs="+", type=int, default=[0, 4096])
    add("--tests", nargs="+", choices=["load", "tg", "pp"], default=["tg", "pp"])
    add("--rounds", type=int, default=5)
    add("--decode", type=int, default=16, help="tokens of a decode")
    add("--peer-depth", type=int, default=4096, help="how deep llama.cpp takes part")
    add("--threads", type=int, default=2)
    add("--json", type=Path, help="write all figures to this file")
    add("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        program, path, pair, n_ctx = options.worker
        work(program, path, pair, int(n_ctx), options.threads)
        return
    depths = sorted(options.depths)
    interpreters = {"localkv": sys.executable}
    if options.peer:
        interpreters["llama.cpp"] = options.peer
    print(f"{platform.machine()}, {options.threads} threads; medians (min-max of ratios)\n")
    print("| test | weights | cache | program | t/s | / llama.cpp | / f16 |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for weights in options.types:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_model(path, weights)
            if "load" in options.tests:
                results += show_loads(weights, measure_loads(interpreters, path, options))
            if options.tests == ["load"]:
                continue
            programs = [
                Program(interpreter, name, pair, path, depths[-1] + 2 * PROMPT, options.threads)
                for pair in options.pairs
                for name, interpreter in interpreters.items()
            ]
            loads = [(program.name, program.load_seconds) for program in programs]
            for depth in depths:
                if depth > options.peer_depth:
                    for program in programs:
                        if program.name == "llama.cpp":
                            program.close()
                    programs = [program for program in programs if program.name == "localkv"]
                rows = measure(programs, depth, options)
                show(weights, rows)
                results += [{"weights": weights, **row} for row in rows]
            for program in programs:
                program.close()
            for name in interpreters:
                seconds = spread([load for title, load in loads if title == name])
                results.append({"weights": weights, "program": name, "load": seconds})
                low, middle, high = seconds
                text = f"{middle:.2f} ({low:.2f}-{high:.2f}) s"
                print(f"| load | {weights} | | {name} | {text} | | |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
