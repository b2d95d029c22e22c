"""localkv and llama.cpp on the same CPU, the same random 1.1B Llama model, in turn.

    python benchmarks/cpu_vs_llama_cpp.py --peer PYTHON [--types q4_0 q8_0 q4_K] [--rounds 5]

PYTHON is an interpreter that has llama-cpp-python. Each program loads the model in a process of its
own, and they take turns, so that both meet the same noise: a round is a decode of `--decode` tokens
from an empty cache (tg) and a prompt of 512 tokens (pp). Without `--peer` only localkv runs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

N_VOCAB, N_EMBD, N_LAYERS, N_HEADS, N_KV_HEADS, N_FF = 32000, 2048, 16, 32, 8, 8192
PROMPT = 512


def random_rows(name: str, n_out: int, n_in: int):
    """Rows of random codes whose values have a variance of about 1 / n_in: uint8 [n_out, bytes]."""
    import numpy as np

    from localkv.quant_formats import FORMATS

    # d times this is the standard deviation of a random code, q4_K's with dmin = 7.5 d
    spread = {"q4_0": 4.6, "q8_0": 74, "q4_K": 210, "q6_K": 1370, "q5_0": 9.2, "q5_K": 420}[name]
    fmt = FORMATS[name]
    blocks = n_in // fmt.block_size
    rng = np.random.default_rng(n_out)
    some = min(n_out, 1024)  # enough of them to be random
    data = np.frombuffer(rng.bytes(some * blocks * fmt.block_bytes), np.uint8).copy()
    fields = data.reshape(some, blocks, fmt.block_bytes)
    start = 0
    for plane in fmt.planes:
        if plane.name in ("d", "dmin"):
            value = (7.5 if plane.name == "dmin" else 1.0) / (spread * n_in**0.5)
            fields[..., start : start + 2] = np.array([value], np.float16).view(np.uint8)
        start += plane.n_bytes
    return np.resize(data.reshape(some, -1), (n_out, blocks * fmt.block_bytes))


def write_model(path: Path, name: str) -> None:
    """A Llama of 1.1 billion weights in one type, but for an output matrix as llama-quantize's."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
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
        rows = random_rows(kind, n_out, n_in)
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
"""Evaluate ids at a position; position 0 starts anew."""


def load_localkv(path: str, n_threads: int) -> Evaluate:
    from localkv.llm import LLM

    engine = LLM(path, n_ctx=1024, n_threads=n_threads).engine

    def evaluate(ids: list[int], position: int) -> None:
        if position == 0:
            engine.reset()
        engine._evaluate(ids)

    return evaluate


def load_llama_cpp(path: str, n_threads: int) -> Evaluate:
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
    options.n_ctx, options.n_batch, options.n_ubatch = 1024, PROMPT, PROMPT
    options.n_threads = options.n_threads_batch = n_threads
    context = llama_cpp.llama_init_from_model(model, options)
    memory = llama_cpp.llama_get_memory(context)
    batch = llama_cpp.llama_batch_init(PROMPT, 0, 1)

    def evaluate(ids: list[int], position: int) -> None:
        if position == 0:
            llama_cpp.llama_memory_clear(memory, True)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i == len(ids) - 1
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_get_logits_ith(context, len(ids) - 1)  # waits

    return evaluate


def work(program: str, path: str, n_threads: int) -> None:
    """Answer "pp" and "tg N" lines with seconds per token; the first line says the load time."""
    imports = {"localkv": "localkv.llm", "llama_cpp": "llama_cpp"}
    __import__(imports[program])
    started = time.perf_counter()
    load = {"localkv": load_localkv, "llama_cpp": load_llama_cpp}[program]
    evaluate = load(path, n_threads)
    print(time.perf_counter() - started, flush=True)
    for line in sys.stdin:
        command, *rest = line.split()
        started = time.perf_counter()
        if command == "pp":
            n = PROMPT
            evaluate([(i * 7919 + 13) % N_VOCAB for i in range(n)], 0)
        else:
            n = int(rest[0])
            for i in range(n):
                evaluate([(i * 7919 + 13) % N_VOCAB], i)
        print((time.perf_counter() - started) / n, flush=True)


class Program:
    """A process that has loaded the model."""

    def __init__(self, interpreter: str, name: str, path: Path, n_threads: int) -> None:
        command = [interpreter, __file__, "--worker", name, str(path), "--threads", str(n_threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.load_seconds = self._answer()

    def _answer(self) -> float:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a program ended without an answer")
        return float(line)

    def ask(self, command: str) -> float:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def summary(values: list[float]) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{low:8.2f} {middle:8.2f} {high:8.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="interpreter with llama-cpp-python")
    parser.add_argument("--types", nargs="+", default=["q4_0", "q8_0", "q4_K"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode", type=int, default=32, help="tokens of a decode")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker, options.threads)
        return
    print("tokens/s:                      min   median      max")
    for name in options.types:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_model(path, name)
            programs = {"localkv": Program(sys.executable, "localkv", path, options.threads)}
            if options.peer:
                programs["llama_cpp"] = Program(options.peer, "llama_cpp", path, options.threads)
            commands = {"tg": f"tg {options.decode}", "pp": "pp"}
            speeds: dict[tuple[str, str], list[float]] = {}
            for program in programs.values():
                for command in commands.values():
                    program.ask(command)  # warm up
            for _ in range(options.rounds):
                for what, command in commands.items():
                    for title, program in programs.items():
                        speed = 1 / program.ask(command)
                        speeds.setdefault((what, title), []).append(speed)
            for title, program in programs.items():
                print(f"{name:6} {title:10} load {program.load_seconds:.2f} s")
                program.close()
            for what in commands:
                for title in programs:
                    print(f"{name:6} {what} {title:10}      {summary(speeds[what, title])}")
                if options.peer:
                    pairs = zip(speeds[what, "localkv"], speeds[what, "llama_cpp"], strict=True)
                    print(f"{name:6} {what} {'ratio':10}      {summary([a / b for a, b in pairs])}")


if __name__ == "__main__":
    main()
