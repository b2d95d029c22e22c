"""The CPU's kernels never leave the memory that they are given, whatever the shapes."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from localkv.arch.spec import AttentionParams
from localkv.cache.arrays import LayerCache
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.errors import LocalKVError
from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.attention.jobs import Block, Chunk, Sequence
from localkv.kernels.cpu.attention.plan import check_pieces
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.cpu.linear.products import CpuProducts, Product, add_products
from localkv.kernels.cpu.runtime.chain import Chain, Memory, Scratch
from localkv.loader.weights import load_model
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.cpu_ops import cpu_attention, rotate_cpu, store_kv_cpu
from support.paged_rows import paged_rows
from support.paths import TESTS
from support.random_model import RandomModel
from support.random_packed import random_packed

FAST = {
    "attention": 8,
    "store": 20,
    "products": 20,
    "linear": 12,
    "adapters": 12,
    "activations": 40,
    "recurrent": 20,
    "experts": 6,
    "token": 2,
    "latent": 3,
}
LONG = {
    "attention": 3000,
    "store": 4000,
    "products": 6000,
    "linear": 3000,
    "adapters": 1000,
    "activations": 10000,
    "recurrent": 2000,
    "experts": 1000,
    "token": 300,
    "latent": 300,
}
"""Cases by kind."""
PARTS = 10
"""Processes that the long part is divided among."""
MOST_BYTES = 3 << 30
MOST_SECONDS = 550
CASES = TESTS / "support" / "attack" / "kernel_cases.py"


def run_cases(*cases: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(TESTS), *sys.path])
    return subprocess.run(
        [sys.executable, str(CASES), *cases],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES)),
    )


def check(seed: int, amounts: dict[str, int]) -> None:
    done = run_cases(*(f"{kind}:{seed}:{amount}" for kind, amount in amounts.items()))
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]}\n{done.stderr[-3000:]}"
    found = re.findall(r"done: (\d+) cases of (\w+), (\d+) blocks", done.stdout)
    assert {kind: int(n_cases) for n_cases, kind, _ in found} == amounts
    assert all(int(n_blocks) > 3 * int(n_cases) for n_cases, _, n_blocks in found)


@pytest.mark.slow
@pytest.mark.long
def test_kernels_stay_within_bounds() -> None:
    check(0, FAST)


@pytest.mark.attack
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", LONG)
def test_kernels_stay_within_bounds_for_long(kind: str, part: int) -> None:
    check(10**6 * (part + 1), {kind: LONG[kind] // PARTS})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "found"),
    [
        ("read", "signal 11|isnan"),
        ("write", "signal 11|were written"),
        ("scratch", "between parts of scratch were written"),
        ("leave", "isnan"),
    ],
)
def test_kernels_that_leave_their_bounds_are_found(does: str, found: str) -> None:
    """By a fault, by a pattern that changed, or by NaN."""
    done = run_cases(f"wrong {does}:0:1")
    said = f"signal {-done.returncode}" if done.returncode < 0 else done.stderr
    assert done.returncode != 0
    assert re.search(found, said), said


def floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def refused(what: str, call: Callable[[], object]) -> None:
    with pytest.raises(BoundsError, match=what):
        call()


def test_attention_takes_no_rows_that_are_not_there() -> None:
    rows = paged_rows([(300, 2), (0, 1)], n_kv_heads=2, group=3)
    params = AttentionParams(0.1)

    def attend(**changes: object) -> None:
        q, segment, seg_batch, batch = rows.q, rows.segment, rows.seg_batch, rows.batch
        for name, value in changes.items():
            if name == "q":
                q = value
            elif hasattr(seg_batch, name):
                seg_batch = replace(seg_batch, **{name: value})
            elif hasattr(segment, name):
                segment = replace(segment, **{name: value})
            else:
                batch = replace(batch, **{name: value})
        cpu_attention()(q, segment, seg_batch, batch, params)

    attend()
    table, k = rows.seg_batch.page_table, rows.segment.k[0]
    for page in (len(k), -1, 1 << 40):
        refused("page table", lambda page=page: attend(page_table=torch.full_like(table, page)))
    refused("page table", lambda: attend(page_table=table.int()))
    refused("page table", lambda: attend(page_table=table[:1].contiguous()))
    refused("page table", lambda: attend(page_table=table.T.contiguous().T))
    refused("rows in 2 pages", lambda: attend(lengths=(513, 1)))
    refused("rows in 2 pages", lambda: attend(lengths=(-1, 1)))
    refused("1 lengths", lambda: attend(lengths=(302,)))
    refused("sequences start", lambda: attend(starts=(0, 3, 2)))
    refused("positions", lambda: attend(positions=rows.batch.positions[:2]))
    refused("queries", lambda: attend(q=rows.q[:2]))
    refused("queries", lambda: attend(q=rows.q[:, :5]))
    refused("queries", lambda: attend(q=rows.q.half()))
    refused("plane of V", lambda: attend(k=(k[:, :1],)))  # pages may be apart, V has more heads
    refused("plane of V", lambda: attend(v=(rows.segment.v[0][:1],)))
    refused("plane of K", lambda: attend(k=(k[:, :, :255].contiguous(),)))
    refused("plane of K", lambda: attend(q=rows.q[..., :48].contiguous()))
    refused("planes of f16", lambda: attend(k=(k, k)))


def test_pieces_of_attention_are_no_larger_than_their_scratch() -> None:
    sizes = {"n_tokens": 8, "group": 97, "n_rows": 97, "n_parts": 3}
    sequence, chunk = Sequence(0, 1, 0, 300, 2, 1, 2, 0, 1), Chunk(0, 0, 1)
    good = [sequence], [chunk, Chunk(0, 1, 1)], [Block(7, 1, 96, 0)]
    check_pieces(*good, **sizes)
    for block in (Block(0, 0, 97, 0), Block(7, 2, 96, 0), Block(-1, 0, 1, 0), Block(0, 0, 0, 0)):
        refused("block", lambda block=block: check_pieces([], [], [block], **sizes))
    for wrong in (
        sequence._replace(n_new=2),
        sequence._replace(token=8),
        sequence._replace(token=-1),
        sequence._replace(n_chunks=3),
        sequence._replace(first_part=2),
        sequence._replace(first_part=-1),
        sequence._replace(n_parts=1),
        sequence._replace(skipped_parts=1),
        sequence._replace(skipped_parts=-1),
    ):
        refused(".", lambda wrong=wrong: check_pieces([wrong], good[1], [], **sizes))
    for wrong_chunk in (
        Chunk(1, 0, 1),
        Chunk(0, 1, 2),
        Chunk(0, 2, 1),
        Chunk(0, -1, 1),
        Chunk(0, 0, 0),
    ):
        chunks = [chunk, wrong_chunk]
        refused("pages", lambda chunks=chunks: check_pieces([sequence], chunks, [], **sizes))


@pytest.mark.parametrize("name", ["f16", "fp8_e4m3_token"])
def test_rows_are_stored_where_there_are_pages(name: str) -> None:
    """Some rows are encoded by a kernel, and some by torch."""
    rows = paged_rows([(0, 5)], n_kv_heads=2, type_k=name, type_v=name)
    slots, tokens = rows.seg_batch.slots, rows.seg_batch.tokens

    def store(x: torch.Tensor, **changes: torch.Tensor) -> None:
        seg_batch = replace(rows.seg_batch, **changes)
        store_kv_cpu(x, x, LayerCache((rows.segment,)), (seg_batch,))

    x = torch.randn(5, 2, 64)
    store(x)
    for slot in (256 * len(rows.segment.k[0]), -1):
        refused("slots", lambda slot=slot: store(x, slots=torch.full_like(slots, slot)))
    refused("slots", lambda: store(x, slots=slots.int()))
    refused("tokens", lambda: store(x, tokens=tokens + 1))
    refused("tokens", lambda: store(x, tokens=tokens[:4]))
    refused(".", lambda: store(x[:4]))
    refused(".", lambda: store(x[:, :1]))
    refused(".", lambda: store(x[..., :32]))


def test_a_chain_runs_with_no_less_than_its_workers_touch() -> None:
    chain = Chain(Scratch())
    chain.add(0, [0, Memory("x", 40), Memory(chain.take(64), 64), "n"], 1)
    refused("x has 36 bytes", lambda: chain.run(x=floats(9), n=1))
    refused("not contiguous", lambda: chain.run(x=floats(10, 2)[:, 0], n=1))
    refused("needed", lambda: chain.run(x=floats(10)))
    refused("scratch", lambda: chain.add(0, [0, Memory(chain.take(64), 65)], 1))
    refused("workers touch 65", lambda: chain.add(0, [0, Memory(floats(16), 65)], 1))


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "f16"])
def test_products_take_no_matrix_of_another_size(name: str) -> None:
    products = CpuProducts()
    weight = products.prepare(random_packed(name, 40, 64))
    narrow = products.prepare(random_packed(name, 40, 32))

    def run(*weights: object, x: np.ndarray, out: np.ndarray, **more: object) -> None:
        chain = Chain(Scratch())
        add_products(chain, x, len(x), [Product(weight, out, **more) for weight in weights])
        chain.run()

    x, out = floats(3, 64), floats(3, 40)
    run(weight, x=x, out=out)
    refused("next to", lambda: run(weight, narrow, x=x, out=out))
    refused("bytes", lambda: run(weight, x=x[:, :63].copy(), out=out))
    refused("bytes", lambda: run(weight, x=x, out=out[:2]))
    refused("bytes", lambda: run(weight, x=x, out=out, addend=floats(39)))
    refused("bytes", lambda: run(weight, x=x, out=out, addend=out[:2], addend_stride=160))
    refused(".", lambda: run(replace(weight, shape=(56, 64)), x=x, out=floats(3, 56)))
    refused(".", lambda: run(replace(weight, shape=(40, 96)), x=floats(3, 96), out=out))
    packed = random_packed(name, 40, 64)
    refused("rows", lambda: products.prepare(replace(packed, shape=(40, 96))))


def test_what_is_rotated_is_float32() -> None:
    refused("float64", lambda: rotate_cpu(torch.zeros(2, 64, dtype=torch.float64), 64))


@pytest.mark.parametrize("token", [-1, 96, 1 << 40])
def test_ids_are_those_of_the_embedding(token: int, tmp_path: Path) -> None:
    """Whoever gives them: nothing behind the engine looks at them."""
    path = RandomModel(n_layers=1).write(tmp_path / "model.gguf")
    engine = Engine(load_model(path, cpu_backend())[0], CacheConfig(n_ctx=64))
    sampler = Sampler(SamplingParams(temperature=0.0), n_vocab=96)
    calls: list[Callable[[list[int]], object]] = [
        engine.evaluate,
        engine.logits,
        lambda ids: list(engine.logit_batches(ids)),
        lambda ids: list(BatchEngine(engine).generate(ids, GenerationOptions(sampler=sampler))),
    ]
    for call in calls:
        with pytest.raises(LocalKVError, match=f"token id {token} is not in the vocabulary"):
            call([1, token])
    assert np.isfinite(engine.evaluate([1, 95])).all()
