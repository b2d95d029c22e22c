"""Rounding with error feedback: later columns of a matrix make up for the errors of earlier ones.

After Frantar et al. 2022 (GPTQ, arXiv:2210.17323) and Chee et al. 2023 (LDLQ of QuIP,
arXiv:2307.13304). H is the second moment of the rows that a matrix W meets, so that an error E of
W costs tr(E H E^T). Columns are rounded in order. The error e of column j moves all later ones by
-e / U[j, j] * U[j, later], where U is the upper Cholesky factor of H's inverse.

The scales of a block are those that its type's encoder chooses for the block's columns as they are
by then. Which values the codes of a block stand for is read off the type's decoder, and where its
codes lie in the block's bytes, too (`code_layout`). So this knows types by their names only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from localkv.kernels.cpu.quantize.rows import encode_rows
from localkv.quant_formats.base import QuantFormat, split_blocks

DAMPING = 0.01
"""What H's diagonal is raised by, in parts of its mean: texts are short, and H has noise."""
FIRST_SHARE = 0.05
"""How much the first token of a sequence counts, where all others together count 1. Its activations
are unlike theirs, and most heads of all later tokens attend to it (attention sinks: Xiao et al.
2023, arXiv:2309.17453), so that its errors reach each prediction."""
TYPES = (*("q2_K", "q3_K", "q4_K", "q5_K", "q4_0", "q4_1", "q5_0", "q5_1"), *("iq4_nl", "iq4_xs"))
"""Types of up to five bits whose values have codes of their own, and IQ3_S, in which four values
share a point of a grid and each has a sign."""

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Moments:
    """What the rows that meet a matrix are like.

    Attributes:
        second: float32 [n_in, n_in], the mean of x^T x, and of first tokens `FIRST_SHARE` of it.
        factor: float32 [n_in, n_in], U.
    """

    second: Floats
    factor: Floats

    @classmethod
    def of_mean(cls, mean_products: NDArray[np.floating]) -> Moments:
        """Moments whose `second` is given: [n_in, n_in]."""
        second = np.asarray(mean_products, np.float64)
        mean = float(np.trace(second)) / len(second) or 1.0
        inverse = np.linalg.inv(second + DAMPING * mean * np.eye(len(second)))
        lower = np.linalg.cholesky((inverse + inverse.T) / 2)
        return cls(second.astype(np.float32), np.ascontiguousarray(lower.T, np.float32))

    @property
    def importance(self) -> Floats:
        """float32 [n_in]: mean squares."""
        return np.ascontiguousarray(np.diagonal(self.second))


@dataclass(frozen=True)
class CodeLayout:
    """Where the codes of a block are, and where their values are.

    Attributes:
        bits: int64 [block size, bits of a code]: their places among the block's bits.
        places: float32 [codes], by code: where its value is between the least one, 0, and the
            greatest one, 1.
        order: int64 [codes], codes by their values.
    """

    bits: NDArray[np.int64]
    places: Floats
    order: NDArray[np.int64]

    @functools.cached_property
    def bounds(self) -> Floats:
        """float32 [codes - 1]: halfway between neighbouring values."""
        places = self.places[self.order]
        bounds: Floats = (places[1:] + places[:-1]) * np.float32(0.5)
        return bounds

    def with_all(self, blocks: Bytes, code: int) -> Bytes:
        """Blocks whose values all have one code."""
        one = np.zeros((1, blocks.shape[-1]), np.uint8)
        full = (1 << self.bits.shape[1]) - 1
        of_codes, wanted = (
            self.with_codes(one, np.full((len(self.bits), 1), number)) for number in (full, code)
        )
        return (blocks & ~of_codes) | wanted

    def codes(self, blocks: Bytes) -> NDArray[np.int64]:
        """The codes of blocks [rows, block bytes]: [block size, rows]."""
        bits = np.unpackbits(blocks, axis=-1, bitorder="little")
        weights = 1 << np.arange(self.bits.shape[1])
        return (bits[:, self.bits].astype(np.int64) @ weights).T

    def with_codes(self, blocks: Bytes, codes: NDArray[np.int64]) -> Bytes:
        """Blocks with other codes [block size, rows]."""
        bits = np.unpackbits(blocks, axis=-1, bitorder="little")
        shifts = np.arange(self.bits.shape[1])
        bits[:, self.bits] = (codes.T[..., None] >> shifts) & 1
        return np.packbits(bits, axis=-1, bitorder="little")


