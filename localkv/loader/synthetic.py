"""Models of a well-known shape with random weights, made in memory: for benchmarks without a file.

Values are random, with a variance that keeps activations near 1; codes are random bytes, so that
products read as much as from a real model.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, field

import torch
from torch import Tensor

from localkv.formats import FORMATS, QuantFormat
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.backend import Backend
from localkv.loader.shapes import SHAPES, check_shape, output_type
from localkv.loader.weights import TensorReader, model_weights
from localkv.model import Transformer

RANDOM_ROWS = 1024
"""Random rows; larger matrices repeat them."""
MINIMA = ("m", "dmin")
"""Fields that shift a block's values."""


def random_rows(
    fmt: QuantFormat,
    n_rows: int,
    n_in: int,
    *,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Packed rows whose values have a variance of 1 / `n_in` around 0: uint8 [n_rows, bytes].

    Float types hold normal values; others random codes, and scales chosen to fit.
    """
    some = min(n_rows, RANDOM_ROWS)
    n_blocks = n_in // fmt.block_size
    if fmt.block_size == 1:
        values = torch.randn(some, n_in, device=device, generator=generator) / math.sqrt(n_in)
        rows = torch.cat(fmt.codec.encode(values), -1).flatten(1)
    else:
        size = (some, n_blocks, fmt.block_bytes)
        rows = torch.randint(256, size, dtype=torch.uint8, device=device, generator=generator)

        def decoded(scale: float, minimum: float) -> Tensor:
            start = 0
            for plane in fmt.planes:
                if plane.n_bytes == 2 and plane.name in ("d", *MINIMA):
                    value = minimum if plane.name in MINIMA else scale
                    half = torch.tensor([value], dtype=torch.float16, device=device)
                    rows[..., start : start + 2] = half.view(torch.uint8)
                start += plane.n_bytes
            sample = rows[: min(some, 16)]
            planes = torch.split(sample, [plane.n_bytes for plane in fmt.planes], -1)
            return fmt.codec.decode(planes)

        shift = decoded(0.0, 1.0).mean().item()
        ratio = -decoded(1.0, 0.0).mean().item() / shift if shift else 0.0
        scale = 1.0 / (decoded(1.0, ratio).std().item() * math.sqrt(n_in))
        decoded(scale, ratio * scale)
        rows = rows.flatten(1)
    return rows.repeat(-(-n_rows // some), 1)[:n_rows].contiguous()


@dataclass
class RandomTensors:
    """A `TensorSource` of random matrices in one type, and norms of ones.

    Like llama-quantize, it keeps the output matrix in more bits: Q6_K, if `type_name` has fewer.
    """

    type_name: str
    device: torch.device
    generator: torch.Generator
    _maps: dict[str, mmap.mmap] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return name == "output.weight"

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        if len(shape) == 1:
            ones = torch.ones(1, *shape, device=self.device)
            return PackedTensor(FORMATS["f32"], ones.view(torch.uint8)[0], shape)
        fmt = FORMATS[output_type(self.type_name) if name == "output.weight" else self.type_name]
        n_rows = math.prod(shape[:-1])
        rows = random_rows(fmt, n_rows, shape[-1], device=self.device, generator=self.generator)
        if self.device.type == "cpu" and hasattr(mmap, "MADV_DONTNEED"):
            rows = self._mapped(name, rows)
        return PackedTensor(fmt, rows.view(*shape[:-1], -1), shape)

    def _mapped(self, name: str, rows: Tensor) -> Tensor:
        """A copy in memory whose pages can be given back."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared pages would stay
        self._maps[name] = mmap.mmap(-1, rows.numel(), flags=flags)
        copy = torch.frombuffer(self._maps[name], dtype=torch.uint8).view(rows.shape)
        return copy.copy_(rows)

    def release(self, name: str) -> None:
        """Give back a matrix that was laid out anew, as a file's: its rows then read as zeros."""
        if name in self._maps:
            self._maps[name].madvise(mmap.MADV_DONTNEED)


def synthetic_model(
    name: str,
    type_name: str,
    backend: Backend,
    *,
    seed: int = 0,
    drawn_on: torch.device | str | None = None,
) -> Transformer:
    """A model of the shape `SHAPES[name]` with random weights of one type, on a backend.

    Args:
        drawn_on: the device whose random numbers they are; the backend's, which is fastest, if
            None. The same numbers come from the same device only.

    Raises:
        UsageError: there is no such shape, or no such type of weights.
    """
    check_shape(name, type_name)
    config = SHAPES[name]
    device = torch.device(backend.device if drawn_on is None else drawn_on)
    generator = torch.Generator(device).manual_seed(seed)
    read = TensorReader(RandomTensors(type_name, device, generator), backend)
    return Transformer(config, model_weights(read, config), backend)
