"""Damaged model files, all the way: using one gives an answer or one clear error."""

from __future__ import annotations

import os
import random
import resource
import struct
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from localkv.errors import LocalKVError
from localkv.llm import LLM
from localkv.loader.gguf_file import open_gguf
from support.paths import ROOT, TESTS
from support.quick import quick
from support.random_model import MOE, YARN, RandomModel
from support.tiny_model import write_tiny_model

NUMBERS = [0, 1, 2, 3, 7, 31, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, -1]
FLOATS = [0.0, -1.0, 1e-45, 1e38, float("inf"), float("nan")]


def damaged(data: bytes, n_header: int, rng: random.Random) -> bytes:
    """A copy with one to three changes, nearly all of them in the header."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        end = n_header if rng.random() < 0.95 else len(out)
        at = rng.randrange(max(1, min(end, len(out)) - 8))
        kind = rng.randrange(7)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.randrange(256)
        elif kind == 2:
            size = rng.choice((4, 8))
            value = rng.choice(NUMBERS) % (1 << (8 * size))
            out[at : at + size] = value.to_bytes(size, "little")
        elif kind == 3:
            out[at : at + 4] = struct.pack("<f", rng.choice(FLOATS))
        elif kind == 4:
            del out[at : at + rng.randrange(1, 9)]
        elif kind == 5:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
        else:
            other = rng.randrange(max(1, n_header - 16))
            out[at : at + 16] = out[other : other + 16]
    if rng.random() < 0.03:
        del out[rng.randrange(len(out)) :]
    return bytes(out)


def base_file(kind: str, path: Path) -> Path:
    """A text model with a tokenizer and a template, or one with all that RoPE and MoE can have."""
    if kind == "text":
        return write_tiny_model(path)
    settings = {
        **YARN,
        **MOE,
        "rope.scaling.yarn_log_multiplier": 1.0,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "rope.scaling.attn_factor": 1.0,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": 32,
        "attention.temperature_scale": 0.1,
    }
    sizes = {"n_layers": 1, "n_embd": 32, "n_heads": 2, "n_kv_heads": 1, "head_dim": 32}
    return RandomModel("mistral3", n_ff=32, settings=settings, **sizes).write(path)


def use(path: Path, kind: str) -> None:
    """Everything that reads a file's header, and one step of the model."""
    llm = LLM(path, n_ctx=16)
    if kind == "graph":
        llm.logits([1, 2, 3])
        return
    ids = llm.tokenize("Once upon a <|user|> time é", parse_special=True)
    llm.detokenize(ids)
    llm.logits(ids[:3])
    llm.chat([{"role": "user", "content": "fox"}], max_tokens=1, temperature=0).completion  # noqa: B018


def run_many(path: Path, kind: str, count: int) -> dict[str, int]:
    """Use `count` damaged copies; returns how often each outcome came."""
    data = path.read_bytes()
    gguf = open_gguf(path)
    n_header = min(tensor.offset for tensor in gguf.tensors.values())
    outcomes: dict[str, int] = {"used": 0, "refused": 0}
    target = path.with_name(f"damaged-{kind}.gguf")
    use(path, kind)  # compiles the kernels, which takes seconds
    for seed in range(count):
        target.write_bytes(damaged(data, n_header, random.Random(seed)))
        started = time.process_time()
        try:
            use(target, kind)
            outcomes["used"] += 1
        except LocalKVError as error:
            if "\n" in str(error):
                raise AssertionError(f"seed {seed}: not one line: {error}") from error
            outcomes["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        assert time.process_time() - started < 5, f"seed {seed} took too long"
    return outcomes


@pytest.mark.parametrize(
    ("kind", "count"),
    quick([*product(("text", "graph"), (1000, 3000))], (), [("text", 1000), ("graph", 1000)]),
)
def test_thousands_of_damaged_files(kind: str, count: int, tmp_path: Path) -> None:
    """In a process of its own whose memory is limited, so that none takes gigabytes."""
    path = base_file(kind, tmp_path / "base.gguf")
    code = f"import test_mutated_models as t; t.main({str(path)!r}, {kind!r}, {count})"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=Path(__file__).parent,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    used, refused = map(int, done.stdout.split())
    assert used > count // 30  # a change to a weight or a name is no damage
    assert refused > count // 6


def main(path: str, kind: str, count: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    limit = used + (6 << 30)  # torch reserves address space for its threads
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    outcomes = run_many(Path(path), kind, count)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak < used + (1 << 30), f"took {peak >> 20} MiB"
    print(outcomes["used"], outcomes["refused"])
