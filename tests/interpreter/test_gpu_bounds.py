"""The GPU's kernels, in the interpreter, never leave the memory that they are given.

A program that reads or writes beyond a tensor ends the process, as its memory ends there.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from localkv.arch.spec import AttentionParams
from localkv.cache.arrays import LayerCache
from localkv.kernels.bounds import BoundsError
from localkv.kernels.gpu.attention.packed_attention import segment_attention
from localkv.kernels.gpu.device import GpuInfo
from localkv.kernels.gpu.embedding import embed
from localkv.kernels.gpu.products.plane_tensor import PlaneTensor, prepare
from localkv.kernels.gpu.products.products import linear
from localkv.kernels.gpu.rope_store import QueryKeySteps, rope_store
from localkv.kernels.layer_weights import Linear
from localkv.kernels.reference.backend import store_kv
from localkv.kernels.reference.torch_arrays import decoded
from localkv.kernels.rope import RopeTable
from localkv.quant_formats import TOKEN_FORMATS
from support.gpu_store import store_kv_gpu
from support.guarded_memory import GuardedMemory, guarded
from support.guarded_tensors import TENSORS
from support.paged_rows import PagedRows, paged_rows, plain_attention
from support.random_packed import random_packed

GPU = GpuInfo(arch=90, n_processors=3, ptx=False)
NAMES = [fmt.name for fmt in TOKEN_FORMATS.values() if fmt.has_part("gpu") and not fmt.shared_codec]
WEIGHTS = ("q4_0", "q5_1", "q8_0", "q6_K", "q3_K", "f16", "f32")
N_CASES = 6
"""Cases of attention and of the store, each."""


@pytest.fixture
def memory() -> Iterator[GuardedMemory]:
    torch.manual_seed(0)
    with guarded(random.Random(0), TENSORS) as memory:
        yield memory


def guarded_rows(memory: GuardedMemory, rows: PagedRows) -> PagedRows:
    def tensors(x: object) -> dict[str, Tensor]:
        values = {field.name: getattr(x, field.name) for field in fields(x)}
        return {n: memory.tensor(v, n) for n, v in values.items() if isinstance(v, Tensor)}

    k, v = (
        tuple(memory.tensor(plane, "a plane") for plane in planes)
        for planes in (rows.segment.k, rows.segment.v)
    )
    seg_batch = replace(rows.seg_batch, **tensors(rows.seg_batch))
    batch = replace(rows.batch, segments=(seg_batch,), **tensors(rows.batch))
    segment = replace(rows.segment, k=k, v=v)
    return PagedRows(memory.tensor(rows.q, "queries"), segment, seg_batch, batch)


def check_attention(memory: GuardedMemory, rows: PagedRows, window: int = 0) -> None:
    ours = guarded_rows(memory, rows)
    params = AttentionParams(1 / math.sqrt(rows.q.shape[-1]), window)
    out, lse = segment_attention(GPU, ours.q, ours.segment, ours.seg_batch, ours.batch, params)
    want, want_lse = plain_attention(rows, params.softmax_scale, window=window)
    assert float((out - want).norm() / want.norm()) < 2e-3
    assert float((lse - want_lse).abs().max()) < 1e-2


@pytest.mark.parametrize("group", [97, 112, 512])
def test_groups_of_any_size(memory: GuardedMemory, group: int) -> None:
    """More rows than a tile of decoding has are a prompt's."""
    check_attention(memory, paged_rows([(20, 1)], group=group, type_k="q8_0"))
    check_attention(memory, paged_rows([(5, 2), (0, 1)], group=group, n_kv_heads=2))


