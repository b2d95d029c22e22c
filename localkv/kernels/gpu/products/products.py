"""Products with packed matrices on the GPU: kernels for up to three matrices of the same input.

Every function takes float32 or float16 activations [tokens, n_in] and returns float32. One token's
products are float32 throughout. With more, activations and weights are rounded to fp16, scaled so
that they can't overflow, and add up in float32; with F32 weights nothing is rounded.

With many tokens a matrix is decoded to fp16 once, and torch multiplies it. A tile of a packed
product is decoded once for each tile of tokens. With many tokens that costs more than it costs to
write the matrix out as fp16 and to read it again. And cuBLAS multiplies fp16 matrices at some 80 %
of what the tensor cores can do. Operands and sums have the precision that `tile.py` gives them:
fp16 weights and activations with their powers of two, float32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.arch.spec import MlpSpec
from localkv.kernels.activation import activate
from localkv.kernels.bounds import BoundsError
from localkv.kernels.gpu.footprint import DECODED_BYTES, MANY_TOKENS
from localkv.kernels.gpu.launch import launch
from localkv.kernels.gpu.launch_bounds import check_products
from localkv.kernels.gpu.norm import norm, norm_packed
from localkv.kernels.gpu.products.activations import Activations, pack_rows
from localkv.kernels.gpu.products.epilogues import PLAIN, activation_numbers, epilogue
from localkv.kernels.gpu.products.plane_tensor import LEAST_COLUMNS, PlaneTensor
from localkv.kernels.gpu.products.tile import half_values, part_columns, product
from localkv.kernels.gpu.products.tile_sizes import TileSizes, gpu_of, tile_sizes, wants_fence
from localkv.kernels.layer_weights import Linear, MlpWeights, Norm
from localkv.quant_formats.packed_tensor import PackedTensor


@triton.jit
def _split(n_in, VALUES: tl.constexpr):
    """The columns that this program takes of a row."""
    steps = tl.cdiv(tl.cdiv(n_in, VALUES), tl.num_programs(2))
    first = tl.program_id(2) * steps * VALUES
    return first, tl.minimum(first + steps * VALUES, n_in)


@triton.jit
def _rows(tile, n_rows, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Rows of the output, and those to read, which exist."""
    out_row = tile * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(out_row, n_rows - 1)
    return out_row, row.to(tl.int64) if WIDE else row


@triton.jit
def _tokens(n_tokens, TOKENS: tl.constexpr):
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    return token, tl.minimum(token, n_tokens - 1)


@triton.jit
def _rows_added(n_rows):
    """Rows to which this program adds bias and residual: all or none, as one split does."""
    return tl.where(tl.program_id(2) == 0, n_rows, 0)


@triton.jit
def _one_linear(
    x_ptr, restore_ptr, out_ptr, residual_ptr, tile, planes, w_scale, bias_ptr, n_rows, n_in,
    n_tokens, READ: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    VALUES: tl.constexpr, EVEN: tl.constexpr, HALVES: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, FENCE: tl.constexpr, PTX: tl.constexpr, ACTIVATION: tl.constexpr,
    numbers,
):  # fmt: skip
    out_row, row = _rows(tile, n_rows, ROWS, WIDE)
    token, x_row = _tokens(n_tokens, TOKENS)
    first, last = _split(n_in, VALUES)
    y = product(
        x_ptr, x_row, restore_ptr, planes, row, first, last, n_in, w_scale,
        READ, UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, STAGES, FENCE, PTX,
    )  # fmt: skip
    at = token.to(tl.int64)[None, :] * n_rows + out_row[:, None]
    ok = (out_row < n_rows)[:, None] & (token < n_tokens)[None, :]
    n_added = _rows_added(n_rows)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + out_row, mask=out_row < n_added, other=0.0)[:, None]
    if ACTIVATION is not None:
        y = ACTIVATION(y, numbers)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, mask=ok & (out_row < n_added)[:, None], other=0.0)
    tl.store(out_ptr + at, y, mask=ok)


