"""A program: loads a model and prints by how much a prompt makes the process grow, in bytes.

    python prefill_memory.py MODEL DEVICE N_CTX N_BATCH TYPE_K TYPE_V

Everything that is not scratch is touched before: weights, the whole cache, compiled code.
"""

from __future__ import annotations

import ctypes
import json
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

from localkv import LLM
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.generation import GenerationOptions
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, value = line.split(":", 1)
        if name == field:
            return 1024 * int(value.split()[0])
    raise ValueError(field)


def main() -> None:
    path, device, n_ctx, n_batch, type_k, type_v = sys.argv[1:]
    llm = LLM(
        path,
        device=device,
        n_ctx=int(n_ctx),
        n_batch=int(n_batch),
        cache_type_k=type_k,
        cache_type_v=type_v,
    )
    engine, n_vocab = llm.engine, llm.config.n_vocab
    for layer in engine.cache.layers:
        for segment in layer.segments:
            for plane in (*segment.k, *segment.v):
                plane[:] = 0
    for tensor in llm.gguf.tensors:
        llm.gguf.data(tensor).max()
    ids = np.random.default_rng(0).integers(0, n_vocab, int(n_ctx) - 2).tolist()

    def run(ids: list[int]) -> None:
        engine.reset()
        sampler = Sampler(SamplingParams(seed=1), n_vocab=n_vocab, n_ctx=int(n_ctx))
        list(BatchEngine(engine).generate(ids, GenerationOptions(sampler=sampler, max_tokens=2)))

    run(ids[:48])  # libraries' own buffers; few tokens, so that little scratch is taken
    with suppress(AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before would serve for some of the growth
    Path("/proc/self/clear_refs").write_text("5")  # the peak is forgotten
    before = status("VmRSS")
    run(ids)
    print(json.dumps({"growth": status("VmHWM") - before, **asdict(llm.memory)}))


main()
