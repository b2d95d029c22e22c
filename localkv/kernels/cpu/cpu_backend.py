"""CPU: Numba's kernels on packed weights and a packed cache.

Numba compiles attention and the store that goes with it. These keep pages in an order of their own
(`shared/cpu/page_order.py`), so a cache is written and read by this backend only.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import (
    AttentionSpec,
    DeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    ModelSpec,
    ShortConvSpec,
)
from localkv.cache.arrays import Array
from localkv.cache.ladder import stores_rows
from localkv.cache.layout import SegmentSpec, cache_segments, typed_groups
from localkv.config import CacheConfig
from localkv.kernels.backend import Backend, Method, Methods
from localkv.kernels.bounds import BoundsError
from localkv.kernels.compose import compose
from localkv.kernels.cpu.arrays import NumpyArrays, address
from localkv.kernels.cpu.attention.kernels import (
    cache_decoder,
    decode_k_source,
    decode_v_source,
    rows_per_tile,
    runs_in_blocks,
    score_source,
    weigh_source,
)
from localkv.kernels.cpu.attention.latent_attention import LatentAttention, latents_source
from localkv.kernels.cpu.attention.packed_attention import PackedAttention
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import OnKernel, compiling_ahead, specialized
from localkv.kernels.cpu.layers.attention import gate_width
from localkv.kernels.cpu.layers.chains import (
    ACTIVATIONS,
    MANY_VALUES,
    RESIDUALS,
    ROW_STEPS,
    activate_cpu,
    activate_source,
    apply_rope_cpu,
    has_common_kernel,
    norm_cpu,
)
from localkv.kernels.cpu.layers.latents import LATENT_STEPS
from localkv.kernels.cpu.layers.layer import CpuLayer
from localkv.kernels.cpu.layers.program import TokenPrograms
from localkv.kernels.cpu.linear.embedding import Embedding, embedding_source
from localkv.kernels.cpu.linear.jobs import IN_PLACE_FORMATS, PANEL_FORMAT_NAMES
from localkv.kernels.cpu.linear.late_panels import LATE_PRODUCTS, TOKENS_TO_LAY, LateTensor
from localkv.kernels.cpu.linear.matrices import (
    InPlaceTensor,
    PanelTensor,
    RowTensor,
    product_sources,
)
from localkv.kernels.cpu.linear.products import CpuProducts, head_source
from localkv.kernels.cpu.moe.experts import expert_sources, experts_run
from localkv.kernels.cpu.recurrent.steps import recurrent_sources
from localkv.kernels.cpu.runtime.chain import Scratch
from localkv.kernels.cpu.runtime.thread_pool import HELPERS, run_worker
from localkv.kernels.cpu.store.store_kv import (
    group_source,
    rotate_cpu,
    store_groups_cpu,
    store_kv_cpu,
    store_source,
)
from localkv.kernels.kept_sums import Kept, KeptSums, Logits
from localkv.kernels.layer_weights import MoeWeights
from localkv.kernels.primitives import Primitives
from localkv.quant_formats import FORMATS
from localkv.quant_formats.base import QuantFormat
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.simd import LANES
from localkv.simd.cpu_features import byte_dots, check_cpu, vector_width
from localkv.system.threads import n_threads
from localkv.system.turns import Turns

ACTIVATION_KIND = f"8-bit activations ({byte_dots()})" if byte_dots() else "float32 activations"


def product_method(weight: PackedTensor) -> Method:
    """How a prepared matrix, or a stack of them, is multiplied."""
    match weight:
        case LateTensor(reads_rows=True):
            made = f"packed panels, made with the first {TOKENS_TO_LAY} tokens or a second prompt"
            return Method(f"{made}, {ACTIVATION_KIND}")
        case PanelTensor() | LateTensor():
            return Method(f"packed panels, {ACTIVATION_KIND}")
        case InPlaceTensor():
            return Method(f"packed as in the file, {ACTIVATION_KIND}")
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
    """How the backend carries out its operations."""
    return Methods(
        attention=Method(f"packed K and V, Numba, {vector_width()}"),
        tiles=tiles_method,
        store=store_method,
        product=product_method,
        experts=experts_method,
        encoder_attention=Method("float32 rows of each text, NumPy"),
    )


KEPT_SUMS = KernelSource("linear/kept_sums")
RESULTS = 9
"""Floats that the kernel leaves of a row."""


def kept_sums_cpu(logits: Logits, kept: Kept) -> KeptSums:
    """See `kept_sums`.

    Raises:
        BoundsError: the kept tokens don't fit the logits.
    """
    logits = np.ascontiguousarray(logits, np.float32)
    n_rows, n_vocab = logits.shape
    ids, shifted, starts = (
        np.ascontiguousarray(part, kind)
        for part, kind in zip(kept, (np.int32, np.float32, np.int64), strict=True)
    )
    _check(n_rows, n_vocab, Kept(ids, shifted, starts))
    threads = n_threads() if logits.size >= MANY_VALUES else 1
    weights = np.empty(threads * (n_vocab + -n_vocab % LANES), np.float32)
    best, out = np.empty(n_rows, np.int64), np.empty((n_rows, RESULTS), np.float32)
    memory = (logits, ids, shifted, starts, weights, best, out)
    job = array("q", (0, n_rows, n_vocab, *map(address, memory)))
    run_worker(specialized(KEPT_SUMS)["worker"], job.buffer_info()[0], threads)
    sums = out[:, 1::2].astype(np.float64) + out[:, 2::2]
    return KeptSums(best, out[:, 0], *sums.T)


def _check(n_rows: int, n_vocab: int, kept: Kept) -> None:
    ids, shifted, starts = kept
    if len(starts) != n_rows + 1 or starts[0] != 0 or (np.diff(starts) < 0).any():
        raise BoundsError(f"kept tokens of {len(starts) - 1} rows, not {n_rows}")
    if not starts[-1] == len(ids) == len(shifted):
        raise BoundsError(f"{len(ids)} kept tokens with {len(shifted)} logits")
    if len(ids) and not 0 <= ids.min() <= ids.max() < n_vocab:
        raise BoundsError(f"kept tokens from {ids.min()} to {ids.max()} of {n_vocab}")


@dataclass(frozen=True)
class _LateWeights:
    """See `LatePreparation`.

    Attributes:
        forget: drops what knows which memory a product reads. The products don't refer to it: in a
            circle they would outlive the model, and its mapping with them.
    """

    products: CpuProducts
    forget: Callable[[], None]

    def prepare(self, weight: PackedTensor, release: Callable[[], None]) -> PackedTensor:
        return self.products.prepare(weight, release)

    def begin(self) -> None:
        self.products.late.begin()

    def finish(self) -> None:
        if self.products.late.finish():
            self.forget()


def cpu_backend() -> Backend:
    """The backend of machines without a supported GPU.

    Raises:
        UsageError: LOCALKV_CPU names another CPU than this one.
    """
    check_cpu()
    scratch = Scratch()
    products = CpuProducts(scratch)
    attention, latents = PackedAttention(), LatentAttention()
    composed = compose(
        "cpu",
        Primitives(
            decode=PackedTensor.decode,
            attention=attention,
            rotate=rotate_cpu,
            store_kv=store_kv_cpu,
            pack_groups=store_groups_cpu,
            linear=products.linear,
            matmul=products.matmul,
            norm=norm_cpu,
            activate=activate_cpu,
            apply_rope=apply_rope_cpu,
            latents=latents,
            head_products=products.head_products,
            prepare=products.prepare,
        ),
        arrays=NumpyArrays(),
        methods=methods(),
        head_dim_multiple=LANES,
        compiles=True,
    )
    layer = CpuLayer(composed, scratch, attention, products, latents)
    embedding = Embedding()
    programs = TokenPrograms(layer, attention, latents, embedding, products.late)

    def forget() -> None:
        """Drop what an operation that broke off may have left half done."""
        scratch.forget()
        attention.forget()
        latents.forget()
        layer.forget()
        programs.forget()
        embedding.forget()

    def embed(token_ids: NDArray[np.int64], token_embd: PackedTensor, scale: float) -> Array:
        if products.late.evaluate(len(token_ids)):
            forget()
        return embedding(token_ids, token_embd, scale)

    return replace(
        composed,
        embed=embed,
        late=_LateWeights(products, forget),
        run_layers=programs,
        run_next=programs.run_next,
        run_guesses=programs.run_guesses,
        behind_layers=programs.behind_layers,
        turns=Turns(forget),
        compiling_ahead=_kernels_ahead,
        kept_sums=kept_sums_cpu,
        **layer.operations(),
    )


def needed_kernels(
    embedding_type: str, matrix_types: Iterable[str], config: ModelSpec, cache: CacheConfig
) -> tuple[list[KernelSource], list[KernelSource]]:
    """List the kernels of a first prompt, in the order of their use, and of what follows.

    A kernel that only some layers need may be missing, so this says what to compile ahead, not what
    there has to be.

    Args:
        embedding_type: name of the weight format of the embedding.
        matrix_types: names of the weight formats of matrices.
    """
    names = sorted(set(matrix_types))
    sources: list[KernelSource | None] = [HELPERS]
    generated: list[KernelSource | None] = [embedding_source(embedding_type)]
    if any(name in PANEL_FORMAT_NAMES and name not in IN_PLACE_FORMATS for name in names):
        sources.append(LATE_PRODUCTS)
        generated.append(KernelSource("linear/fill"))
    sources += [source for name in names for source in product_sources(name)]
    sources.append(ACTIVATIONS)
    sources += _block_sources(config)
    for group in typed_groups(cache, config.groups):
        heads = {getattr(config.layers[i].mixer, "n_heads", 0) for i in group.layers}
        segments = cache_segments(cache, group)
        if len(segments) > 1:
            sources.append(ROW_STEPS)
        if group.is_latent:
            sources += [LATENT_STEPS, *map(head_source, names)]
            sources += [latents_source(n_heads) for n_heads in sorted(heads)]
            for segment in segments:
                sources += _cache_sources(segment)
            continue
        rows = [rows_per_tile(n_heads // group.n_kv_heads) for n_heads in sorted(heads)]
        for segment in segments:
            sources += _cache_sources(segment)
            for n in rows:
                generated.append(score_source(segment.type_k, n))
                generated.append(weigh_source(segment.type_v, n))
            if runs_in_blocks(segment.type_k, segment.type_v):
                generated.append(KernelSource("attention/many"))
    if any(not group.is_latent for group in config.groups):
        sources.append(KernelSource("attention/prefill"))
        generated.append(KernelSource("attention/decode"))
    return _each_once(sources), _each_once(generated)


def _block_sources(config: ModelSpec) -> Iterator[KernelSource]:
    """The kernels of steps between products that only some models have."""
    for layer in config.kinds:
        mixer = layer.mixer
        after = isinstance(mixer, AttentionSpec) and (gate_width(mixer) or mixer.clamp)
        after = after or (isinstance(mixer, LatentAttentionSpec) and mixer.head_gated)
        if after or layer.residual_scale != 1.0 or layer.post_attn_norm or layer.post_ffn_norm:
            yield RESIDUALS
        sinks = isinstance(layer.mixer, AttentionSpec) and layer.mixer.sinks
        if sinks or layer.output_scale:
            yield ROW_STEPS
        if layer.mlp is not None and not has_common_kernel(layer.mlp):
            yield activate_source(layer.mlp)
        if layer.moe is not None:
            yield from expert_sources(layer.moe)
            if layer.mlp is not None:
                yield RESIDUALS
        for mixer in (layer.mixer, layer.beside):
            if isinstance(mixer, (DeltaNetSpec, ShortConvSpec, Mamba2Spec)):
                yield from recurrent_sources(mixer)


def _each_once(sources: Iterable[KernelSource | None]) -> list[KernelSource]:
    return list(dict.fromkeys(source for source in sources if source is not None))


def _cache_sources(segment: SegmentSpec) -> Iterator[KernelSource | None]:
    """What stores the rows of a segment, and reads them for a prompt."""
    fmt_k, fmt_v = FORMATS[segment.type_k], FORMATS[segment.type_v]
    if segment.tail is None and not stores_rows(segment.type_k, segment.type_v):
        pass  # full pages of a ladder
    elif segment.stores_at_once:
        yield from (store_source(fmt_k), store_source(fmt_v))
    else:
        yield from (group_source(fmt_k, "k"), group_source(fmt_v, "v"))
    if segment.rotation_k or segment.rotation_v:
        yield KernelSource("store/rotate_rows")
    yield decode_k_source(segment.type_k)
    yield decode_v_source(segment.type_v)


@contextmanager
def _kernels_ahead(
    embedding_type: str,
    matrix_types: Iterable[str],
    model: ModelSpec,
    cache: CacheConfig,
    on_kernel: OnKernel,
) -> Iterator[bool]:
    """See `Backend.compiling_ahead`; if all kernels are compiled, they are linked, which takes some
    milliseconds."""
    prompt, generated = needed_kernels(embedding_type, matrix_types, model, cache)
    sources = _each_once([*prompt, *generated])
    with compiling_ahead(sources, on_kernel=on_kernel) as all_compiled:
        if all_compiled:
            for source in sources:
                specialized(source)
        yield all_compiled
