"""Cache types for tests: pairs that are few but leave no type out, and scales by head."""

from __future__ import annotations

from localkv.arch.spec import ModelSpec
from localkv.config import KVScales
from localkv.quant_formats import KV_FORMATS, TOKEN_FORMATS

NAMES = list(TOKEN_FORMATS)
N = len(NAMES)
BY_HEAD = [name for name, fmt in TOKEN_FORMATS.items() if fmt.scales_by_head]
BY_ROW = [name for name, fmt in TOKEN_FORMATS.items() if fmt.row_planes]


def partners(name: str) -> list[str]:
    """Types to go with one: itself and two others, of which every type is one for two types."""
    return [NAMES[(NAMES.index(name) + step) % len(NAMES)] for step in (0, 1, 4)]


PAIRS = [(name, other) for name in NAMES for other in partners(name)]
"""K and V: every type is thrice on each side."""

GROUPED_PAIRS = [
    pair
    for i, name in enumerate(name for name, fmt in KV_FORMATS.items() if fmt.group_tokens > 1)
    for pair in ((name, NAMES[5 * i % N]), (NAMES[(5 * i + 2) % N], name), (name, name))
]
"""Types that pack several tokens together on either side, and on both."""

NEW_PAIRS = [
    pair
    for name in (*BY_HEAD, *BY_ROW)
    for other in (NAMES if TOKEN_FORMATS[name].block_size == 1 else partners(name))
    for pair in dict.fromkeys(((name, other), (other, name)))
]
"""Floats with scales of rows and heads, with all others on the other side; integers with some."""


def scales_of(config: ModelSpec, absmax_k: float = 448.0, absmax_v: float = 448.0) -> KVScales:
    """Scales of a model whose heads are all as large."""
    return KVScales(
        config.architecture,
        config.name,
        config.n_layers,
        config.groups[0].n_kv_heads,
        config.groups[0].key_dim,
        rotation_k=0,
        rotation_v=0,
        n_tokens=1,
        absmax_k=((absmax_k,) * config.groups[0].n_kv_heads,) * config.n_layers,
        absmax_v=((absmax_v,) * config.groups[0].n_kv_heads,) * config.n_layers,
    )
