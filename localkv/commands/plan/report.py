"""A memory plan as text for people, as JSON for programs, and as a picture."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from localkv.cache.cache_checks import keeps_latents
from localkv.cache.layout import context_bytes, kv_bytes_per_token
from localkv.commands.model import memory_json
from localkv.commands.options import DEFAULT_BATCH
from localkv.commands.output import one_line, table
from localkv.commands.pictures import COLOURS, MUTED, name_ends, quiet, save, title, token_ticks
from localkv.config import CacheConfig
from localkv.errors import byte_size, counted
from localkv.memory.advice import rounding_cost
from localkv.memory.fit import beyond_training, check_parts_fit, type_flags
from localkv.memory.plan import bits_per_weight

if TYPE_CHECKING:
    from localkv.arch.spec import CacheGroup, ModelSpec
    from localkv.cache.ladder import Pair
    from localkv.commands.plan.model import PlannedModel
    from localkv.memory.advice import PairFit, QuantFit, Recommendation
    from localkv.memory.plan import MemoryPlan, ModelMemory
    from localkv.system.machine_memory import Budget


@dataclass(frozen=True)
class Plan:
    """All that was found out.

    Attributes:
        model, memory, cache, budget: the request.
        why_backend: why the memory is planned for that backend.
        pairs, quants, recommendation: the answer.
        model_flags: name the model and its device on a command line; empty if there is no file.
    """

    model: PlannedModel
    memory: ModelMemory
    cache: CacheConfig
    budget: Budget
    why_backend: str
    pairs: list[PairFit]
    quants: list[QuantFit]
    recommendation: Recommendation
    model_flags: list[str]

    @property
    def warnings(self) -> list[str]:
        lines = [risk.reason for risk in self.model.risks]
        return [*lines, *beyond_training(self.cache.n_ctx, self.model.config)]

    def why_nothing_runs(self, *, n_ctx: int | None) -> str | None:
        """One line if `complete` would refuse every pair; mapped weights need not fit.

        Args:
            n_ctx: tokens that are asked for, or None if the shortest context would do.
        """

        def resident(pair: Pair) -> int:
            cache = replace(self.cache, type_k=pair[0], type_v=pair[1], n_ctx=n_ctx or 1)
            return self.memory.plan(cache).resident

        pair = min((fit.pair for fit in self.pairs), key=resident)
        if resident(pair) <= self.budget.n_bytes:
            return None
        times = f"{self.cache.n_sequences} times " if self.cache.n_sequences > 1 else ""
        what = f"{times}{n_ctx} tokens don't fit" if n_ctx else "no context fits"
        of_several = ", the smallest of these pairs," if len(self.pairs) > 1 else ""
        return (
            f"{what}: with {_name(pair)}{of_several} the model takes {byte_size(resident(pair))}, "
            f"but {byte_size(self.budget.n_bytes)} is {self.budget.source}"
        )

    @property
    def row_flags(self) -> list[str]:
        """What was asked for of the rows that are kept, whatever their types."""
        flags = ["--swa-full"] if self.cache.swa_full else []
        for flag, number in (("--kv-tail", self.cache.kv_tail), ("--kv-sink", self.cache.kv_sink)):
            flags += [] if number is None else [flag, str(number)]
        if self.memory.n_batch != DEFAULT_BATCH:
            flags += ["-ub", str(self.memory.n_batch)]
        return flags

    @property
    def command(self) -> str | None:
        """The recommendation as a command line, or as the flags alone where there is no file."""
        advice = self.recommendation
        if advice.pair is None or advice.quant is not None:
            return None
        flags = f"-c {advice.n_ctx} {type_flags(advice.pair)}"
        for flag, type_name in (
            ("-ctk-swa", self.cache.type_k_swa),
            ("-ctv-swa", self.cache.type_v_swa),
        ):
            flags += f" {flag} {type_name}" if type_name else ""
        if self.cache.type_k_rope != CacheConfig.type_k_rope:
            flags += f" -ctk-rope {self.cache.type_k_rope}"
        flags = " ".join([flags, *self.row_flags])
        if not self.model_flags:
            return flags
        named = shlex.join(self.model_flags)
        if self.model.has_template:
            return f"localkv chat {named} {flags}"
        return f'localkv complete {named} {flags} -p "Once upon a time"'


@dataclass(frozen=True)
class PlacedPlan:
    """A model that is divided over devices, with the recommended pair of types.

    Attributes:
        memory: of the model in its places.
        cache: with the pair.
        budgets: memory, by device.
        notes: what was chosen, and why.
    """

    memory: ModelMemory
    cache: CacheConfig
    budgets: Mapping[str, Budget]
    notes: list[str]

    @property
    def _parts(self) -> list[tuple[str, str, MemoryPlan]]:
        """Each device, what it has in words, and its bytes."""
        placement, plan = self.memory.placement, self.memory.plan(self.cache)
        assert placement is not None
        places = plan.places or ((placement.devices[0], plan),)
        words = placement.in_words(self.memory.config)
        return [
            (device, line.partition(": ")[2], own)
            for line, (device, own) in zip(words, places, strict=True)
        ]

    def lines(self) -> list[str]:
        """The places as they are printed."""
        rows = [("place", "weights", "K + V", "scratch", "total", "of", "parts")]
        for device, words, own in self._parts:
            budget = self.budgets.get(device)
            rows.append(
                (
                    device.upper(),
                    byte_size(own.weights),
                    byte_size(own.cache_k + own.cache_v),
                    byte_size(own.scratch),
                    byte_size(own.total),
                    "unknown" if budget is None else byte_size(budget.n_bytes),
                    words,
                )
            )
        return [f"Places, with {_name(self.cache.shown_types)}:", *table(rows), *self.notes]

    def json(self) -> list[dict[str, Any]]:
        """Its part of `--json`."""
        return [
            {"device": device, "parts": words, **memory_json(own)}
            for device, words, own in self._parts
        ]

    def check(self) -> None:
        """Refuse it if a device has no room for its part.

        Raises:
            DoesNotFitError: names the device.
        """
        check_parts_fit(self.memory, self.cache, self.budgets)


def plan_lines(plan: Plan) -> list[str]:
    """The plan as it is printed."""
    config, cache = plan.model.config, plan.cache
    some = plan.pairs[0].plan
    sequences = f"{cache.n_sequences} sequences of " if cache.n_sequences > 1 else ""
    mapped = f", {byte_size(some.weights_mapped)} of them mapped" if some.weights_mapped else ""
    if not some.weights_allocated:
        mapped = ", mapped"
    if some.weights_decoded:
        mapped += f", {byte_size(some.weights_decoded)} of them decoded to float32"
    if some.weights_by_row:
        mapped += f", and {byte_size(some.weights_by_row)} that is read by row"
    facts = [
        ("model", one_line(f"{config.name}: {config.architecture}, ")
         + f"{counted(config.n_layers, 'layer')}, "
         + "".join(f"{group_words(group, config)}, " for group in config.groups)
         + f"trained with {config.n_ctx_train} tokens"),
        ("weights", f"{byte_size(some.weights)}{mapped}, {plan.model.quant}, "
         f"{bits_per_weight(plan.model.tensors):.3g} bits per weight"),
        ("scratch", f"at most {byte_size(some.scratch)}, in batches of {plan.memory.n_batch}"),
        *([("adapters", byte_size(some.adapters))] if some.adapters else []),
        *_rounding_facts(plan),
        *_state_facts(plan),
        *_draft_facts(plan),
        ("memory", f"{byte_size(plan.budget.n_bytes)}, {plan.budget.source}; "
         f"backend {plan.memory.backend} ({plan.why_backend})"),
        ("context", f"{sequences}{cache.n_ctx} tokens (-c)"),
    ]  # fmt: skip
    groups = ["", *_group_table(plan)] if len(config.groups) > 1 else []
    return [
        *(f"{label:<9}{text}" for label, text in facts),
        "",
        *_pair_table(plan),
        *groups,
        "",
        "The longest context with other types of weights:",
        *_quant_table(plan),
        "",
        *_advice(plan),
    ]


def _rounding_facts(plan: Plan) -> list[tuple[str, str]]:
    """What products cost that round activations to 8 bits, if there are some."""
    cost = rounding_cost(plan.memory)
    if cost is None:
        return []
    text = f"round activations to 8 bits beside {cost.type_name}; KLD {cost.least:.4f} to "
    text += f"{cost.most:.4f} with two small models, 0 with --activations exact"
    return [("products", text)]


def _state_facts(plan: Plan) -> list[tuple[str, str]]:
    """What recurrent layers take, if there are some."""
    some = plan.pairs[0].plan
    if not some.states:
        return []
    text = f"{byte_size(some.states)} of recurrent layers, float32 with any K and V"
    if some.checkpoints:
        text += f", and at most {byte_size(some.checkpoints)} of checkpoints"
    return [("states", text)]


def _draft_facts(plan: Plan) -> list[tuple[str, str]]:
    """What a model that drafts takes, if there is one."""
    draft, own = plan.pairs[0].plan.draft, plan.memory.draft
    if draft is None or own is None:
        return []
    types = "/".join(own.cache.shown_types)
    return [
        (
            "draft",
            f"{byte_size(draft.total)}: weights {byte_size(draft.weights)}, K and V of "
            f"{min(plan.cache.n_ctx, own.memory.config.n_ctx_train)} tokens in {types} "
            f"{byte_size(draft.cache_k + draft.cache_v)}, scratch {byte_size(draft.scratch)}",
        )
    ]


def _pair_table(plan: Plan) -> list[str]:
    sides = ("K/V", "K", "V", "K + V")
    if keeps_latents(plan.model.config.groups):
        sides = ("latents", "latents", "rotated keys", "both")
    name, *parts = sides
    rows = [(name, "bits", "per token", *parts, "total", "fits", "longest context")]
    for fit in plan.pairs:
        k, v = fit.plan.cache_k, fit.plan.cache_v
        rows.append(
            (
                _types(fit.pair, plan),
                f"{fit.bits:.4g}",
                byte_size(_bytes_per_token(plan, fit.pair)),
                byte_size(k),
                byte_size(v),
                byte_size(k + v),
                byte_size(fit.plan.total),
                _fits(fit, plan.budget),
                _tokens(fit.longest),
            )
        )
    lines = table(rows)
    if any(_fits(fit, plan.budget) == "slowly" for fit in plan.pairs):
        lines.append("slowly: there is no room for all mapped weights, so they are read again")
    return lines


def _group_table(plan: Plan) -> list[str]:
    """Where the bytes of one cache are: the recommended one, or the first."""
    advised = [fit for fit in plan.pairs if fit.pair == plan.recommendation.pair]
    fit = (advised or plan.pairs)[0]
    shares, config = fit.plan.groups, plan.model.config
    rows = [("layers", "KV heads", "sees", "K/V", "tokens kept", "K", "V", "K + V")]
    for share, group in zip(shares, config.groups, strict=True):
        rows.append(
            (
                str(share.layers),
                f"{group.n_kv_heads} of {dims(group)}",
                sight(group),
                _name((share.type_k, share.type_v)),
                str(share.n_rows),
                byte_size(share.cache_k),
                byte_size(share.cache_v),
                byte_size(share.cache_k + share.cache_v),
            )
        )
    return [f"Where the bytes of {_name(fit.pair)} are:", *table(rows)]


def _bytes_per_token(plan: Plan, pair: Pair) -> int:
    type_k_rope = plan.cache.type_k_rope
    return kv_bytes_per_token(*pair, plan.model.config, type_k_rope=type_k_rope)


def _fits(fit: PairFit, budget: Budget) -> str:
    if fit.fits:
        return "yes"
    return "slowly" if fit.plan.resident <= budget.n_bytes else "no"


def _quant_table(plan: Plan) -> list[str]:
    types = (_types(pair, plan) for pair in plan.quants[0].longest)
    rows = [("weights", "bits", "bytes", *types)]
    for quant in plan.quants:
        own = " (this one)" if quant.is_own else ""
        contexts = map(_tokens, quant.longest.values())
        row = (f"{quant.name.upper()}{own}", f"{quant.bits:.3g}", byte_size(quant.n_bytes))
        rows.append((*row, *contexts))
    return table(rows)


def _tokens(n_tokens: int) -> str:
    return str(n_tokens) if n_tokens else "none"


def _advice(plan: Plan) -> list[str]:
    lines = [f"recommended: {plan.recommendation.reason}"]
    return lines if plan.command is None else [*lines, plan.command]


def group_words(group: CacheGroup, config: ModelSpec) -> str:
    """The heads of a group, and how many layers it has if there are others."""
    heads = f"{counted(group.n_kv_heads, 'KV head')} of {dims(group)}"
    if group.is_latent:
        heads = f"latents of {group.key_dim} for K and V, {group.value_dim} rotated channels"
    if len(config.groups) == 1 and not group.reach:
        return heads
    kind = "chunks" if group.chunk else "a window"
    window = f" with {kind} of {group.reach}" if group.reach else ""
    return f"{heads} in {counted(len(group.layers), 'layer')}{window}"


def dims(group: CacheGroup) -> str:
    """Channels of a head."""
    if group.value_dim == group.key_dim:
        return f"{group.key_dim}"
    return f"{group.key_dim} (V: {group.value_dim})"


def sight(group: CacheGroup) -> str:
    """How far back a token sees."""
    if group.chunk:
        return f"chunks of {group.chunk}"
    return f"{group.window} tokens" if group.window else "all"


def _name(pair: Pair) -> str:
    return "/".join(pair)


def _types(pair: Pair, plan: Plan) -> str:
    """A pair's name; of latents K's type alone, since V is a view of them."""
    return pair[0] if keeps_latents(plan.model.config.groups) else _name(pair)


def plan_json(plan: Plan) -> dict[str, Any]:
    """The object that `--json` prints; sizes are bytes, contexts tokens."""
    config, advice = plan.model.config, plan.recommendation
    some, rounding = plan.pairs[0].plan, rounding_cost(plan.memory)
    return {
        "model": {
            "path": plan.model.path,
            "name": config.name,
            "architecture": config.architecture,
            "n_layers": config.n_layers,
            "groups": [asdict(group) for group in config.groups],
            "n_ctx_train": config.n_ctx_train,
            "quant": plan.model.quant,
            "bits_per_weight": bits_per_weight(plan.model.tensors),
        },
        "backend": plan.memory.backend,
        "why_backend": plan.why_backend,
        "memory": asdict(plan.budget),
        "n_ctx": plan.cache.n_ctx,
        "n_sequences": plan.cache.n_sequences,
        "n_batch": plan.memory.n_batch,
        "weights_mapped": some.weights_mapped,
        "weights_allocated": some.weights_allocated,
        "weights_by_row": some.weights_by_row,
        "weights_decoded": some.weights_decoded,
        "adapters": some.adapters,
        "scratch": some.scratch,
        "rounded_activations": None if rounding is None else asdict(rounding),
        "states": some.states,
        "checkpoints": some.checkpoints,
        **({} if some.draft is None else {"draft": memory_json(some.draft)}),
        "pairs": [_pair_json(plan, fit) for fit in plan.pairs],
        "quants": [
            {
                "type": quant.name,
                "is_own": quant.is_own,
                "bytes": quant.n_bytes,
                "bits_per_weight": quant.bits,
                "longest_context": {_name(pair): n for pair, n in quant.longest.items()},
            }
            for quant in plan.quants
        ],
        "recommendation": {
            "type_k": advice.pair[0] if advice.pair else None,
            "type_v": advice.pair[1] if advice.pair else None,
            "n_ctx": advice.n_ctx,
            "quant": advice.quant,
            "reason": advice.reason,
            "command": plan.command,
        },
        "warnings": plan.warnings,
    }


def _pair_json(plan: Plan, fit: PairFit) -> dict[str, Any]:
    return {
        "type_k": fit.pair[0],
        "type_v": fit.pair[1],
        "bits_per_value": fit.bits,
        "bytes_per_token": _bytes_per_token(plan, fit.pair),
        "cache_k": fit.plan.cache_k,
        "cache_v": fit.plan.cache_v,
        "total": fit.plan.total,
        "groups": [asdict(group) for group in fit.plan.groups],
        "fits": fit.fits,
        "longest_context": fit.longest,
    }


POINTS = 256
"""Points of a line, about."""


def draw(plan: Plan, path: str) -> None:
    """Write the picture: from no context to the longest that is of interest, on linear scales.

    Where a line meets the dashed one is the longest context that fits.
    """
    from matplotlib.figure import Figure

    config, cache = plan.model.config, plan.cache
    n_ctx = max(config.n_ctx_train, cache.n_ctx)
    unit, factor = ("GiB", 1 << 30) if _most(plan, n_ctx) >= 1 << 30 else ("MiB", 1 << 20)
    left = (plan.budget.n_bytes - plan.pairs[0].plan.weights - plan.pairs[0].plan.scratch) / factor
    figure = Figure(figsize=(8, 5), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    ends = []
    for fit, colour in zip(plan.pairs, COLOURS, strict=False):
        lengths = sorted({n_ctx, *range(0, n_ctx, max(1, n_ctx // POINTS))})
        sizes = [_bytes(plan, fit.pair, n) / factor for n in lengths]
        end = sizes[-1]
        axes.plot(lengths, sizes, color=colour, linewidth=1.6)
        ends.append((end, f"{'/'.join(fit.pair)}  {end:#.3g} {unit}", colour))
    top = 1.06 * max(end for end, _, _ in ends)
    name_ends(axes, n_ctx, ends, least=0.042 * top)
    if 0 < left < top:
        axes.axhline(left, color=MUTED, linestyle="--", linewidth=1)
        axes.annotate(
            f"{left:.3g} {unit} left beside weights and scratch",
            (0.01 * n_ctx, left),
            xytext=(0, 4),
            textcoords="offset points",
            color=MUTED,
            fontsize=8.5,
        )
    if cache.n_ctx < n_ctx:
        axes.axvline(cache.n_ctx, color=MUTED, linestyle=":", linewidth=1)
    axes.set_xlim(0, n_ctx)
    axes.set_ylim(0, top)
    axes.set_xticks(*token_ticks(n_ctx))
    each = f" in each of {cache.n_sequences} sequences" if cache.n_sequences > 1 else ""
    axes.set_xlabel(f"tokens of context{each}")
    axes.set_ylabel(f"K and V ({unit})")
    title(axes, f"{config.name}: KV cache by types of K/V")
    quiet(axes)
    save(figure, path)


def _most(plan: Plan, n_ctx: int) -> int:
    return max(_bytes(plan, fit.pair, n_ctx) for fit in plan.pairs)


def _bytes(plan: Plan, pair: Pair, n_ctx: int) -> int:
    """The bytes of the rows of K and V; layers with a window stop growing."""
    cache = replace(plan.cache, type_k=pair[0], type_v=pair[1], n_ctx=n_ctx)
    return cache.n_sequences * context_bytes(cache, plan.model.config, plan.memory.n_batch)
