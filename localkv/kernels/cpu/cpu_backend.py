"""CPU: Numba's kernels on packed weights and a packed cache.

Attention and the store that goes with it are compiled by Numba and keep pages in an order of their
own (`shared/cpu/page_order.py`), so a cache is written and read by this backend only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import ModelSpec
from localkv.cache.arrays import Array
from localkv.config import CacheConfig
from localkv.kernels.backend import Backend
from localkv.kernels.compose import compose
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.cpu.attention.latent_attention import LatentAttention
from localkv.kernels.cpu.attention.packed_attention import PackedAttention
from localkv.kernels.cpu.jit.compile_ahead import OnKernel, compiling_ahead
from localkv.kernels.cpu.jit.kernel_source import is_stored
from localkv.kernels.cpu.jit.needed_kernels import needed_kernels
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.kept_sums import kept_sums_cpu
from localkv.kernels.cpu.layer import CpuLayer
from localkv.kernels.cpu.linear.embedding import Embedding
from localkv.kernels.cpu.linear.products import CpuProducts
from localkv.kernels.cpu.methods import methods
from localkv.kernels.cpu.row_operations import activate_cpu, apply_rope_cpu, norm_cpu
from localkv.kernels.cpu.runtime.chain import Scratch
from localkv.kernels.cpu.store.group_store import store_groups_cpu
from localkv.kernels.cpu.store.rotate import rotate_cpu
from localkv.kernels.cpu.store.store_kv import store_kv_cpu
from localkv.kernels.cpu.token_program import TokenPrograms
from localkv.kernels.moe import moe_mlp
from localkv.kernels.primitives import Primitives
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.simd.lanes import LANES
from localkv.system.turns import Turns


@dataclass(frozen=True)
class _LateWeights:
    """As `LatePreparation` has it.

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
    """The backend of machines without a supported GPU."""
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
            moe_mlp=partial(
                moe_mlp, matmul=products.matmul, linear=products.linear, activate=activate_cpu
            ),
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
        turns=Turns(forget),
        compiling_ahead=_kernels_ahead,
        kept_sums=kept_sums_cpu,
        **layer.operations(),
    )


@contextmanager
def _kernels_ahead(
    embedding_type: str,
    matrix_types: Iterable[str],
    model: ModelSpec,
    cache: CacheConfig,
    on_kernel: OnKernel,
) -> Iterator[bool]:
    """As `Backend.compiling_ahead`; if those of prompts are all compiled, they are linked, and so
    are those of generated tokens that are, which takes some milliseconds."""
    first, later = needed_kernels(embedding_type, matrix_types, model, cache)
    with compiling_ahead(first, later, on_kernel=on_kernel) as all_compiled:
        if all_compiled:
            for source in (*first, *filter(is_stored, later)):
                specialized(source)
        yield all_compiled
