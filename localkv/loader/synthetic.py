"""Models of a well-known shape with random weights, made in memory: for benchmarks without a file.

Values are random, with a variance that keeps activations near 1; codes are random bytes, so that
products read as much as from a real model.
"""

from __future__ import annotations

import math
import mmap
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from localkv.kernels.backend import Backend
from localkv.kernels.layer_kinds import check_places
from localkv.kernels.places import Places
from localkv.loader.known_models import KNOWN_MODELS, KnownModel, check_shape
from localkv.loader.quantised_format import tensor_format
from localkv.loader.tensor_reader import TensorReader
from localkv.loader.weights import model_weights
from localkv.model import Transformer
from localkv.quant_formats import FORMATS, QuantFormat
from localkv.quant_formats.base import split_blocks
from localkv.quant_formats.packed_tensor import PackedTensor

MINIMA = ("m", "dmin")
"""Fields that shift a block's values."""
SCALES = ("d", "e")


def random_blocks(
    fmt: QuantFormat, shape: tuple[int, ...], generator: np.random.Generator
) -> NDArray[np.uint8]:
    """Bits as a file may have them; scales can be anything: uint8 [*shape, bytes of a block]."""
    blocks = generator.integers(256, size=(*shape, fmt.block_bytes), dtype=np.uint8)
    if fmt.name in ("tq2_0", "q2_0"):  # of the four values of two bits, llama-quantize takes three
        pairs = blocks & (blocks << 1) & 0xAA
        blocks -= pairs
    return blocks


def set_scales(
    fmt: QuantFormat,
    planes: Sequence[NDArray[np.uint8]],
    scale: float,
    minimum: float,
    generator: np.random.Generator,
) -> None:
    """Write a scale, and what is subtracted, to all blocks whose other bits are random.

    Where scales are coarse, each is one of the two neighbours, and their mean square is right.

    Args:
        planes: views of the blocks' fields.
    """
    has_field = any(item.name in SCALES for item in fmt.planes)  # else it is spread over words
    for item, plane in zip(fmt.planes, planes, strict=True):
        if item.name in MINIMA:
            plane[:] = _half(minimum)
        elif item.name in SCALES and item.n_bytes == 2:
            plane[:] = _half(scale)
        elif item.name in SCALES:
            plane[:] = _small_floats(fmt, scale, plane.shape, generator)
        elif item.name == "scales" and not has_field:
            quarters = np.array([scale], np.float16).view(np.uint16) >> np.arange(0, 16, 4) & 15
            plane[..., 1::2] = plane[..., 1::2] & 15 | (quarters << 4).astype(np.uint8)


def _half(value: float) -> NDArray[np.uint8]:
    return np.array([value], np.float16).view(np.uint8)


def _small_floats(
    fmt: QuantFormat, scale: float, shape: tuple[int, ...], generator: np.random.Generator
) -> NDArray[np.uint8]:
    """Codes of a type whose scales are floats of a byte, which ascend with their codes."""
    table = cast(NDArray[np.float32], fmt.codec.SCALES).astype(np.float64)  # type: ignore[attr-defined]
    table = table[: int(table.argmax()) + 1]
    below = int(np.searchsorted(table, scale or 1.0, side="right")) - 1
    low, high = table[below] ** 2, table[below + 1] ** 2
    share_above = (np.square(scale or 1.0) - low) / (high - low)
    codes: NDArray[np.uint8] = (below + (generator.random(shape) < share_above)).astype(np.uint8)
    return codes


RANDOM_ROWS = 1024
"""Random rows; larger matrices repeat them."""
SAMPLE_VALUES = 1 << 17
"""Values, or 16 rows, whose variance stands for the whole matrix."""


