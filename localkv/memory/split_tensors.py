"""Tensors of older files that are taken apart when they are loaded, and what is made of them.

`attn_kv_b` becomes the two stacks that newer files hold (`loader/weights.py`): memory of
their own, and nothing of the tensor is read again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from localkv.arch.spec import LatentAttentionSpec
from localkv.formats import FORMATS
from localkv.memory.footprints import FOOTPRINTS

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec
    from localkv.loader.gguf_header import TensorInfo

_SPLIT = re.compile(r"blk\.(\d+)\.attn_kv_b\.weight")
FLOATS = ("f32", "f16", "bf16")
"""Types that are transposed as they are; others become F16."""


def split_by(tensor: TensorInfo, config: ModelSpec) -> LatentAttentionSpec | None:
    """The layer's attention, by which a tensor is taken apart; None for all others."""
    match = _SPLIT.fullmatch(tensor.name)
    if match is None or int(match[1]) >= config.n_layers:
        return None
    mixer = config.layers[int(match[1])].mixer
    return mixer if isinstance(mixer, LatentAttentionSpec) else None


def split_bytes(tensors: Iterable[TensorInfo], config: ModelSpec, backend: str) -> int:
    """Bytes of all that is made of tensors: rows, where they are the machine's, and their layout
    for products."""
    footprint, total = FOOTPRINTS[backend], 0
    for tensor in tensors:
        spec = split_by(tensor, config)
        if spec is None:
            continue
        turned = tensor.format if tensor.format.name in FLOATS else FORMATS["f16"]
        for fmt, shape in (
            (turned, (spec.n_heads, spec.latent_dim, spec.nope_dim)),
            (tensor.format, (spec.n_heads, spec.value_dim, spec.latent_dim)),
        ):
            total += footprint.copied_bytes(fmt, shape, is_looked_up=False)
            if footprint.is_of_host():
                total += math.prod(shape[:-1]) * fmt.row_bytes(shape[-1])
    return total