def decoded(fmt: QuantFormat, blocks: Bytes) -> Floats:
    """The values of blocks [n, block bytes]: float32 [n, block size]."""
    return fmt.codec.decode(split_blocks(fmt, blocks)).reshape(len(blocks), -1)


@functools.cache
def code_layout(fmt: QuantFormat) -> CodeLayout:
    """Where a type's codes are: a bit of a code changes one value, one of a scale more than one."""
    block = np.random.default_rng(2).integers(0, 256, fmt.block_bytes, dtype=np.uint8)
    for plane, field in zip(fmt.planes, split_blocks(fmt, block), strict=True):
        if plane.name in ("d", "dmin", "m") and plane.n_bytes == 2:
            field[...] = np.array([1], np.float16).view(np.uint8)
    flipped = np.unpackbits(block, bitorder="little") ^ np.eye(8 * len(block), dtype=np.uint8)
    values = decoded(fmt, np.packbits(flipped, axis=-1, bitorder="little"))
    changed = values != decoded(fmt, block[None])[0]
    alone = changed.sum(-1) == 1
    bits = np.array([np.flatnonzero(changed[:, i] & alone) for i in range(fmt.block_size)])
    layout = CodeLayout(bits, np.empty(0, np.float32), np.empty(0, np.int64))
    every = [layout.with_all(block[None], code)[0] for code in range(1 << bits.shape[1])]
    levels = decoded(fmt, np.stack(every))[:, 0]
    order = levels.argsort()
    least, most = levels[order[[0, -1]]]
    return replace(layout, places=(levels - least) / (most - least), order=order)


def encode_with_feedback(
    fmt: QuantFormat, x: Floats, importance: Floats, moments: Moments
) -> Bytes:
    """Encode rows of a matrix, each as it costs least: with feedback, or by the encoder alone.

    Args:
        fmt: one of `TYPES`.
        x: float32 [n_rows, n_in], finite.
        importance: float32 [n_in], for the choice of scales.

    Returns:
        uint8 [n_rows, bytes of a row].
    """
    plain = encode_rows(fmt, x, importance)
    fed = _fed(fmt, x, importance, moments.factor)
    costs = []
    for rows in (plain, fed):
        error = fmt.codec.decode(split_blocks(fmt, rows)).reshape(x.shape) - x
        with np.errstate(all="ignore"):
            costs.append(np.einsum("ij,ij->i", error @ moments.second, error))
    return np.where((costs[1] < costs[0])[:, None], fed, plain)


def _fed(fmt: QuantFormat, x: Floats, importance: Floats, factor: Floats) -> Bytes:
    columns = np.array(x.T, np.float32, order="C")
    size, found = fmt.block_size, []
    for start in range(0, len(columns), size):
        end = start + size
        within = factor[start:end, start:end]
        block = columns[start:end]
        encoded = encode_rows(fmt, np.ascontiguousarray(block.T), importance[start:end])
        errors = np.empty_like(block)
        found.append(_codes(fmt, encoded, block, within, errors))
        columns[end:] -= factor[start:end, end:].T @ errors
    return np.concatenate(found, axis=-1)


def _codes(
    fmt: QuantFormat, encoded: Bytes, block: Floats, factor: Floats, errors: Floats
) -> Bytes:
    """Choose the code of each value of blocks, one column after the other.

    Args:
        encoded: uint8 [n_rows, block bytes], the blocks, whose scales stay.
        block: float32 [block size, n_rows], which changes.
        factor: U of these columns.
        errors: takes what later columns move by, before they are multiplied with U.
    """
    layout = code_layout(fmt)
    order, places = layout.order, layout.places[layout.order]
    least, most = (decoded(fmt, layout.with_all(encoded, order[i])).T for i in (0, -1))
    spans = np.ascontiguousarray(most - least)
    with np.errstate(divide="ignore"):
        factors = np.where(spans, np.float32(1) / spans, np.float32(0))
    least, codes = np.ascontiguousarray(least), np.empty(block.shape, np.int64)
    for j in range(len(block)):
        codes[j] = np.searchsorted(layout.bounds, (block[j] - least[j]) * factors[j])
        errors[j] = (block[j] - least[j] - places[codes[j]] * spans[j]) / factor[j, j]
        block[j + 1 :] -= factor[j, j + 1 :, None] * errors[j]
    return layout.with_codes(encoded, order[codes])
