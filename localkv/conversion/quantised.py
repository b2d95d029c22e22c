"""Checkpoints whose weights are codes: GPTQ, AWQ, compressed-tensors, FP8 and MXFP4.

A group of integer codes with a scale, w = s (q - z), is some of ggml's blocks of 32 with the same
codes and the same scale. So nothing is rounded a second time:

    Q4_0  d = s, codes q - z + 8            where all codes fit -8 to 7
    Q4_1  d = s, m = -s z, codes q          of 4 bits, with zero points that differ
    Q8_0  d = s, codes q - z                of 8 bits

What can be inexact are numbers of a block that fp16 can't hold: scales in bf16 or float32, and m,
whose product may need more than 11 bits. `Census` counts these. Groups that are no multiples of 32
columns, and columns in the order of activations, fit no block: such matrices become floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from localkv.arch.checkpoint import Config
from localkv.conversion.checkpoint_files import StoredTensor
from localkv.conversion.weights import ALL, Coded, Floats, Index, Values, stored
from localkv.errors import ModelFileError, counted, quoted
from localkv.quant_formats import FORMATS, QuantFormat
from localkv.quant_formats.q4 import pack_nibbles

Codes: TypeAlias = NDArray[np.int16]
BLOCK = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of eight that each nibble of AWQ's words holds, the lowest first."""
MXFP4_PARTS = ("_blocks", "_scales")


@dataclass
class Census:
    """What became of a checkpoint's codes.

    Attributes:
        n_kept: matrices by the type that holds their codes.
        n_groups, n_inexact: groups of these matrices, and those whose scale or minimum fp16 rounds.
        worst: the largest error by that, in steps of the codes.
        n_decoded: matrices that became floats, by the reason.
    """

    n_kept: dict[str, int] = field(default_factory=dict)
    n_groups: int = 0
    n_inexact: int = 0
    worst: float = 0.0
    n_decoded: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """A line each on what was kept and what was not."""
        lines = []
        for name, n in self.n_kept.items():
            lines.append(f"{counted(n, 'matrix')} in {name.upper()} with the checkpoint's codes")
        if self.n_inexact:
            lines.append(
                f"fp16 rounds a scale or a minimum of {self.n_inexact:,} groups of "
                f"{self.n_groups:,}, by {self.worst:.2g} steps of a code at most"
            )
        for reason, n in self.n_decoded.items():
            lines.append(f"{counted(n, 'matrix')} decoded to floats: {reason}")
        return [line.replace("matrixs", "matrices") for line in lines]