@pytest.mark.parametrize("seed", range(N_CASES))
def test_attention(memory: GuardedMemory, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [(rng.choice((0, 1, 63, 255, 256, 300)), rng.choice((1, 2, 8, 9, 20)))]
    if rng.random() < 0.5:
        lengths.append((rng.choice((0, 17, 256)), rng.choice((1, 3))))
    rows = paged_rows(
        lengths,
        type_k=rng.choice(NAMES),
        type_v=rng.choice(NAMES),
        group=rng.choice((1, 3, 7, 17)),
        n_kv_heads=rng.choice((1, 2)),
        head_dim=rng.choice((32, 96, 128)),
    )
    check_attention(memory, rows, rng.choice((0, 0, 1, 65)))


@pytest.mark.parametrize("seed", range(N_CASES))
def test_store(memory: GuardedMemory, seed: int) -> None:
    """Byte for byte as the reference, and nothing else in the pages."""
    rng = random.Random(seed)
    rows = paged_rows(
        [(rng.choice((0, 250)), rng.choice((1, 5, 20))), (3, 1)],
        type_k=rng.choice(NAMES),
        type_v=rng.choice(NAMES),
        n_kv_heads=rng.choice((1, 3)),
        head_dim=rng.choice((32, 96, 128)),
    )
    n_tokens, _, head_dim = rows.q.shape
    n_kv_heads = rows.segment.k[0].shape[1]
    for plane in (*rows.segment.k, *rows.segment.v):
        plane.random_(0, 256)
    ours = guarded_rows(memory, rows)
    k, v = (memory.tensor(torch.randn(n_tokens, n_kv_heads, head_dim), "rows") for _ in range(2))
    store_kv_gpu(k, v, LayerCache((ours.segment,)), (ours.seg_batch,))
    store_kv(k, v, LayerCache((rows.segment,)), (rows.seg_batch,))
    for got, want in zip(
        (*ours.segment.k, *ours.segment.v), (*rows.segment.k, *rows.segment.v), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", WEIGHTS)
def test_products_and_embedding(memory: GuardedMemory, name: str) -> None:
    rng = random.Random(name)
    n_in = max(32, random_packed(name, 1, 256).format.block_size) * rng.choice((1, 3))
    weight = random_packed(name, rng.choice((1, 17, 39)), n_in)
    planes = prepare(weight, torch.device("cpu"))
    assert isinstance(planes, PlaneTensor)
    bounded = replace(planes, planes=tuple(memory.tensor(x, "a plane") for x in planes.planes))
    for n_tokens in (1, 3):
        x = memory.tensor(torch.randn(n_tokens, n_in), "activations")
        got, want = linear(x, Linear(bounded)), x.double() @ decoded(weight, torch.float64).T
        assert float((got - want).norm()) < 3e-3 * float(x.norm() * decoded(weight).norm())
    ids = memory.tensor(torch.tensor([weight.shape[0] - 1, 0]), "ids")
    assert torch.allclose(embed(ids, bounded), decoded(weight[ids]), rtol=1e-5)


def test_what_does_not_fit_is_refused_before_a_launch() -> None:
    rows = paged_rows([(20, 2)], n_kv_heads=2, group=2)
    args = [rows.q, rows.segment, rows.seg_batch, rows.batch]

    def attend(i: int, **changes: Tensor) -> None:
        changed = [*args[:i], replace(args[i], **changes), *args[i + 1 :]]
        segment_attention(GPU, *changed, AttentionParams(0.1))

    plane, table = rows.segment.k[0], rows.seg_batch.page_table
    for i, changes in (
        (1, {"k": (plane[:, :1],)}),
        (1, {"v": (plane[..., :1].contiguous(),)}),
        (2, {"page_table": table.int()}),
        (2, {"length_table": rows.seg_batch.length_table[:0]}),
        (2, {"lengths": (257,)}),
        (3, {"positions": rows.batch.positions[:1]}),
        (3, {"start_table": rows.batch.start_table.long()}),
    ):
        with pytest.raises(BoundsError):
            attend(i, **changes)
    with pytest.raises(BoundsError):
        segment_attention(GPU, rows.q[:1], *args[1:], AttentionParams(0.1))
    x = torch.randn(2, 2, 64)
    cache, batches = LayerCache((rows.segment,)), (rows.seg_batch,)
    for k, v in ((x[:, :1], x), (x, x[..., :32]), (x.mT.contiguous().mT, x)):
        with pytest.raises(BoundsError):
            store_kv_gpu(k, v, cache, batches)
    turns = torch.ones(2, 33)
    steps = QueryKeySteps(rope=RopeTable(turns, turns, False))
    with pytest.raises(BoundsError, match="33 pairs of 64"):
        rope_store(rows.q, x, x, steps, cache, batches)
    weight = prepare(random_packed("q8_0", 5, 64), torch.device("cpu"))
    for wrong in (torch.randn(1, 32), torch.randn(3, 96)):
        with pytest.raises(BoundsError):
            linear(wrong, Linear(weight))
    with pytest.raises(BoundsError):
        linear(torch.randn(1, 64), Linear(weight, torch.zeros(4)))
    with pytest.raises(BoundsError):
        embed(torch.zeros(2, dtype=torch.int32), weight)


WRONG = """
import os, random, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch
from support.guarded_memory import guarded
from support.guarded_tensors import TENSORS
from localkv.kernels.gpu import embedding
from localkv.kernels.gpu.products import plane_tensor
from support.random_packed import random_packed
weight = plane_tensor.prepare(random_packed("f32", 4, 512), torch.device("cpu"))
with guarded(random.Random(1), TENSORS) as memory:
    ids = memory.tensor(torch.tensor([int(sys.argv[1])]), "ids")
    from dataclasses import replace
    planes = tuple(memory.tensor(x, "a plane") for x in weight.planes)
    embedding.embed(ids, replace(weight, planes=planes))
"""


@pytest.mark.parametrize(("row", "code"), [(3, 0), (4, -11)])
def test_a_program_that_leaves_its_memory_is_found(row: int, code: int) -> None:
    """A row behind the last is read: nothing on the device looks at ids."""
    paths = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", WRONG, str(row)]
    done = subprocess.run(command, env=paths, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
