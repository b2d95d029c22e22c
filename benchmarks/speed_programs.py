"""The programs that `cpu_vs_llama_cpp.py` times: each loads a model in a process of its own.

A process answers commands, a line each; what makes the first tokens after loading slow has been
done before any is timed, except that `first` is what it is:

    load          load the model: seconds, and threads
    fill N        make the depth N with a prompt: seconds per token
    repeat N      make the depth N of copies of the rows that are there: nothing. Speed does not
                  depend on what is in the rows, and a long prompt takes the peer an hour
    tg N          decode N tokens from there on: seconds per token
    first         decode a token without one that goes before it
    pp N          evaluate a prompt of N tokens from there on: seconds per token
    fresh N       the same with an empty cache
    bytes N       of a token at the depth N that are read at least (localkv only)
    bandwidth     of the memory: bytes per second that all threads read (localkv only)
    begin N D K   evaluate N prompts of D tokens each, with room for K more: seconds per token
    many K        decode K tokens of each of these, all at the same time: seconds per step
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
import subprocess
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from alone import answer, commands
from speed_report import REPACKS, SECOND_PEER

PROMPT = 512
"""Tokens of the prompt, and of a batch."""


def sides(pair: str) -> tuple[str, str]:
    """The types of K and V: "q4_0/q8_0", or "f16" for both."""
    type_k, _, type_v = pair.partition("/")
    return type_k, type_v or type_k


class Session(ABC):
    """A loaded model and its cache.

    Args:
        path, pair, n_ctx: the file, the cache's types and tokens.
        n_threads: 0 for the program's own number.
    """

    n_threads: int

    @abstractmethod
    def __init__(self, path: str, pair: str, n_ctx: int, n_threads: int) -> None: ...

    @abstractmethod
    def evaluate(self, ids: list[int], position: int) -> None:
        """Evaluate ids at a position: the end of what the cache holds, or 0 to start again."""

    @abstractmethod
    def begin(self, n: int, depth: int, n_more: int) -> None:
        """Evaluate `n` prompts of `depth` tokens in a new cache, with room for `n_more`."""

    @abstractmethod
    def step(self) -> None:
        """Decode a token of each of them."""

    @abstractmethod
    def settle(self) -> None:
        """Do what the first tokens after loading are slower for."""

    @abstractmethod
    def repeat(self, length: int) -> None:
        """Fill the cache up to `length` with copies of its first rows."""


class LocalKV(Session):
    """With the defaults of `localkv complete`, loaded as that loads it."""

    def __init__(self, path: str, pair: str, n_ctx: int, n_threads: int) -> None:
        from localkv.commands.complete import complete
        from localkv.commands.model import load_llm
        from localkv.system.threads import n_threads as threads

        type_k, type_v = sides(pair)
        flags = ["-m", path, "-c", str(n_ctx), "-ctk", type_k, "-ctv", type_v, "-p", ""]
        flags += ["-t", str(n_threads)] if n_threads else []
        with complete.make_context("complete", flags) as context:
            llm = load_llm(context.params, quiet=True)
        self.engine, self.cache = llm.engine, llm.cache
        self.n_threads = threads()

    def begin(self, n: int, depth: int, n_more: int) -> None:
        from localkv.engine.batch_engine import BatchEngine
        from localkv.engine.engine import Engine
        from localkv.engine.generation import GenerationOptions
        from localkv.sampling.params import SamplingParams
        from localkv.sampling.sampler import Sampler

        n_ctx, n_vocab = depth + n_more + 1, self.engine.model.config.n_vocab
        cache = replace(self.cache, n_ctx=n_ctx, n_sequences=n)
        self.batch = BatchEngine(Engine(self.engine.model, cache, n_batch=PROMPT), step_ms=1e9)
        greedy = SamplingParams(temperature=0.0)
        self.sequences = [
            self.batch.generate(ids, GenerationOptions(sampler=Sampler(greedy, n_vocab=n_vocab)))
            for ids in prompts(n, depth, n_vocab)
        ]
        while not all(one.n_ready for one in self.sequences):
            self.step()

    def step(self) -> None:
        self.batch.step()
        for one in self.sequences:
            for _ in range(one.n_ready - 1):
                next(one)

    def evaluate(self, ids: list[int], position: int) -> None:
        if position == 0:
            self.engine.reset()
        self.engine.evaluate(ids, generated=len(ids) == 1)

    def repeat(self, length: int) -> None:
        from localkv.cache.layout import PAGE_TOKENS

        cache, sequence, slot = self.engine.cache, self.engine.sequence, self.engine.slot
        whole = sequence.length // PAGE_TOKENS
        if cache.states or any(layout.reach for layout in cache.layouts) or not whole:
            raise SystemExit("only rows of models without windows and states can be repeated")
        slot.ids += [0] * (length - sequence.length)
        while sequence.length < length:  # a tail's pages go on with it
            step = min(length, sequence.length + self.engine.n_batch)
            cache.reserve(sequence, step)
            sequence.length = step
        for layer in cache.layers:
            for rows, segment in zip(cache.parts[layer.part :], layer.segments, strict=False):
                pages = sequence.held(rows.pool)
                for plane in (*segment.k, *segment.v):
                    for i, page in enumerate(pages[whole:]):
                        plane[page] = plane[pages[i % whole]]

    def settle(self) -> None:
        from localkv.kernels.cpu.linear.arena import JOINER

        if self.engine.model.backend.late is not None:
            self.engine.model.backend.late.finish()
        JOINER.finish()

    def bytes_per_token(self, depth: int) -> float:
        from localkv.bench.grid import BenchTest
        from localkv.bench.run import bytes_per_token

        test = BenchTest(n_prompt=0, n_gen=1, n_depth=depth)
        return bytes_per_token(self.engine.model, self.engine.cache.layouts, test, PROMPT)

    def bandwidth(self) -> float:
        from localkv.bench.result import bandwidth

        return bandwidth(self.engine.model.backend)


def physical_cores() -> int:
    """The number of physical cores, as llama.cpp counts them (`cpu_get_num_physical_cores`)."""
    siblings = set()
    for cpu in Path("/sys/devices/system/cpu").glob("cpu[0-9]*"):
        with contextlib.suppress(OSError):
            siblings.add((cpu / "topology" / "thread_siblings").read_text())
    n = os.cpu_count() or 1
    return len(siblings) or (n if n <= 4 else n // 2)


class LlamaCpp(Session):
    """With the defaults of llama-cli, which the library's Python package does not have."""

    def __init__(self, path: str, pair: str, n_ctx: int, n_threads: int) -> None:
        import llama_cpp

        @llama_cpp.llama_log_callback
        def silent(level, text, data):
            pass

        self.api, self.silent = llama_cpp, silent
        llama_cpp.llama_log_set(silent, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not model:
            raise SystemExit(f"llama.cpp can't load {path}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = n_ctx, 2048, PROMPT
        self.n_threads = n_threads or physical_cores()
        self.model, self.options = model, options
        options.n_threads = options.n_threads_batch = self.n_threads
        options.swa_full = False  # as the programs have it; the library's default is another
        options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO
        kinds = {"f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
        options.type_k, options.type_v = (kinds[name] for name in sides(pair))
        self.context = llama_cpp.llama_init_from_model(model, options)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(PROMPT, 0, 1)

    def evaluate(self, ids: list[int], position: int) -> None:
        if position == 0:
            self.api.llama_memory_clear(self.memory, True)
        batch = self.batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i == len(ids) - 1
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        self.api.llama_get_logits_ith(self.context, len(ids) - 1)  # waits

    def begin(self, n: int, depth: int, n_more: int) -> None:
        options = self.options
        options.n_ctx, options.n_seq_max = n * -(-(depth + n_more + 1) // 256) * 256, n
        self.context = self.api.llama_init_from_model(self.model, options)
        self.memory = self.api.llama_get_memory(self.context)
        self.n, self.at = n, depth
        n_vocab = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        for sequence, ids in enumerate(prompts(n, depth, n_vocab)):
            for start in range(0, depth, PROMPT):
                part = ids[start : start + PROMPT]
                self._decode([(token, start + i, sequence) for i, token in enumerate(part)])

    def step(self) -> None:
        self._decode([(13 + i, self.at, i) for i in range(self.n)], wanted=True)
        for i in range(self.n):
            self.api.llama_get_logits_ith(self.context, i)
        self.at += 1

    def _decode(self, tokens: list[tuple[int, int, int]], *, wanted: bool = False) -> None:
        """Tokens with their positions and sequences."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")

    def settle(self) -> None:
        """Nothing is laid out after loading."""

    def repeat(self, length: int) -> None:
        size = self.api.llama_state_seq_get_size(self.context, 0)
        state = (ctypes.c_uint8 * size)()
        if self.api.llama_state_seq_get_data(self.context, state, size, 0) != size:
            raise RuntimeError("llama_state_seq_get_data failed")
        longer = repeated_state(bytes(state), length)
        state = (ctypes.c_uint8 * len(longer)).from_buffer_copy(longer)
        if self.api.llama_state_seq_set_data(self.context, state, len(longer), 0) != len(longer):
            raise RuntimeError("llama_state_seq_set_data failed")


def prompts(n: int, length: int, n_vocab: int) -> list[list[int]]:
    """Prompts of `n` sequences, none of which begins like another."""
    return [[(i * 7919 + 101 * k + 13) % n_vocab for i in range(length)] for k in range(n)]


CELL = struct.Struct("<iIi")
"""A cell's position, number of sequences, and the one."""


def repeated_state(state: bytes, length: int) -> bytes:
    """The state of a sequence of llama.cpp whose cells are repeated up to `length`.

    `llama_context::state_seq_get_data` and `llama_kv_cache::state_write` write such states: a mark
    and the sequence, one stream, its cells. Then come whether V is transposed, the layers, and for
    each layer K's type, bytes of a row and rows; then V's.
    """
    n_streams, n_cells = struct.unpack_from("<II", state, 8)
    end = 16 + CELL.size * n_cells
    positions = [cell[0] for cell in CELL.iter_unpack(state[16:end])]
    is_transposed, n_layers = struct.unpack_from("<II", state, end)
    if n_streams != 1 or positions != [*range(n_cells)] or is_transposed:
        raise RuntimeError("llama.cpp's state has an unknown form")
    out = [state[:8], struct.pack("<II", 1, length)]
    out += [CELL.pack(i, 1, 0) for i in range(length)]
    out.append(state[end : end + 8])
    at = end + 8
    for _ in range(2 * n_layers):
        kind = state[at : at + 12]
        row_bytes = int.from_bytes(kind[4:], "little")
        rows = state[at + 12 : at + 12 + n_cells * row_bytes]
        at += 12 + len(rows)
        out += [kind, (rows * -(-length // n_cells))[: length * row_bytes]]
    if at != len(state):
        raise RuntimeError("llama.cpp's state has an unknown form")
    return b"".join(out)


SESSIONS: dict[str, type[Session]] = {"localkv": LocalKV, "llama.cpp": LlamaCpp}
MODULES = {
    "localkv": (
        "localkv.llm",
        "localkv.commands.complete",
        "localkv.commands.model",
        "localkv.kernels.cpu.cpu_backend",
    ),
    "llama.cpp": ("llama_cpp",),
}
"""What a program imports before it loads; the first one's package has the version."""


BENCHES: dict[str, tuple[str, ...]] = {SECOND_PEER: (), REPACKS: ("-rtr", "1")}
"""llama-bench runs these programs; its options for each."""


class LlamaBench:
    """llama-bench of ik_llama.cpp with its own defaults: each command is a process of its own.

    It has no state, so it evaluates a prompt again for each measurement at a depth.

    Raises:
        SystemExit: it can't run the model.
    """

    def __init__(self, bench: str, program: str, path: str, pair: str, n_threads: int) -> None:
        type_k, type_v = sides(pair)
        self.command = [bench, *BENCHES[program], "-m", path, "-ctk", type_k, "-ctv", type_v]
        self.command += ["-t", str(n_threads)] if n_threads else []
        self.depth = 0
        facts = self.run("-p", "0", "-n", "1")
        if (facts["type_k"], facts["type_v"]) != (type_k, type_v):  # it takes f16 for others
            raise SystemExit(f"{bench}: no {pair} cache")
        self.version, self.n_threads = facts["build_commit"], facts["n_threads"]

    def run(self, *options: str) -> dict[str, Any]:
        """The facts of one test, of one repetition."""
        command = [*self.command, *options, "-r", "1", "-o", "json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            (facts,) = json.loads(done.stdout)
        except ValueError:
            raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()[-200:]}") from None
        return cast(dict[str, Any], facts)

    def seconds(self, command: str, n: int) -> float | None:
        """Per token; None for what llama-bench doesn't measure: prompts at a depth."""
        if command == "tg":
            test = ("-gp", f"{self.depth},{n}") if self.depth else ("-n", str(n))
            return 1 / float(self.run("-p", "0", "-n", "0", *test)["avg_ts"])
        if command == "fresh":
            return 1 / float(self.run("-p", str(n), "-n", "0")["avg_ts"])
        return None


def work_by_bench(bench: str, program: str, path: str, pair: str, n_threads: int) -> None:
    """Answer commands with llama-bench, as `work` does with a session."""
    runs = LlamaBench(bench, program, path, pair, n_threads)
    answer(runs.version)
    for line in commands():
        command, _, count = line.partition(" ")
        n = int(count) if count else 1
        if command == "load":
            answer([0.0, runs.n_threads])
        elif command in ("fill", "repeat"):
            runs.depth = n
            answer(0.0)
        else:
            answer(runs.seconds(command, n))


def work(program: str, path: str, pair: str, n_ctx: int, n_vocab: int, n_threads: int) -> None:
    """Answer commands; the first answer is the program's version."""
    if program == "localkv":
        from localkv.system.limits import before_model

        before_model()
    package, *_ = [__import__(name) for name in MODULES[program]]
    answer(package.__version__)
    at = 0

    def go_on(n: int) -> None:
        nonlocal at
        session.evaluate([((at + i) * 7919 + 13) % n_vocab for i in range(n)], at)
        at += n

    for line in commands():
        command, _, count = line.partition(" ")
        n = int(count.split()[0]) if count else 1
        if command == "load":
            started = time.perf_counter()
            session = SESSIONS[program](path, pair, n_ctx, n_threads)
            answer([time.perf_counter() - started, session.n_threads])
            continue
        if command == "begin":
            _, depth, n_more = map(int, count.split())
            session.settle()
            started = time.perf_counter()
            session.begin(n, depth, n_more)
            answer((time.perf_counter() - started) / (n * depth))
            continue
        if command == "bytes":
            answer(session.bytes_per_token(n))
            continue
        if command == "bandwidth":
            answer(session.bandwidth())
            continue
        if command != "first":
            session.settle()
        if command in ("tg", "pp", "fresh"):
            go_on(1)  # caches are cold, threads asleep
        elif command == "many":
            session.step()
        started = time.perf_counter()
        if command == "fill":
            n -= at
            for start in range(0, n, PROMPT):
                go_on(min(PROMPT, n - start))
        elif command == "repeat":
            session.repeat(n)
            at = n
        elif command == "many":
            for _ in range(n):
                session.step()
        elif command == "pp":
            go_on(n)
        elif command == "fresh":
            at = 0
            go_on(n)
        else:  # "tg", and "first", which nothing goes before
            for _ in range(n):
                go_on(1)
        answer((time.perf_counter() - started) / max(1, n))
