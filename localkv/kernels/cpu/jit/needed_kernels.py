"""The kernels that a model and its cache need, known before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from localkv.arch.spec import AttentionSpec, DeltaNetSpec, Mamba2Spec, ModelSpec, ShortConvSpec
from localkv.cache.ladder import stores_rows
from localkv.cache.layout import SegmentSpec, cache_segments, typed_groups
from localkv.config import CacheConfig
from localkv.kernels.cpu.attention.kernels import (
    decode_k_source,
    decode_v_source,
    rows_per_tile,
    runs_in_blocks,
    score_source,
    weigh_source,
)
from localkv.kernels.cpu.attention.latent_attention import latents_source
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.layers.chains import (
    ACTIVATIONS,
    RESIDUALS,
    ROW_STEPS,
    activate_source,
    has_common_kernel,
)
from localkv.kernels.cpu.layers.latents import LATENT_STEPS
from localkv.kernels.cpu.linear.embedding import embedding_source
from localkv.kernels.cpu.linear.jobs import IN_PLACE_FORMATS
from localkv.kernels.cpu.linear.late_panels import LATE_PRODUCTS
from localkv.kernels.cpu.linear.layouts import PANEL_FORMAT_NAMES
from localkv.kernels.cpu.linear.matrices import product_sources
from localkv.kernels.cpu.linear.products import head_source
from localkv.kernels.cpu.moe.experts import expert_sources
from localkv.kernels.cpu.recurrent.steps import recurrent_sources
from localkv.kernels.cpu.runtime.thread_pool import HELPERS
from localkv.kernels.cpu.store.store_kv import group_source, store_source
from localkv.quant_formats import FORMATS


def needed_kernels(
    embedding_type: str, matrix_types: Iterable[str], config: ModelSpec, cache: CacheConfig
) -> tuple[list[KernelSource], list[KernelSource]]:
    """Those of a first prompt, in the order in which they are needed, and those of what follows.

    Only those that a model of one architecture may do without are left to chance, so this says
    what to compile ahead, not what there has to be.

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
    """Of steps between products that only some models have."""
    for layer in config.kinds:
        gated = isinstance(layer.mixer, AttentionSpec) and layer.mixer.gated
        if gated or layer.residual_scale != 1.0 or layer.post_attn_norm or layer.post_ffn_norm:
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