def random_rows(
    fmt: QuantFormat, n_rows: int, n_in: int, *, generator: np.random.Generator | None = None
) -> NDArray[np.uint8]:
    """Packed rows whose values have a variance of 1 / `n_in` around 0: uint8 [n_rows, bytes].

    Float types hold normal values; others random codes, and scales chosen to fit. There are
    `RANDOM_ROWS` different ones at most.
    """
    generator = generator or np.random.default_rng()
    some = min(n_rows, RANDOM_ROWS)
    if fmt.block_size == 1:
        values = generator.standard_normal((some, n_in), np.float32) / np.float32(math.sqrt(n_in))
        rows = np.concatenate(fmt.codec.encode(values), -1)
    else:
        rows = random_blocks(fmt, (some, n_in // fmt.block_size), generator)
        planes = split_blocks(fmt, rows.reshape(some, -1))
        sample = slice(max(16, SAMPLE_VALUES // n_in))

        def decoded(scale: float, minimum: float) -> NDArray[np.float32]:
            set_scales(fmt, planes, scale, minimum, generator)
            return fmt.codec.decode([plane[sample] for plane in planes])

        shift = float(decoded(0.0, 1.0).mean())
        ratio = -float(decoded(1.0, 0.0).mean()) / shift if shift else 0.0
        scale = 1.0 / (float(decoded(1.0, ratio).std()) * math.sqrt(n_in))
        decoded(scale, ratio * scale)
    return np.resize(rows, (n_rows, fmt.row_bytes(n_in)))


CONSTANT = ("_norm.weight", "ssm_a", "ssm_d")
"""Ends of names of tensors that are no matrices, whatever their shape."""


def constant(name: str, shape: tuple[int, ...]) -> float | None:
    """The value that all items of a tensor have, or None if they are random."""
    if len(shape) > 1 and not name.endswith(CONSTANT):
        return None
    return -1.0 if name.endswith("ssm_a") else 1.0  # a state has to fade, so its rate is negative


@dataclass
class RandomTensors:
    """A `TensorSource` of random matrices in one type, and norms of ones.

    Like llama-quantize, it keeps the output matrix in more bits: Q6_K, if `type_name` has fewer.
    """

    type_name: str
    seed: int
    shape: KnownModel
    _maps: dict[str, mmap.mmap] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return self.shape.has(name)

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        if (value := constant(name, shape)) is not None:
            values = np.full(shape, value, np.float32)
            return PackedTensor(FORMATS["f32"], values.view(np.uint8), shape)
        is_output = name == self.shape.output_matrix
        fmt = tensor_format(name, shape, self.type_name, is_output=is_output)
        # by name, so that a model is the same in whatever order its places ask for their parts
        generator = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        rows = random_rows(fmt, math.prod(shape[:-1]), shape[-1], generator=generator)
        if hasattr(mmap, "MADV_DONTNEED"):
            rows = self._mapped(name, rows)
        return PackedTensor(fmt, rows.reshape(*shape[:-1], -1), shape)

    def _mapped(self, name: str, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """A copy in memory whose pages can be given back."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared pages would stay
        self._maps[name] = mmap.mmap(-1, rows.nbytes, flags=flags)
        copy = np.frombuffer(self._maps[name], np.uint8).reshape(rows.shape)
        copy[:] = rows
        return copy

    def release(self, name: str) -> None:
        """Give back a matrix that was laid out again, as a file's: its rows then read as zeros."""
        if name in self._maps:
            self._maps[name].madvise(mmap.MADV_DONTNEED)


def synthetic_model(
    name: str, type_name: str, places: Backend | Places, *, seed: int = 0
) -> Transformer:
    """A known model with random weights of one type, in its places; a backend is one for all.

    Raises:
        UsageError: there is no such shape, or no such type of weights.
        ModelFileError: a backend can't run one of its layers.
    """
    check_shape(name, type_name)
    config = KNOWN_MODELS[name].spec
    if isinstance(places, Backend):
        places = Places.one(places, config.n_layers)
    check_places(places, config)
    source = RandomTensors(type_name, seed, KNOWN_MODELS[name])
    read = TensorReader(source, places.embedding)
    return Transformer(config, model_weights(read, config, places=places), places)