@triton.jit(do_not_specialize=["n_tokens", "split_stride"])
def linear_kernel(
    x_ptr, restore_ptr, out_ptr, residual_ptr, numbers, n_tokens, n_in, split_stride,
    a_planes, a_scale, a_bias_ptr, a_rows,
    b_planes, b_scale, b_bias_ptr, b_rows,
    c_planes, c_scale, c_bias_ptr, c_rows,
    A: tl.constexpr, A_UNIT: tl.constexpr,
    B: tl.constexpr, B_UNIT: tl.constexpr,
    C: tl.constexpr, C_UNIT: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, VALUES: tl.constexpr, EVEN: tl.constexpr,
    HALVES: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, FENCE: tl.constexpr,
    PTX: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Products of the same x with one to three matrices: q, k and v in one launch, of any types.

    Grid: (tiles of rows of all matrices, tiles of tokens, splits). The outputs [n_tokens, rows] lie
    one after another; each split has its own, `split_stride` further, and the first adds bias and
    residual. B and C are None where there are fewer matrices. ACTIVATION(values, `numbers`) of one
    matrix alone, and of rows that are not split, follows the bias, or is None.
    """
    tile = tl.program_id(0)
    out_ptr += tl.program_id(2).to(tl.int64) * split_stride
    a_tiles = tl.cdiv(a_rows, ROWS)
    if B is None:
        _one_linear(
            x_ptr, restore_ptr, out_ptr, residual_ptr, tile, a_planes, a_scale, a_bias_ptr, a_rows,
            n_in, n_tokens, A, A_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, WIDE, STAGES, FENCE, PTX,
            ACTIVATION, numbers,
        )  # fmt: skip
    else:
        b_out_ptr = out_ptr + n_tokens.to(tl.int64) * a_rows
        b_tiles = tl.cdiv(b_rows, ROWS)
        if tile < a_tiles:
            _one_linear(
                x_ptr, restore_ptr, out_ptr, None, tile, a_planes, a_scale, a_bias_ptr, a_rows,
                n_in, n_tokens, A, A_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, WIDE, STAGES, FENCE,
                PTX, None, (),
            )  # fmt: skip
        elif tile < a_tiles + b_tiles:
            _one_linear(
                x_ptr, restore_ptr, b_out_ptr, None, tile - a_tiles, b_planes, b_scale, b_bias_ptr,
                b_rows, n_in, n_tokens, B, B_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, WIDE, STAGES,
                FENCE, PTX, None, (),
            )  # fmt: skip
        else:
            if C is not None:
                _one_linear(
                    x_ptr, restore_ptr, b_out_ptr + n_tokens.to(tl.int64) * b_rows, None,
                    tile - a_tiles - b_tiles, c_planes, c_scale, c_bias_ptr, c_rows, n_in, n_tokens,
                    C, C_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, WIDE, STAGES, FENCE, PTX,
                    None, (),
                )  # fmt: skip


@triton.jit(do_not_specialize=["n_tokens", "split_stride"])
def gate_up_kernel(
    x_ptr, restore_ptr, out_ptr, numbers, n_tokens, n_in, n_rows, split_stride,
    gate_planes, gate_scale, gate_bias_ptr, up_planes, up_scale, up_bias_ptr,
    GATE: tl.constexpr, GATE_UNIT: tl.constexpr, UP: tl.constexpr, UP_UNIT: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, VALUES: tl.constexpr, EVEN: tl.constexpr,
    HALVES: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, FENCE: tl.constexpr,
    PTX: tl.constexpr, SPLIT: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """ACTIVATION(gate, up, `numbers`), [n_tokens, n_rows].
    Grid: (tiles of rows, tiles of tokens, splits).

    With SPLIT the two stay separate, for they must be whole first: [splits, 2, n_tokens, n_rows].
    """
    out_row, row = _rows(tl.program_id(0), n_rows, ROWS, WIDE)
    token, x_row = _tokens(n_tokens, TOKENS)
    first, last = _split(n_in, VALUES)
    gate = product(
        x_ptr, x_row, restore_ptr, gate_planes, row, first, last, n_in, gate_scale,
        GATE, GATE_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, STAGES, FENCE, PTX,
    )  # fmt: skip
    up = product(
        x_ptr, x_row, restore_ptr, up_planes, row, first, last, n_in, up_scale,
        UP, UP_UNIT, ROWS, TOKENS, VALUES, EVEN, HALVES, STAGES, FENCE, PTX,
    )  # fmt: skip
    n_added = _rows_added(n_rows)
    if gate_bias_ptr is not None:
        gate += tl.load(gate_bias_ptr + out_row, mask=out_row < n_added, other=0.0)[:, None]
    if up_bias_ptr is not None:
        up += tl.load(up_bias_ptr + out_row, mask=out_row < n_added, other=0.0)[:, None]
    at = token.to(tl.int64)[None, :] * n_rows + out_row[:, None]
    ok = (out_row < n_rows)[:, None] & (token < n_tokens)[None, :]
    if SPLIT:
        out_ptr += tl.program_id(2).to(tl.int64) * split_stride
        tl.store(out_ptr + at, gate, mask=ok)
        tl.store(out_ptr + n_tokens.to(tl.int64) * n_rows + at, up, mask=ok)
    else:
        tl.store(out_ptr + at, ACTIVATION(gate, up, numbers), mask=ok)


def planes_of(weight: PackedTensor) -> PlaneTensor:
    """A weight that was prepared for the GPU."""
    assert isinstance(weight, PlaneTensor), f"{weight.format.name} weight is not prepared"
    return weight


def halves(weights: Sequence[PlaneTensor]) -> bool:
    """Activations are rounded to fp16 as they are (`PackedTensor.halves_activations`)."""
    return any(weight.halves_activations for weight in weights)


def keeps_float32(n_tokens: int, weights: Sequence[PlaneTensor]) -> bool:
    """The products read float32 activations."""
    return n_tokens == 1 or any(weight.layout.is_exact for weight in weights)


def activations(x: Tensor | Activations, weights: Sequence[PlaneTensor]) -> Activations:
    """`x` [tokens, n_in] as products with `weights` want it."""
    if isinstance(x, Activations):
        return x
    x = _with_zeros(x, weights)
    if not keeps_float32(x.shape[0], weights):
        return pack_rows(x, halves=halves(weights))
    if x.shape[0] > 1:
        x = x.float()
        x = x.clamp(-65504.0, 65504.0).half().float() if halves(weights) else x
    return Activations(x.contiguous())


def _with_zeros(x: Tensor, weights: Sequence[PlaneTensor]) -> Tensor:
    """`x`, as wide as the matrices, if those were widened (`plane_tensor.prepare`)."""
    n_missing = weights[0].shape[-1] - x.shape[-1]
    if not 0 < n_missing < LEAST_COLUMNS:
        return x
    return torch.nn.functional.pad(x, (0, n_missing))


def normed(x: Tensor, by: Norm | None, weights: Sequence[Linear]) -> Activations:
    """A norm of `x` [tokens, n_in], as products with `weights` want it, in one launch."""
    matrices = [planes_of(layer.weight) for layer in weights]
    if by is None or keeps_float32(x.shape[0], matrices) or halves(matrices):
        return activations(x if by is None else norm(x, by), matrices)
    return norm_packed(x, by)


def sizes_for(n_tokens: int, n_out: int, weights: Sequence[PlaneTensor]) -> TileSizes:
    """For a launch that makes `n_out` rows of the output with `weights`."""
    return tile_sizes(
        n_tokens,
        n_out,
        weights[0].shape[-1],
        max(weight.layout.unit for weight in weights),
        gpu_of(weights[0].planes[0].device).n_processors,
        exact=any(weight.layout.is_exact for weight in weights),
        alone=len(weights) == 1,
        looks_up=any(weight.layout.table is not None for weight in weights),
    )


def launch_constants(sizes: TileSizes, weights: Sequence[PlaneTensor]) -> dict[str, Any]:
    """The compile-time arguments that all product kernels have."""
    gpu = gpu_of(weights[0].planes[0].device)
    return {
        "ROWS": sizes.rows,
        "TOKENS": sizes.tokens,
        "VALUES": sizes.values,
        "EVEN": weights[0].shape[-1] % sizes.values == 0,
        "HALVES": sizes.tokens == 1 and halves(weights),
        "WIDE": any(weight.needs_wide_index for weight in weights),
        "STAGES": sizes.stages,
        "FENCE": wants_fence(gpu),
        "PTX": gpu.ptx,
        "num_warps": sizes.n_warps,
        "num_stages": sizes.stages,
    }


def linears(
    x: Tensor | Activations,
    layers: Sequence[Linear],
    residual: Tensor | None = None,
    block: MlpSpec | None = None,
) -> tuple[Tensor, ...]:
    """Products of `x` with one to three layers of the same n_in, in one launch.

    Args:
        residual: float32 [tokens, n_out], added to the product of a single layer.
        block: whose activation follows the product of a single layer, which has no residual.

    Returns:
        float32 [tokens, n_out] each.
    """
    weights = [planes_of(layer.weight) for layer in layers]
    packed = activations(x, weights)
    check_products(packed.values, weights, layers, residual)
    n_tokens, n_in = packed.values.shape
    n_out = [weight.shape[0] for weight in weights]
    if decodes(n_tokens, weights):
        return tuple(
            decoded_product(
                packed,
                (weight,),
                (layer.bias,),
                residual=residual,
                activation=PLAIN[block.activation] if block else None,
                numbers=activation_numbers(block) if block else (),
            )
            for weight, layer in zip(weights, layers, strict=True)
        )
    sizes = sizes_for(n_tokens, sum(n_out), weights)
    out = packed.values.new_empty(sizes.n_splits, n_tokens * sum(n_out), dtype=torch.float32)
    matrices: dict[str, Any] = {}
    for i, name in enumerate("abc"):
        present = i < len(layers)
        matrices |= {
            f"{name}_planes": weights[i].operands if present else None,
            f"{name}_scale": weights[i].scale if present else None,
            f"{name}_bias_ptr": layers[i].bias if present else None,
            f"{name}_rows": n_out[i] if present else None,
            name.upper(): weights[i].layout.read if present else None,
            f"{name.upper()}_UNIT": weights[i].layout.unit if present else None,
        }
    grid = (
        sum(triton.cdiv(n, sizes.rows) for n in n_out),
        triton.cdiv(n_tokens, sizes.tokens),
        sizes.n_splits,
    )
    launch(
        linear_kernel,
        grid,
        packed.values,
        packed.restore,
        out,
        residual,
        () if block is None else activation_numbers(block),
        n_tokens,
        n_in,
        out.shape[1],
        **matrices,
        ACTIVATION=PLAIN[block.activation] if block and sizes.n_splits == 1 else None,
        **launch_constants(sizes, weights),
    )
    whole = out[0] if sizes.n_splits == 1 else out.sum(0)
    if block is not None and sizes.n_splits > 1:
        whole = activate(whole, None, block)
    parts = whole.split([n_tokens * n for n in n_out])
    return tuple(part.view(n_tokens, n) for part, n in zip(parts, n_out, strict=True))


def linear(x: Tensor, layer: Linear) -> Tensor:
    """x times one matrix, and its bias."""
    return linears(x, (layer,))[0]


def gate_up(x: Tensor | Activations, gate: Linear, up: Linear, block: MlpSpec) -> Tensor:
    """activation(gate(x), up(x)), float32 [tokens, n_ff], without the block's `sparsity`."""
    weights = [planes_of(gate.weight), planes_of(up.weight)]
    packed = activations(x, weights)
    check_products(packed.values, weights, (gate, up))
    n_tokens, n_in = packed.values.shape
    n_out = weights[0].shape[0]
    if weights[1].shape[0] != n_out:
        raise BoundsError(f"{n_out} rows of gate and {weights[1].shape[0]} of up")
    if decodes(n_tokens, weights):
        return decoded_product(
            packed,
            weights,
            (gate.bias, up.bias),
            gated=epilogue(block),
            numbers=activation_numbers(block),
        )
    sizes = sizes_for(n_tokens, n_out, weights)
    shape = (n_tokens, n_out) if sizes.n_splits == 1 else (sizes.n_splits, 2, n_tokens, n_out)
    out = packed.values.new_empty(shape, dtype=torch.float32)
    grid = (triton.cdiv(n_out, sizes.rows), triton.cdiv(n_tokens, sizes.tokens), sizes.n_splits)
    launch(
        gate_up_kernel,
        grid,
        packed.values,
        packed.restore,
        out,
        activation_numbers(block),
        n_tokens,
        n_in,
        n_out,
        2 * n_tokens * n_out,
        weights[0].operands,
        weights[0].scale,
        gate.bias,
        weights[1].operands,
        weights[1].scale,
        up.bias,
        GATE=weights[0].layout.read,
        GATE_UNIT=weights[0].layout.unit,
        UP=weights[1].layout.read,
        UP_UNIT=weights[1].layout.unit,
        SPLIT=sizes.n_splits > 1,
        ACTIVATION=epilogue(block),
        **launch_constants(sizes, weights),
    )
    if sizes.n_splits == 1:
        return out
    gate_sum, up_sum = out.sum(0).unbind(0)
    hidden: Tensor = activate(gate_sum, up_sum, block)
    return hidden


def hidden_rows(source: Tensor, by: Norm | None, weights: MlpWeights, spec: MlpSpec) -> Tensor:
    """What a dense block's last matrix reads: two launches, unless few of the gate's values are
    kept, which torch does."""
    if weights.ffn_gate is None:
        h = normed(source, by, (weights.ffn_up,))
        return linears(h, (weights.ffn_up,), block=spec)[0]
    pair = (weights.ffn_gate, weights.ffn_up)
    h = normed(source, by, pair)
    if not spec.sparsity:
        return gate_up(h, *pair, spec)
    gate, up = linears(h, pair)
    hidden: Tensor = activate(gate, up, spec)
    return hidden


DECODED_ROWS, DECODED_VALUES = 4, 1024
"""The tile that a warp decodes."""
FINISHED_COLUMNS = 1024
"""Outputs that a program finishes."""


def decodes(n_tokens: int, weights: Sequence[PlaneTensor]) -> bool:
    """Whether these products decode their matrices to fp16 first."""
    return n_tokens >= MANY_TOKENS and not any(weight.layout.is_exact for weight in weights)


@triton.jit
def decode_weight_kernel(
    planes, out_ptr, first_row, n_rows, n_in, w_scale,
    READ: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of rows, tiles of a row). `out_ptr` is fp16 [n_rows, n_in], from `first_row`."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = first_row + tl.minimum(at, n_rows - 1)
    row = row.to(tl.int64) if WIDE else row
    first = tl.program_id(1) * VALUES
    parts = READ(planes, row, first, n_in, VALUES, EVEN, PTX)
    for p in tl.static_range(len(parts)):
        w = half_values(parts[p], w_scale).to(tl.float16)
        column = part_columns(first, p, len(parts), UNIT, VALUES // UNIT)
        ok = (at < n_rows)[:, None, None] & (column < n_in)[None, :, :]
        tl.store(out_ptr + (at.to(tl.int64) * n_in)[:, None, None] + column[None, :, :], w, mask=ok)


def decoded_rows(weight: PlaneTensor, first: int, n_rows: int, out: Tensor) -> Tensor:
    """fp16 [n_rows, n_in]: rows of a matrix from `first` on, times its scale, in `out`."""
    n_in = weight.shape[-1]
    unit = weight.layout.unit
    values = max(unit, min(DECODED_VALUES, int(triton.next_power_of_2(n_in))))
    rows = out[: n_rows * n_in].view(n_rows, n_in)
    launch(
        decode_weight_kernel,
        (triton.cdiv(n_rows, DECODED_ROWS), triton.cdiv(n_in, values)),
        weight.operands,
        rows,
        first,
        n_rows,
        n_in,
        weight.scale,
        READ=weight.layout.read,
        UNIT=unit,
        ROWS=DECODED_ROWS,
        VALUES=values,
        EVEN=n_in % values == 0,
        WIDE=weight.needs_wide_index,
        PTX=gpu_of(rows.device).ptx,
        num_warps=1,
    )
    return rows


def multiplied(x: Tensor, rows: Tensor) -> Tensor:
    """float32 [tokens, rows] of fp16 x [tokens, n] and rows [rows, n]."""
    if x.device.type == "cuda":
        return torch.mm(x, rows.T, out_dtype=torch.float32)
    return x.float() @ rows.float().T


@triton.jit(do_not_specialize=["n"])
def finish_kernel(
    a_ptr, b_ptr, restore_ptr, a_bias_ptr, b_bias_ptr, residual_ptr, out_ptr, numbers,
    a_scale, b_scale, n, n_out,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, tiles of columns). Sums [tokens, n] become outputs, which lie `n_out` apart.

    GATED(a, b, `numbers`) of two sums, or ACTIVATION(a, `numbers`) and the residual of one, if
    there are any.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ok = column < n
    restore = 1.0 if restore_ptr is None else tl.load(restore_ptr + token)
    y = tl.load(a_ptr + token * n + column, mask=ok, other=0.0) * (1.0 / a_scale) * restore
    if a_bias_ptr is not None:
        y += tl.load(a_bias_ptr + column, mask=ok, other=0.0)
    if GATED is not None:
        up = tl.load(b_ptr + token * n + column, mask=ok, other=0.0) * (1.0 / b_scale) * restore
        if b_bias_ptr is not None:
            up += tl.load(b_bias_ptr + column, mask=ok, other=0.0)
        y = GATED(y, up, numbers)
    if ACTIVATION is not None:
        y = ACTIVATION(y, numbers)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + token * n_out + column, mask=ok, other=0.0)
    tl.store(out_ptr + token * n_out + column, y, mask=ok)


def decoded_product(
    x: Activations,
    weights: Sequence[PlaneTensor],
    biases: Sequence[Tensor | None],
    *,
    residual: Tensor | None = None,
    activation: Any = None,
    numbers: tuple[float, ...] = (),
    gated: Any = None,
) -> Tensor:
    """float32 [tokens, n_out]: one matrix's product with `x`, or two that `gated` joins.

    Args:
        biases: float32 [n_out] or None, for each matrix.
        residual: float32 [tokens, n_out], added last.
        activation: of one matrix's product: a function of `epilogues.PLAIN`.
        gated: of two: what `epilogue` gives.
        numbers: `activation_numbers`.
    """
    n_tokens, n_in = x.values.shape
    n_out = weights[0].shape[0]
    out = x.values.new_empty(n_tokens, n_out, dtype=torch.float32)
    step = max(1, min(n_out, DECODED_BYTES // (2 * n_in)))
    scratch = torch.empty(step * n_in, dtype=torch.float16, device=out.device)
    for first in range(0, n_out, step):
        n = min(step, n_out - first)
        sums = [multiplied(x.values, decoded_rows(w, first, n, scratch)) for w in weights]
        a_bias, *b_bias = (None if b is None else b[first : first + n] for b in biases)
        launch(
            finish_kernel,
            (n_tokens, triton.cdiv(n, FINISHED_COLUMNS)),
            sums[0],
            sums[-1],
            x.restore,
            a_bias,
            b_bias[0] if b_bias else None,
            None if residual is None else residual[:, first:],
            out[:, first:],
            numbers,
            weights[0].scale,
            weights[-1].scale,
            n,
            n_out,
            ACTIVATION=activation,
            GATED=gated,
            COLUMNS=FINISHED_COLUMNS,
        )
    return out