@dataclass(frozen=True)
class Integers:
    """A matrix of codes: w = s (q - z).

    Attributes:
        shape: [n_out, n_in].
        bits: of a code.
        codes: q of some rows, [rows, n_in].
        scales: s of all groups, float32 [n_out, n_groups].
        zeros: z, int16 [n_out, n_groups].
        groups: each column's group, [n_in].
    """

    shape: tuple[int, int]
    bits: int
    codes: Callable[[Index], Codes]
    scales: Floats
    zeros: Codes
    groups: NDArray[np.intp]

    def values(self, index: Index) -> Floats:
        """Rows as numbers."""
        differences = self.codes(index) - self.zeros[index][:, self.groups]
        return differences.astype(np.float32) * self.scales[index][:, self.groups]

    def why_not(self) -> str:
        """Why no block holds the codes; nothing if one does."""
        n_in = self.shape[1]
        if n_in % BLOCK:
            return f"{n_in} columns are no whole blocks of {BLOCK}"
        of_blocks = self.groups.reshape(-1, BLOCK)
        if (of_blocks != of_blocks[:, :1]).any():
            in_order = bool((np.diff(self.groups) >= 0).all())
            if in_order:
                return f"groups are no multiples of {BLOCK} columns"
            return "columns are in the order of activations (desc_act)"
        return "" if self.formats() else "codes leave 8 bits"

    def formats(self) -> tuple[QuantFormat, ...]:
        """Types that hold the codes, the smallest first."""
        low, high = -int(self.zeros.max()), (1 << self.bits) - 1 - int(self.zeros.min())
        names = []
        if low >= -8 and high <= 7:
            names.append("q4_0")
        elif self.bits <= 4:
            names.append("q4_1")
        if low >= -128 and high <= 127:
            names.append("q8_0")
        return tuple(FORMATS[name] for name in names)

    def blocks(self, index: Index, fmt: QuantFormat) -> NDArray[np.uint8]:
        """Rows in a type: uint8 [rows, bytes]."""
        groups = self.groups[::BLOCK]
        scales = self.scales[index][:, groups]
        codes, zeros = self.codes(index), self.zeros[index][:, groups]
        codes = codes.reshape(*scales.shape, BLOCK)
        fields = [_halves(scales)]
        if fmt.name == "q8_0":
            fields.append((codes - zeros[..., None]).astype(np.int8).view(np.uint8))
        elif fmt.name == "q4_1":
            fields += [_halves(-scales * zeros), pack_nibbles(codes.astype(np.uint8))]
        else:
            fields.append(pack_nibbles((codes - zeros[..., None] + 8).astype(np.uint8)))
        return np.concatenate(fields, -1).reshape(len(scales), -1)

    def count(self, census: Census, fmt: QuantFormat) -> None:
        """Add what fp16 rounds."""
        census.n_kept[fmt.name] = census.n_kept.get(fmt.name, 0) + 1
        steps = np.maximum(np.abs(self.scales), np.finfo(np.float32).tiny)
        largest = np.maximum(self.zeros, (1 << self.bits) - 1 - self.zeros)
        errors = np.abs(_as_half(self.scales) - self.scales) / steps * largest
        if fmt.name == "q4_1":
            minima = -self.scales * self.zeros
            errors += np.abs(_as_half(minima) - minima) / steps
        census.n_groups += errors.size
        census.n_inexact += int(np.count_nonzero(errors))
        census.worst = max(census.worst, float(errors.max(initial=0.0)))


