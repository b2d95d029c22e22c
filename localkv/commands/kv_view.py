"""K and V of a model as they are shown: magnitudes of channels, costs, and attention's shift."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from localkv.cache.profile import DEFAULT_BITS, OUTLIER, KVProfile, LayerFacts, SideFacts, TypeList
from localkv.commands.output import table
from localkv.errors import UsageError, counted
from localkv.quant_formats import KV_FORMATS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


MOST_RUNS = 12
"""Outliers of one side of a layer that are named in a terminal; --json has all."""


@dataclass(frozen=True)
class Shift:
    """How far attention moves (`quality/attention_shift.py`).

    Attributes:
        types: the cache's, in words.
        by_layer: float32 [n_heads, tokens], or None.
    """

    types: str
    by_layer: tuple[NDArray[np.float32] | None, ...]

    @property
    def worst(self) -> int:
        """The layer whose attention moves most, on average."""
        means = [-1.0 if x is None else float(x.mean()) for x in self.by_layer]
        return means.index(max(means))


@dataclass(frozen=True)
class KVView:
    """What is known of the K and V of one model.

    Attributes:
        name: the model's.
        text: what was run through it.
        n_tokens: of that.
        smoothing: strength of the smoothing that the weights were loaded with, 0 for none.
        layers: None for those without rows.
        sides: what K and V are called: latents are both.
        chosen: the types by layer that a profile gives; None without one.
        shift: None if no two caches were compared.
    """

    name: str
    text: str
    n_tokens: int
    smoothing: float
    layers: tuple[LayerFacts | None, ...]
    sides: tuple[str, str] = ("K", "V")
    chosen: TypeList | None = None
    shift: Shift | None = None

    @property
    def rows(self) -> list[tuple[int, LayerFacts]]:
        """The layers that store rows."""
        return [(i, layer) for i, layer in enumerate(self.layers) if layer is not None]

    @property
    def types(self) -> list[str]:
        """The types whose costs are known, from the most bits to the fewest."""
        known = {name for _, layer in self.rows for name in (*layer.k.kld, *layer.v.kld)}
        order = list(KV_FORMATS)
        return sorted(known, key=lambda name: (-self.bits_of(name), order.index(name)))

    def bits_of(self, name: str) -> float:
        """Bits per value of a type, in a row of K of the first layer with rows."""
        return KV_FORMATS[name].bits_per_value(self.rows[0][1].k.n_channels)

    @property
    def heading(self) -> str:
        smoothed = f", smoothed by {self.smoothing:g}" if self.smoothing else ""
        return f"{self.name}: K and V of {counted(self.n_tokens, 'token')} of {self.text}{smoothed}"


def of_profile(profile: KVProfile) -> KVView:
    """What a profile knows, with the types that it gives where nobody says how many bits, without a
    tail if it has such."""
    lists = profile.without_tail or profile.lists
    fitting = [one for one in lists if one.bits <= DEFAULT_BITS]
    return KVView(
        profile.name,
        profile.text,
        profile.n_tokens,
        profile.smoothing,
        profile.layers,
        chosen=min(fitting, key=lambda one: one.verified, default=None),
    )


@dataclass(frozen=True)
class Run:
    """Outlier channels of a head that lie side by side.

    Attributes:
        times: the largest magnitude over the median of the head's channels.
    """

    head: int
    first: int
    last: int
    times: float

    @property
    def name(self) -> str:
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"


def outlier_runs(side: SideFacts) -> list[Run]:
    """In order of head and channel."""
    import numpy as np

    absmax, median = side.channel_absmax, np.median(side.channel_absmax, axis=-1)
    runs = []
    places = enumerate(side.outliers)
    for (head, _), items in groupby(places, key=lambda item: (item[1][0], item[1][1] - item[0])):
        channels = [channel for _, (_, channel) in items]
        most = float(absmax[head, channels].max())
        times = most / float(median[head]) if median[head] else math.inf
        runs.append(Run(head, channels[0], channels[-1], times))
    return runs


def kv_lines(view: KVView) -> list[str]:
    """For people."""
    found = [view.heading, "", *_channel_table(view)]
    if named := [line for row in view.rows for line in _outlier_lines(view, *row)]:
        what = f"outlier channels, more than {OUTLIER:g} times the median of their head's"
        found += ["", f"{what} (how many times)", *named]
    if view.types:
        found += ["", "KL divergence from an f16 cache (nats), one side of one layer in the type"]
        found += _cost_table(view)
    if view.shift is not None:
        found += ["", f"attention with {view.shift.types}: how far its output moves from f16's"]
        found += _shift_table(view.shift)
    return found


def _channel_table(view: KVView) -> list[str]:
    import numpy as np

    k, v = view.sides
    rows: list[tuple[str, ...]] = [
        ("layer", f"{k} largest", "median", "outliers", f"{v} largest", "median", "outliers")
    ]
    for i, layer in view.rows:
        cells = [str(i)]
        for side in (layer.k, layer.v):
            absmax = side.channel_absmax
            cells += [f"{absmax.max():.4g}", f"{np.median(absmax):.3g}", str(len(side.outliers))]
        rows.append(tuple(cells))
    return table(rows)


def _outlier_lines(view: KVView, index: int, layer: LayerFacts) -> Iterator[str]:
    for name, side in zip(view.sides, (layer.k, layer.v), strict=True):
        runs = sorted(outlier_runs(side), key=lambda run: -run.times)
        shown = sorted(runs[:MOST_RUNS], key=lambda run: (run.head, run.first))
        heads = [
            f"head {head}: " + ", ".join(f"{run.name} ({run.times:.2g})" for run in items)
            for head, items in groupby(shown, key=lambda run: run.head)
        ]
        more = [f"and {len(runs) - len(shown)} more"] if len(runs) > len(shown) else []
        if runs:
            yield f"layer {index} {name}  {'; '.join([*heads, *more])}"


def _cost_table(view: KVView) -> list[str]:
    k, v = view.sides
    rows: list[tuple[str, ...]] = [
        ("type", "bits", f"{k}, all layers", "most", f"{v}, all", "most")
    ]
    for name in view.types:
        cells = [name, f"{view.bits_of(name):g}"]
        for of in ("k", "v"):
            costs = {
                i: kld
                for i, layer in view.rows
                if (kld := getattr(layer, of).kld.get(name)) is not None
            }
            worst = max(costs, key=costs.__getitem__, default=0)
            cells += (
                [f"{sum(costs.values()):.1e}", f"layer {worst} {costs[worst]:.1e}"]
                if costs
                else ["-", "-"]
            )
        rows.append(tuple(cells))
    return table(rows)


def _shift_table(shift: Shift) -> list[str]:
    rows: list[tuple[str, ...]] = [("layer", "mean", "99 %", "most", "head", "token")]
    for i, facts in _shift_facts(shift):
        percent = (f"{100 * facts[name]:.3g} %" for name in ("mean", "p99", "most"))
        rows.append((str(i), *percent, str(facts["head"]), str(facts["token"])))
    return table(rows)


def _shift_facts(shift: Shift) -> Iterator[tuple[int, dict[str, Any]]]:
    import numpy as np

    for i, moved in enumerate(shift.by_layer):
        if moved is not None:
            head, token = np.unravel_index(int(moved.argmax()), moved.shape)
            yield (
                i,
                {
                    "mean": float(moved.mean()),
                    "p99": float(np.percentile(moved, 99)),
                    "most": float(moved.max()),
                    "head": int(head),
                    "token": int(token),
                    "by_head": moved.mean(1).tolist(),
                },
            )


def kv_facts(view: KVView) -> dict[str, Any]:
    """The view as JSON for programs, with every channel."""
    shift = view.shift
    return {
        "name": view.name,
        "text": view.text,
        "n_tokens": view.n_tokens,
        "smoothing": view.smoothing,
        "layers": [layer and {"k": _side(layer.k), "v": _side(layer.v)} for layer in view.layers],
        "shift": shift
        and {
            "types": shift.types,
            "layers": [dict(_shift_facts(shift)).get(i) for i in range(len(shift.by_layer))],
        },
    }


def _side(side: SideFacts) -> dict[str, Any]:
    import numpy as np

    absmax = side.channel_absmax
    median = np.median(absmax, axis=-1)
    return {
        "absmax": absmax.tolist(),
        "outliers": [
            {
                "head": head,
                "channel": channel,
                "absmax": float(absmax[head, channel]),
                "times": float(absmax[head, channel] / median[head]) if median[head] else None,
            }
            for head, channel in side.outliers
        ],
        "kld": dict(side.kld),
    }


def require_rows(layers: Sequence[LayerFacts | None]) -> None:
    """Refuse a model without K and V.

    Raises:
        UsageError: no layer stores rows.
    """
    if not any(layers):
        raise UsageError("this model keeps no K and V, so there is nothing to show")
