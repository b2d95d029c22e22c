"""Rows that compiled code packs, against the formats' own `encode`, byte for byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localkv.cache.layout import SegmentSpec
from localkv.kernels.cpu.runtime.chain import Chain, Scratch
from localkv.kernels.cpu.store.store_kv import add_store, stored_rows
from localkv.kernels.reference.backend import hadamard_transform, store_kv
from localkv.quant_formats import TOKEN_FORMATS
from support.cpu_ops import rotate_cpu, store_kv_cpu
from support.cpu_pages import pool_planes
from support.torch_edge import numpy_of, torch_cache

HEAD_DIM = 64


def odd_rows() -> Tensor:
    """Blocks of 32 with what is special: float32 [rows, HEAD_DIM]."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(64, 32, generator=generator)
    ramp = torch.arange(-16, 16).float()
    bits = torch.randint(-(2**31), 2**31, (64, 32), generator=generator).to(torch.int32)
    blocks = [
        *normal,
        *(normal[:8] * 1e30),
        *(normal[:8] * 1e-30),
        *(normal[:8] * 1e-40),  # subnormal
        *(normal[:8] * 7e4),  # around the limits of a half
        *(normal[:8] * 1e-7),
        torch.zeros(32),
        -torch.zeros(32),
        torch.full((32,), 3.0),
        torch.full((32,), -3.0),
        ramp,
        ramp / 2,
        -ramp,
        ramp + 0.5,  # two largest magnitudes
        ramp * 8 + 4,  # ties
        torch.cat((ramp[::2], -ramp[::2])),
        *(torch.nextafter(ramp / 2, torch.full((32,), x)) for x in (torch.inf, -torch.inf)),
        *bits.view(torch.float32),
    ]
    for value in (torch.inf, -torch.inf, torch.nan, 65504.0, 65519.0, 65520.0, 448.0, 465.0, 6e4):
        for at in (0, 17):
            block = torch.linspace(-1, 1.3, 32)
            block[at] = value
            blocks.append(block)
    rows = torch.stack(blocks)
    return torch.cat((rows, rows.flip(0))).view(-1, HEAD_DIM)


def stored(name: str, store, rows: Tensor) -> list[Tensor]:
    """All planes of a cache that holds `rows` in random order as K and as V of two heads."""
    torch.manual_seed(1)
    n = len(rows) // 2
    cache = torch_cache(
        n_layers=1, n_kv_heads=2, head_dim=HEAD_DIM, segments=[SegmentSpec(name, name)], n_ctx=n
    )
    layer = cache.layers[0]
    planes = [*layer.segments[0].k, *layer.segments[0].v]
    for plane in planes:
        plane.zero_()
    batch = cache.batch([(cache.new_sequence(), [0] * n)])
    x = rows[: 2 * n].view(n, 2, HEAD_DIM)
    store(x, x.flip(0), layer, batch.segments)
    return planes


def stored_by_cpu(name: str, store, rows: Tensor) -> list[Tensor]:
    """What the CPU stores in its order of pages, brought back to the pool's."""
    planes, fmt = stored(name, store, rows), TOKEN_FORMATS[name]
    n = len(planes) // 2
    return [*pool_planes(fmt, "k", planes[:n]), *pool_planes(fmt, "v", planes[n:])]


def same(name: str, got: list[Tensor], want: list[Tensor]) -> None:
    """Bytes are equal; of a NaN only that it is one, of a minimum of 0 not its sign."""
    fields = [plane.name for plane in TOKEN_FORMATS[name].all_planes] * 2
    for field, a, b in zip(fields, got, want, strict=True):
        if name in ("f16", "bf16", "f32") or field in ("d", "m"):
            dtypes = {"bf16": torch.bfloat16, "f32": torch.float32}
            a, b = (x.view(dtypes.get(name, torch.float16)).float() for x in (a, b))
            assert torch.equal(a.isnan(), b.isnan())
            a, b = a.nan_to_num(7.0), b.nan_to_num(7.0)
            if field == "m":
                assert torch.equal(a, b)
                continue
            a, b = a.view(torch.int32), b.view(torch.int32)
        assert torch.equal(a, b), field


@pytest.mark.parametrize("name", TOKEN_FORMATS)
def test_bytes(name: str) -> None:
    rows = odd_rows()
    same(name, stored_by_cpu(name, store_kv_cpu, rows), stored(name, store_kv, rows))


@pytest.mark.parametrize("name", ["q4_0", "iq4_nl"])
def test_many_random_rows(name: str) -> None:
    rows = torch.randn(4096, HEAD_DIM, generator=torch.Generator().manual_seed(3))
    same(name, stored_by_cpu(name, store_kv_cpu, rows), stored(name, store_kv, rows))


def test_rotated_while_stored() -> None:
    def store(k, v, layer, batches):
        segment = layer.segments[0]
        object.__setattr__(segment, "rotation_k", 64)
        object.__setattr__(segment, "rotation_v", 32)
        chain = Chain(Scratch())
        k, v, layer, batches = numpy_of((k.contiguous(), v.contiguous(), layer, batches))
        add_store(chain, k, v, len(k), layer)
        chain.run(**stored_rows(layer, batches, len(k)))

    def reference(k, v, layer, batches):
        store_kv(hadamard_transform(k, 64), hadamard_transform(v, 32), layer, batches)

    rows = torch.randn(640, HEAD_DIM)
    same("q4_0", stored_by_cpu("q4_0", store, rows), stored("q4_0", reference, rows))


@pytest.mark.parametrize("block", [0, 1, 2, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("shape", [(1, 3, 256), (300, 2, 256)])
def test_rotation(block: int, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert torch.equal(rotate_cpu(x, block), hadamard_transform(x, block))


@pytest.mark.parametrize("block", [3, 48, 512])
def test_rotation_that_does_not_fit(block: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        rotate_cpu(torch.zeros(2, 256), block)
