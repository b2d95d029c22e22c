"""The facts of a number format.

A format is one line in the registry (`quant_formats/__init__.py`), and a folder or a part of one.
The line holds the facts below, which need no array library, so that `--help`, `show` and the memory
arithmetic can iterate them. A folder holds three files

    __init__.py     the reference: decode and, for cache types, encode in plain NumPy, with which
                    tests compare; and in which order the CPU keeps its bytes, without Numba
    cpu.py          a cache type's rows and a weight type's matrices for Numba (`shared/cpu/`)
    gpu.py          the same for Triton (`shared/gpu/`)

which kernels find by these names and import on first use (`QuantFormat.part`). A folder named as a
type has the type's code at the top of its files. Types that share their codes share a folder, whose
files have a namespace for each further type: `q8_0c` stands beside q8_0, and `q4_0` in `q4`. No
option, kernel, plan or test has a list of formats that a new one has to be added to: they follow
from the line and from the parts. Only the pairs that are recommended are chosen by hand.

A ggml *block* holds `block_size` values in `block_bytes` bytes, its fields one after the other.
Kernels want each field in a *plane* of its own (structure of arrays), so a format lists its planes
as byte ranges of the block: splitting is generic and lossless. A cache type may have
fields that occur once per row, too: its planes are the block's, then the row's.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

Array: TypeAlias = Any
"""An array of NumPy's or of a backend's library."""

TILE_VALUES = 1 << 20
"""Values of a weight decoded at a time: 4 MiB of float32, which stays in the last-level cache."""


class Codec(Protocol):
    """The functions of a format's reference, in `<folder>/__init__.py`."""

    @staticmethod
    def decode(planes: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """Decode planes (uint8 [..., n_blocks, plane bytes]) to float32 [..., n_blocks * size].

        Planes of the row are uint8 [..., 1, plane bytes]. Types whose scales serve a group of
        tokens have whole groups: uint8 [..., tokens, n_blocks, plane bytes].
        """
        ...

    @staticmethod
    def encode(x: NDArray[np.float32]) -> tuple[NDArray[np.uint8], ...]:
        """Encode float32 [..., n] to planes, with ggml's reference rounding. Cache types only.

        Types whose scales serve a group of tokens take whole groups: float32 [..., tokens, n].
        """
        ...


@dataclass(frozen=True)
class Plane:
    """One field of a block or row: its name (ggml's, where it has one) and bytes in each."""

    name: str
    n_bytes: int


@dataclass(frozen=True)
class QuantFormat:
    """The facts about one number format.

    Attributes:
        name: as users write it, and ggml's lower-case name ("q4_0", "q4_K").
        ggml_type: ggml's type id in files, or None if ggml has no such type.
        block_size: values per block.
        planes: the block's fields in ggml's order; their sizes add up to `block_bytes`.
        is_weight, is_cache: where it can be used.
        stays_in_file: the CPU multiplies it as it lies in the file, where there are 8-bit dot
            products, and makes no panels of it when a model is loaded.
        is_offered: files are commonly offered in this type of weights.
        narrow: the type that llama-quantize takes for rows that are not whole blocks; where there
            is none, or its blocks are too long as well, f16.
        row_planes: fields that occur once per row (of head_dim values). Cache types only.
        scales_by_head: rows are divided by a scale of their layer and KV head before they are
            encoded, and multiplied by it once they are decoded. The scale is absmax / `largest`.
            Codecs and kernels know nothing of it: `store_rotated` and `attention` apply it.
        largest: the largest finite value, of types that have a use for it, else 0.
        shared_codec: the name of the format whose code encodes and decodes, if not its own.
        folder: whose namespace of the format's name is the code, if that has no folder to itself.
        group_tokens: consecutive tokens of a cache that are encoded together, a divisor of a page.
            Of more than one a scale serves one channel of all of them
            (`shared/channel_groups.py`).
        n_centroids: numbers of the codebook that codes select from; each layer has one for
            K and one for V (`shared/codebooks.py`); 0 for types without one.
    """

    name: str
    ggml_type: int | None
    block_size: int
    planes: tuple[Plane, ...]
    is_weight: bool = True
    is_cache: bool = False
    stays_in_file: bool = False
    is_offered: bool = False
    narrow: str = ""
    row_planes: tuple[Plane, ...] = ()
    scales_by_head: bool = False
    largest: float = 0.0
    shared_codec: str = ""
    folder: str = ""
    group_tokens: int = 1
    n_centroids: int = 0

    @property
    def all_planes(self) -> tuple[Plane, ...]:
        """The planes of a block, then of a row: in this order `encode` gives them."""
        return (*self.planes, *self.row_planes)

    @property
    def block_bytes(self) -> int:
        return sum(plane.n_bytes for plane in self.planes)

    def bits_per_value(self, row_values: int) -> float:
        """Bits that a value takes with its share of scales, in rows of `head_dim` values."""
        row_bits = 8 * sum(plane.n_bytes for plane in self.row_planes)
        return 8 * self.block_bytes / self.block_size + row_bits / row_values

    @property
    def shares_scale(self) -> bool:
        """Whether an outlier costs the values beside it their precision, as the scale of a block
        or a row of integers does.

        Such a type gains by a rotation, which spreads outliers; a float type hardly does. Nor does
        a type whose rows of floats share a scale: that only moves the range of the exponents. A
        value keeps its precision until it is 2 ** 14 (e4m3) times smaller than the largest. Where a
        channel has scales of its own, one that is an outlier costs no other anything.
        """
        return self.block_size > 1 and self.group_tokens == 1

    @property
    def repacks(self) -> bool:
        """Whether a page of rows in a cache can be unpacked and packed in another such type by
        itself, without measured scales or codebooks: it holds whole groups of tokens."""
        return self.is_cache and not self.n_centroids and not self.scales_by_head

    def row_bytes(self, n_values: int) -> int:
        """Bytes of a row of `n_values`; a row must be a whole number of blocks."""
        if n_values % self.block_size:
            raise ValueError(f"{self.name}: {n_values} is not a multiple of {self.block_size}")
        row_fields = sum(plane.n_bytes for plane in self.row_planes)
        return n_values // self.block_size * self.block_bytes + row_fields

    @property
    def codec_name(self) -> str:
        """The name of the code for this format's bytes: of a folder, or of what is in one."""
        return (self.shared_codec or self.name).lower()

    @property
    def codec(self) -> Codec:
        """The reference of this format; the first use imports it, and NumPy with it."""
        return cast(Codec, self._of_module(""))

    @property
    def cpu_layout(self) -> Any:
        """The constants by which the CPU lays the format's bytes out (`shared/cpu/`), without
        Numba."""
        return self._of_module("")

    def part(self, name: str) -> Any:
        """What the file `<name>.py` ("cpu" or "gpu") of the format's folder holds for it.

        Raises:
            ModuleNotFoundError: there is none, so nothing of that kind is known of the format.
        """
        return self._of_module(f".{name}")

    def has_part(self, name: str) -> bool:
        """Whether the format's folder has a file `<name>.py`; imports nothing heavy."""
        return (Path(__file__).parent / self._folder / f"{name}.py").exists()

    @property
    def _folder(self) -> str:
        return self.folder or self.codec_name

    def _of_module(self, suffix: str) -> Any:
        """A module of the folder or, where several types share it, the format's namespace there."""
        module = importlib.import_module(f"localkv.quant_formats.{self._folder}{suffix}")
        return getattr(module, self.codec_name) if self.folder else module


def split_blocks(fmt: QuantFormat, blocks: Array) -> tuple[Array, ...]:
    """Views of each plane: uint8 [..., n * block_bytes] -> uint8 [..., n, plane bytes] each."""
    n_blocks = blocks.shape[-1] // fmt.block_bytes
    fields = blocks.reshape(*blocks.shape[:-1], n_blocks, fmt.block_bytes)
    ends = accumulate((plane.n_bytes for plane in fmt.planes), initial=0)
    return tuple(fields[..., start:end] for start, end in pairwise(ends))
