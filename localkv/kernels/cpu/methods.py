"""How the CPU's operations are carried out, by kind of prepared matrix and by type of the cache."""

from __future__ import annotations

from localkv.kernels.cpu.attention.kernels import cache_decoder
from localkv.kernels.cpu.linear.late_panels import TOKENS_TO_LAY, LateTensor
from localkv.kernels.cpu.linear.matrices import InPlaceTensor, PanelTensor, RowTensor
from localkv.kernels.cpu.moe.expert_steps import experts_run
from localkv.kernels.layer_weights import MoeWeights
from localkv.kernels.method import Method, Methods
from localkv.quant_formats.base import QuantFormat
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.simd.cpu_features import byte_dots, vector_width

ACTIVATIONS = f"8-bit activations ({byte_dots()})" if byte_dots() else "float32 activations"


def product_method(weight: PackedTensor) -> Method:
    """How a prepared matrix, or a stack of them, is multiplied."""
    match weight:
        case LateTensor(reads_rows=True):
            made = f"packed panels, made with the first {TOKENS_TO_LAY} tokens or a second prompt"
            return Method(f"{made}, {ACTIVATIONS}")
        case PanelTensor() | LateTensor():
            return Method(f"packed panels, {ACTIVATIONS}")
        case InPlaceTensor():
            return Method(f"packed as in the file, {ACTIVATIONS}")
        case RowTensor(halves_activations=True):
            return Method("rows as in the file, activations rounded to fp16")
        case RowTensor() if weight.packing is not None:
            return Method("rows as in the file, activations rounded to bf16 (AVX512-BF16)")
    assert isinstance(weight, RowTensor)
    return Method("rows as in the file, float32 activations")


def tiles_method(fmt: QuantFormat, side: str) -> Method:
    """What attention multiplies of a cache type's rows; see `attention/score.py` and `weigh.py`."""
    if cache_decoder(fmt.name).digits:
        factors = "queries" if side == "K" else "weights"
        return Method(f"8-bit codes by 16-bit {factors} ({byte_dots()}), float32 for prompts")
    return Method("float32")


def store_method(fmt: QuantFormat) -> Method:
    """How rows of a cache type are packed."""
    return Method(f"Numba, {vector_width()}")


def experts_method(weights: MoeWeights) -> Method:
    """How the experts of a layer are run."""
    if experts_run(weights):
        return Method("one chain with the layer's block, rows grouped by expert, Numba")
    return Method("one after the other, composed in NumPy")


def methods() -> Methods:
    """Those of the backend."""
    return Methods(
        attention=Method(f"packed K and V, Numba, {vector_width()}"),
        tiles=tiles_method,
        store=store_method,
        product=product_method,
        experts=experts_method,
    )