def _as_half(values: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


def _halves(values: Floats) -> NDArray[np.uint8]:
    """fp16 bytes: [...] -> uint8 [..., 2]."""
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if np.isinf(halves).any():
        raise ModelFileError(
            "a scale leaves the range of F16", hint="--outtype bf16 decodes the codes"
        )
    return np.ascontiguousarray(halves[..., None]).view(np.uint8)


def with_codes(
    tensors: Mapping[str, StoredTensor], config: Config, census: Census
) -> Iterator[tuple[str, Values]]:
    """A checkpoint's tensors, codes with their scales as one.

    Raises:
        ModelFileError: the codes are of a kind that is not supported, or don't fit together.
    """
    settings = config.table("quantization_config") or config.table("compression_config")
    method = settings.get("quant_method")
    readers: dict[Any, Reader] = {
        "gptq": _gptq,
        "awq": _awq,
        "compressed-tensors": _compressed,
        "fp8": _fp8,
        "mxfp4": _mxfp4,
    }
    if settings and method not in readers:
        raise ModelFileError(
            f"config.json: weights quantised by {quoted(str(method))} are not supported",
            hint=f"supported: {', '.join(readers)}",
        )
    taken: set[str] = set()
    parts = _Parts(tensors, Config(settings), census, taken)
    for name, tensor in tensors.items():
        if name in taken:
            continue
        try:
            made = readers[method](parts, name) if settings else None
        except (ValueError, IndexError) as error:
            raise ModelFileError(f"tensor {quoted(name)}: its codes don't fit: {error}") from None
        if made is not None:
            yield made
        elif name not in taken:
            yield name, stored(tensor)


@dataclass(frozen=True)
class _Parts:
    """The tensors that belong to a matrix.

    Attributes:
        tensors: of the checkpoint.
        settings: `quantization_config`.
        taken: names that need no entry of their own, to which readers add.
    """

    tensors: Mapping[str, StoredTensor]
    settings: Config
    census: Census
    taken: set[str]

    def take(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise ModelFileError(f"missing tensor {quoted(name)}")
        self.taken.add(name)
        return self.tensors[name]

    def optional(self, name: str) -> StoredTensor | None:
        return self.take(name) if name in self.tensors else None

    def coded(self, name: str, integers: Integers) -> tuple[str, Values]:
        """A matrix by its name; shapes are compared here."""
        (n_out, n_in), groups = integers.shape, integers.groups
        n_groups = int(groups.max(initial=0)) + 1
        sizes = integers.scales.shape, integers.zeros.shape
        if len(groups) != n_in or any(
            len(s) != 2 or s[0] != n_out or s[1] < n_groups for s in sizes
        ):
            raise ValueError(f"{sizes[0]} scales for a matrix of {n_out} x {n_in}")
        reason = integers.why_not()
        if reason:
            self.census.n_decoded[reason] = self.census.n_decoded.get(reason, 0) + 1
            return name, Values(integers.shape, integers.values)
        kinds = integers.formats()
        integers.count(self.census, kinds[0])
        return name, Coded(integers.shape, integers.values, kinds, integers.blocks)


Reader: TypeAlias = Callable[[_Parts, str], tuple[str, Values] | None]


def _unpacked(words: NDArray[np.int32], place: NDArray[np.intp], bits: int) -> Codes:
    """Codes at places (0 for the lowest) of words of 32 bits; broadcast to each other."""
    shifted = words.view(np.uint32) >> (place * bits).astype(np.uint32)
    return (shifted & ((1 << bits) - 1)).astype(np.int16)


def _gptq(parts: _Parts, name: str) -> tuple[str, Values] | None:
    """AutoGPTQ's and GPTQModel's: eight codes of a column in a word, scales of rows of groups."""
    base, _, part = name.rpartition(".")
    if part in ("qzeros", "scales", "g_idx") and f"{base}.qweight" in parts.tensors:
        parts.taken.add(name)
        return None
    if part != "qweight":
        return None
    bits = parts.settings.integer("bits")
    if bits not in (2, 4, 8):
        raise ModelFileError(f"GPTQ's codes of {bits} bits are not supported")
    n_each = 32 // bits
    words, zero_words = parts.take(name).raw, parts.take(f"{base}.qzeros").raw
    scales = np.ascontiguousarray(parts.take(f"{base}.scales").floats().T)
    n_out, n_in = words.shape[1], words.shape[0] * n_each
    order = parts.optional(f"{base}.g_idx")
    size = parts.settings.integer("group_size")
    groups = np.arange(n_in) // (size if size > 0 else n_in)
    if order is not None:
        groups = order.raw.astype(np.intp)
    if groups.min(initial=0) < 0:
        raise ValueError("a column's group is negative")
    columns = np.arange(n_out)
    zeros = _unpacked(zero_words[:, columns // n_each], columns % n_each, bits).T
    first = parts.settings.string("checkpoint_format", default="gptq") == "gptq"
    places = np.arange(n_each)[None, :, None]

    def codes(index: Index) -> Codes:
        chosen = np.ascontiguousarray(words[:, index])
        return _unpacked(chosen[:, None], places, bits).reshape(n_in, -1).T

    return parts.coded(
        f"{base}.weight",
        Integers((n_out, n_in), bits, codes, scales, zeros + np.int16(first), groups),
    )


def _awq(parts: _Parts, name: str) -> tuple[str, Values] | None:
    """AutoAWQ's: eight columns of outputs in a word, in an order of its own."""
    base, _, part = name.rpartition(".")
    if part in ("qzeros", "scales") and f"{base}.qweight" in parts.tensors:
        parts.taken.add(name)
        return None
    if part != "qweight":
        return None
    bits = parts.settings.integer("bits", "w_bit")
    if bits != 4:
        raise ModelFileError(f"AWQ's codes of {bits} bits are not supported")
    words, zero_words = parts.take(name).raw, parts.take(f"{base}.qzeros").raw
    scales = np.ascontiguousarray(parts.take(f"{base}.scales").floats().T)
    n_in, n_out = words.shape[0], words.shape[1] * 8
    size = parts.settings.integer("group_size", "q_group_size")
    place = np.argsort(AWQ_ORDER)
    columns = np.arange(n_out)

    def of_columns(packed: NDArray[np.int32], index: Index) -> Codes:
        chosen = columns[index]
        return _unpacked(packed[:, chosen // 8], place[chosen % 8], bits).T

    return parts.coded(
        f"{base}.weight",
        Integers(
            (n_out, n_in),
            bits,
            lambda index: of_columns(words, index),
            scales,
            of_columns(zero_words, ALL),
            np.arange(n_in) // (size if size > 0 else n_in),
        ),
    )


DROPPED = (
    "_shape",
    ".input_scale",
    ".output_scale",
    ".input_zero_point",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
)
"""Ends of names of tensors that say something of activations, or what others say, too."""


def _compressed(parts: _Parts, name: str) -> tuple[str, Values] | None:
    """compressed-tensors' (llm-compressor): integers in words or bytes, and 8-bit floats."""
    base, _, part = name.rpartition(".")
    matrix = base + (".weight_packed" if f"{base}.weight_packed" in parts.tensors else ".weight")
    if part.startswith("weight_") and name != matrix:
        parts.taken.add(name)
        return None
    if name.endswith(DROPPED) and matrix in parts.tensors:
        parts.taken.add(name)
        return None
    if name != matrix or f"{base}.weight_scale" not in parts.tensors:
        return None
    weight, scale = parts.take(name), parts.take(f"{base}.weight_scale")
    if weight.dtype.startswith("F8"):
        block = _block_size(_weight_settings(parts.settings), "block_structure")
        return f"{base}.weight", _scaled(weight, scale, block)
    zero = parts.optional(f"{base}.weight_zero_point")
    if weight.dtype == "I8":
        bits, (n_out, n_in) = 8, weight.shape
        raw = weight.raw

        def codes(index: Index) -> Codes:
            return raw[index].astype(np.int16) + np.int16(128)

    elif part == "weight_packed" and weight.dtype == "I32":
        n_out, n_in = (int(n) for n in parts.take(f"{base}.weight_shape").raw)
        bits = _weight_settings(parts.settings).integer("num_bits")
        if bits not in (4, 8):
            raise ModelFileError(f"compressed-tensors' codes of {bits} bits are not supported")
        n_each, words = 32 // bits, weight.raw

        def codes(index: Index) -> Codes:
            chosen = np.ascontiguousarray(words[index])[..., None]
            return _unpacked(chosen, np.arange(n_each), bits).reshape(len(chosen), -1)[:, :n_in]

    else:
        raise ModelFileError(f"tensor {quoted(name)}: weights of {weight.dtype} are not supported")
    scales = scale.floats()
    scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    scales = np.broadcast_to(scales, (n_out, scales.shape[-1]))
    zeros = np.full(scales.shape, 1 << (bits - 1), np.int16)
    if zero is not None and zero.dtype == "I32":
        rows = np.arange(n_out)[:, None]
        zeros = _unpacked(zero.raw[rows[:, 0] // (32 // bits)], rows % (32 // bits), bits)
    elif zero is not None:
        zeros = zeros + np.broadcast_to(zero.raw.astype(np.int16), scales.shape)
    order = parts.optional(f"{base}.weight_g_idx")
    groups = np.arange(n_in) // max(1, n_in // scales.shape[1])
    if order is not None:
        groups = order.raw.astype(np.intp)
    return parts.coded(
        f"{base}.weight", Integers((n_out, n_in), bits, codes, scales, zeros, groups)
    )


def _weight_settings(settings: Config) -> Config:
    """What the configuration says of weights, in its first group."""
    for group in settings.table("config_groups").values():
        if isinstance(group, dict) and isinstance(group.get("weights"), dict):
            return Config(group["weights"])
    raise ModelFileError("config.json: config_groups says nothing of weights")


def _fp8(parts: _Parts, name: str) -> tuple[str, Values] | None:
    """8-bit floats with a scale of all, of rows or of blocks (DeepSeek's, transformers' own)."""
    if name.endswith((".activation_scale", "_activation_scale", ".input_scale")):
        parts.taken.add(name)
        return None
    for end in ("_scale_inv", "_scale"):
        if name.endswith(f".weight{end}"):
            parts.taken.add(name)
            return None
        if name.endswith(".weight") and name + end in parts.tensors:
            block = _block_size(parts.settings, "weight_block_size")
            return name, _scaled(parts.take(name), parts.take(name + end), block)
    return None


def _scaled(weight: StoredTensor, scale: StoredTensor, block: Any = None) -> Values:
    """8-bit floats times a scale.

    Args:
        scale: of all, of each row ([n_out] or [n_out, 1]), or of blocks.
        block: rows and columns of a block, the last of which may be cut off.
    """
    (n_out, n_in), factors = weight.shape, scale.floats()
    n_rows, n_columns = block or (1, n_in)
    if factors.size == 1:
        n_rows, n_columns = n_out, n_in
    sizes = -(-n_out // n_rows), -(-n_in // n_columns)
    if factors.size != math.prod(sizes):
        raise ValueError(f"{list(scale.shape)} scales for {n_out} x {n_in}")
    factors = factors.reshape(sizes)
    rows, columns = np.arange(n_out) // n_rows, np.arange(n_in) // n_columns

    def read(index: Index) -> Floats:
        return np.asarray(weight.floats(index) * factors[rows[index]][:, columns], np.float32)

    return Values((n_out, n_in), read)


def _block_size(settings: Config, name: str) -> list[int] | None:
    """Rows and columns of a block of 8-bit floats; None where each row has a scale, or all have.

    Raises:
        ModelFileError: the configuration says something else.
    """
    if not settings.has(name):
        return None
    size = settings.integers(name)
    if len(size) != 2 or min(size) < 1:
        raise ModelFileError(f"config.json: {name} is {size}")
    return size


def _mxfp4(parts: _Parts, name: str) -> tuple[str, Values] | None:
    """gpt-oss's: blocks of 32 values of 4 bits, with an exponent each, as in ggml's MXFP4."""
    if name.endswith("_scales"):
        parts.taken.add(name)
        return None
    if not name.endswith("_blocks"):
        return None
    blocks = parts.take(name)
    scales = parts.take(name.removesuffix("_blocks") + "_scales")
    n_experts, n_rows, n_blocks, n_bytes = blocks.shape
    if scales.shape != (n_experts, n_rows, n_blocks) or n_bytes != BLOCK // 2:
        raise ValueError(f"{list(scales.shape)} exponents for blocks {list(blocks.shape)}")
    fmt = FORMATS["mxfp4"]

    def packed(index: Index, _: QuantFormat) -> NDArray[np.uint8]:
        pairs = blocks.raw[index]
        codes = np.stack((pairs & 15, pairs >> 4), -1).reshape(*pairs.shape[:-1], BLOCK)
        fields = scales.raw[index][..., None], pack_nibbles(codes)
        return np.concatenate(fields, -1).reshape(*pairs.shape[:2], -1)

    def values(index: Index) -> Floats:
        rows = packed(index, fmt)
        fields = rows.reshape(*rows.shape[:-1], n_blocks, fmt.block_bytes)
        return np.asarray(fmt.codec.decode((fields[..., :1], fields[..., 1:])), np.float32)

    parts.census.n_kept[fmt.name] = parts.census.n_kept.get(fmt.name, 0) + 1
    return name, Coded((n_experts, n_rows, n_blocks * BLOCK), values, (fmt,), packed)
