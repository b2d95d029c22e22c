"""`localkv plan`: what fits in memory, from a model's header alone. No tensor, no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from localkv.commands.cache_pairs import require_cache_type
from localkv.commands.loading_options import (
    activations_option,
    adapter_arguments,
    adapter_options,
    draft_model_options,
    given_threads,
    ladder_arguments,
    ladder_options,
    offload_arguments,
    offload_options,
    override_options,
    profile_option,
    window_options,
    window_settings,
)
from localkv.commands.options import (
    KV_CACHE,
    MODEL,
    OUTPUT,
    PLAN,
    compute_options,
    context_option,
    file_argument,
    json_option,
    model_options,
    preset_option,
    preset_or_given,
    say_preset,
)
from localkv.commands.output import check_writable, warn
from localkv.commands.parsing import Command, Whole, byte_size_of
from localkv.commands.plan.model import (
    asked_profile,
    header_model,
    max_kld_option,
    model_flags,
    profile_plan,
    smoothed_memory,
    synthetic_model,
    with_adapters,
    with_draft,
)
from localkv.config import Overrides
from localkv.errors import DoesNotFitError, UsageError
from localkv.loader.known_models import KNOWN_MODELS
from localkv.quant_formats import FORMATS, KV_FORMATS
from localkv.system.threads import default_threads

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec
    from localkv.cache.ladder import Pair
    from localkv.cache.profile import KVProfile, TypeList
    from localkv.commands.plan.ladder import LadderPlan
    from localkv.commands.plan.model import PlannedModel
    from localkv.commands.plan.quality import QualityPlan
    from localkv.commands.plan.report import PlacedPlan, Plan
    from localkv.config import CacheConfig
    from localkv.memory.plan import ModelMemory
    from localkv.system.machine_memory import Budget


def _types_option(side: str, short: str) -> click.Parameter:
    return KV_CACHE.option(
        f"{short} --cache-type-{side.lower()}",
        llama_env=f"CACHE_TYPE_{side}",
        metavar="TYPES",
        callback=preset_or_given,
        help=f"Types of {side}, with commas between them; every K goes with every V. "
        "[default: f16 if the other is given, else a choice of pairs]",
    )


_PLAN_OPTIONS: list[click.Parameter] = [
    PLAN.option(
        "--memory",
        callback=byte_size_of,
        metavar="SIZE",
        help="The memory to plan for, such as 24GiB. [default: free memory of the GPU, if "
        "nvidia-ml-py is installed, else of this machine]",
    ),
    PLAN.option(
        "--sequences",
        type=Whole(1),
        default=1,
        help="Sequences that are held at the same time, each with its own context.",
    ),
    max_kld_option(),
    PLAN.option(
        "--quality",
        metavar="FILE",
        help="Choose the types of weights, and of K and V by layer if there is a KV profile, "
        "together: those that cost predictions least within --memory. FILE is what localkv "
        "calibrate --weight-types measured.",
    ),
    PLAN.option(
        "--save-types",
        metavar="FILE",
        help="Write the chosen types of weights, for localkv quantize --tensor-type-file.",
    ),
]


def _run(
    *,
    file: str | None,
    synthetic: str | None,
    all_pairs: bool,
    memory: int | None,
    sequences: int,
    plot_file: str | None,
    quality: str | None,
    save_types: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    from localkv.cache.cache_checks import check_windows
    from localkv.commands.plan.report import Plan, plan_json, plan_lines
    from localkv.config import CacheConfig
    from localkv.memory.advice import pair_fit, quant_fits, recommend, shown_pairs
    from localkv.memory.fit import chosen_context, usual_pairs
    from localkv.memory.plan import ModelMemory

    if plot_file is not None:
        from localkv.commands.pictures import check_plot

        check_plot(plot_file)
    say_preset(values, why=True)
    named = _named_pairs(values, all_pairs)
    if save_types is not None and quality is None:
        raise UsageError("--save-types writes what --quality FILE chooses")
    if quality is not None:
        others = {
            "types of K and V": named,
            "--synthetic": synthetic,
            "--max-kld": values["max_kld"],
            "a draft model": values["draft_model"],
            "adapters": adapter_arguments(values).get("lora"),
            "--activations exact": values["activations"] != "auto",
            "--kv-budget": ladder_arguments(values),
        }
        if given := [name for name, value in others.items() if value]:
            raise UsageError(f"--quality chooses by itself, and can't be used with {given[0]}")
    if synthetic is not None and (file or values["model"] or values["hf_repo"]):
        raise UsageError("--synthetic takes the place of a file", hint="leave out -m and -hf")
    if synthetic is not None and Overrides.of(values):
        raise UsageError(
            "--synthetic has no file whose keys --rope-scale, --override-kv and others replace",
            hint="name a file with -m",
        )
    model = header_model(values, file) if synthetic is None else synthetic_model(synthetic)
    backend, why, budget = _where(values["device"], memory)
    threads = given_threads(values["threads"]) or default_threads()
    values["memory"] = memory
    profile = asked_profile(values, model)
    model_memory = ModelMemory(
        model.tensors,
        model.config,
        backend,
        min(values["batch_size"], values["ubatch_size"]),
        max(threads, given_threads(values["threads_batch"]) or 0),
        activations=values["activations"],
    )
    if lora := adapter_arguments(values).get("lora"):
        model_memory = with_adapters(model_memory, model, lora)
    if values["draft_model"] is not None:
        model_memory = with_draft(model_memory, model, values)
    with_profile = smoothed_memory(model_memory, profile)
    if values["kv_profile"] is not None:
        model_memory = with_profile  # types that are named go with the smoothed model, too
    n_ctx = chosen_context(values["n_ctx"] or 0, model.config)
    cache = CacheConfig(n_ctx=n_ctx, n_sequences=sequences, **window_settings(values))
    check_windows(cache, model.config.groups)
    if quality is not None:
        measured = _quality_plan(quality, model, with_profile, profile, cache, budget)
        _show_quality(measured, model, save_types, plot_file, as_json)
        return
    pairs = _fitting(named, cache, model.config, all_pairs) if named else shown_pairs(model_memory)
    choice = pairs if named and not all_pairs else usual_pairs(model.config)
    n_bytes = budget.n_bytes
    plan = Plan(
        model,
        model_memory,
        cache,
        budget,
        why,
        [pair_fit(model_memory, cache, pair, n_bytes) for pair in pairs],
        quant_fits(model_memory, cache, choice[:_MOST_COLUMNS], n_bytes, model.quant),
        recommend(model_memory, cache, choice, n_bytes, model.risks),
        model_flags(values, model),
    )
    for line in plan.warnings:
        warn(line)
    placed = _placed(values, plan)
    by_layer = profile and profile_plan(values, profile, with_profile, cache, budget)
    ladder = _ladder_plan(values, model, model_memory, cache, budget)
    if as_json:
        more_json: dict[str, Any] = {"profile": by_layer.json()} if by_layer else {}
        more_json |= {"ladder": ladder.json()} if ladder else {}
        more_json |= {"places": placed.json()} if placed else {}
        click.echo(json.dumps({**plan_json(plan), **more_json}, ensure_ascii=False))
    else:
        more = (
            by_layer.lines(
                plan.model_flags, plan.row_flags, "chat" if model.has_template else "complete"
            )
            if by_layer
            else []
        )
        if ladder:
            more = [*more, "", *ladder.lines()]
        if placed:
            more = [*more, "", *placed.lines()]
        click.echo("\n".join([*plan_lines(plan), *more]))
    if plot_file is not None and ladder:
        from localkv.commands.plan.ladder import draw as draw_ladder

        draw_ladder(ladder, plot_file)
    elif plot_file is not None:
        from localkv.commands.plan.report import draw

        draw(plan, plot_file)
    if placed:
        placed.check()
    elif reason := plan.why_nothing_runs(n_ctx=values["n_ctx"] or None):
        raise DoesNotFitError(reason)


def _quality_plan(
    path: str,
    model: PlannedModel,
    memory: ModelMemory,
    profile: KVProfile | None,
    cache: CacheConfig,
    budget: Budget,
) -> QualityPlan:
    """Choices of weights and of caches, from what was measured.

    Raises:
        UsageError: the profile can't be read, or is another model's.
    """
    from localkv.cache.profile import with_profile_types
    from localkv.commands.plan.quality import CacheChoice, QualityPlan
    from localkv.loader.gguf_file import open_gguf
    from localkv.loader.model_fingerprint import model_hash
    from localkv.quality.weight_profile import HINT, Curve, read_weight_profile

    if not os.path.exists(model.path):
        raise UsageError(
            "--quality needs the model itself, not only its header", hint="localkv pull fetches it"
        )
    weights = read_weight_profile(path)
    if weights.model != model_hash(open_gguf(model.path)):
        raise UsageError(f"the weight profile {path} is of another model", hint=HINT)

    def choice(
        name: str, typed: CacheConfig, kld: float, types: TypeList | None = None
    ) -> CacheChoice:
        plan = memory.plan(typed)
        return CacheChoice(name, plan.cache_k + plan.cache_v, plan.scratch, kld, types)

    caches = [choice("f16", cache, 0.0)]
    for one in profile.lists if profile is not None else ():
        name = f"{one.bits:.4g} bits" + (f", tail {one.kv_tail}" if one.kv_tail else "")
        caches.append(choice(name, with_profile_types(cache, one), one.verified, one))
    return QualityPlan(weights, Curve(weights), caches, budget.n_bytes)


def _show_quality(
    plan: QualityPlan,
    model: PlannedModel,
    types_file: str | None,
    plot_file: str | None,
    as_json: bool,
) -> None:
    """Print a joint choice, and write what is asked for."""
    from pathlib import Path

    from localkv.commands.plan.quality import draw_quality, quality_json, quality_lines, type_lines
    from localkv.system.files import write_whole

    is_rounded = any(
        tensor.format.block_size > 1 for tensor in model.tensors if len(tensor.shape) > 1
    )
    text = (
        json.dumps(quality_json(plan), ensure_ascii=False)
        if as_json
        else "\n".join(quality_lines(plan, model.path, types_file, is_rounded=is_rounded))
    )
    if types_file is not None:
        check_writable(Path(types_file))
        write_whole(types_file, type_lines(plan.profile, plan.choice.types).encode())
    click.echo(text)
    if plot_file is not None:
        draw_quality(plan, plot_file)


_MOST_COLUMNS = 6
"""Pairs that the table of other types of weights has room for."""


def _ladder_plan(
    values: Mapping[str, Any],
    model: PlannedModel,
    memory: ModelMemory,
    cache: CacheConfig,
    free: Budget,
) -> LadderPlan | None:
    """What becomes of pages within a budget, if there is one.

    Raises:
        UsageError: the model can't have such a cache.
    """
    from localkv.cache.cache_checks import check_cache
    from localkv.commands.plan.ladder import LadderPlan
    from localkv.memory.fit import Budgeted

    arguments = ladder_arguments(values)
    if not arguments:
        return None
    budgeted = Budgeted.of(arguments["kv_budget"], arguments["kv_ladder"])
    cache = budgeted.cache(cache, memory.config)
    check_cache(cache, memory.config.groups)
    fitted, _ = budgeted.fitted(cache, memory, lambda: free, names_context=False)
    return LadderPlan(model.config.name, replace(fitted, n_ctx=cache.n_ctx), memory)


def _placed(values: Mapping[str, Any], plan: Plan) -> PlacedPlan | None:
    """Where the parts of the model are, if something says so, or a GPU has no room for all.

    Raises:
        UsageError: it can't be placed so.
    """
    from localkv.arch.placement import HOST, Offload
    from localkv.commands.plan.report import PlacedPlan
    from localkv.kernels.select import gpu_names
    from localkv.memory.fit import in_places
    from localkv.system.machine_memory import machine_memory

    offload = Offload.of_arguments(offload_arguments(values))
    gpus = gpu_names(values["device"], values["main_gpu"])
    fits = any(fit.fits for fit in plan.pairs)
    if plan.memory.backend != "cuda" or (offload.is_auto and len(gpus) == 1 and fits):
        return None
    if plan.memory.draft is not None:
        return None
    pair = plan.recommendation.pair or plan.pairs[0].pair
    cache = replace(plan.cache, type_k=pair[0], type_v=pair[1])
    budgets = dict.fromkeys(gpus, plan.budget)
    if (host := machine_memory()) is not None:
        budgets[HOST] = host
    memory, lines = in_places(plan.memory, cache, offload, gpus, budgets)
    return PlacedPlan(memory, cache, budgets, lines)


def _where(device: str, memory: int | None) -> tuple[str, str, Budget]:
    """The backend to plan for, the reason for it, and the memory it may take.

    Raises:
        UsageError: how much there is can't be found out.
    """
    from localkv.system.gpu_files import built_without_cuda
    from localkv.system.machine_memory import Budget, gpu_memory, machine_memory, without_runtime

    is_gpu = device == "auto" or device.startswith("cuda")
    gpu = gpu_memory() if is_gpu else None
    backend, why = "cuda" if device.startswith("cuda") else device, "as asked"
    if device == "auto" and gpu is None:
        backend, why = "cpu", "no GPU is seen"
    elif device == "auto" and built_without_cuda():
        backend, why = "cpu", "there is a GPU, but this torch was built without CUDA"
    elif device == "auto":
        backend, why = "cuda", "there is a GPU"
    if memory is not None:
        return backend, why, Budget(memory, "given with --memory")
    budget = gpu if backend == "cuda" else machine_memory()
    if budget is None:
        asked = "nvidia-ml-py sees no GPU" if backend == "cuda" else "this system doesn't tell"
        raise UsageError(
            f"the size of the memory is not known: {asked}", hint="give it: --memory 24GiB"
        )
    return backend, why, without_runtime(budget, "cuda" if backend == "cuda" else "cpu")


def _named_pairs(values: Mapping[str, Any], all_pairs: bool) -> list[Pair]:
    """The pairs that the user names; none if the choice is `plan`'s.

    Raises:
        UsageError: a type does not exist.
    """
    sides = []
    for name, flags in (
        ("cache_type_k", "-ctk/--cache-type-k"),
        ("cache_type_v", "-ctv/--cache-type-v"),
    ):
        text = values[name]
        types = [item.strip().lower() for item in (text or "").split(",") if item.strip()]
        for item in types:
            require_cache_type(item, f"{flags}: ")
        sides.append(types)
    if all_pairs:
        if any(sides):
            raise UsageError("--all plans every pair", hint="leave out -ctk, -ctv and --preset")
        return [(k, v) for k in KV_FORMATS for v in KV_FORMATS]
    if not any(sides):
        return []
    types_k, types_v = (types or ["f16"] for types in sides)
    return list(dict.fromkeys((k, v) for k in types_k for v in types_v))


def _fitting(
    pairs: list[Pair], cache: CacheConfig, config: ModelSpec, all_pairs: bool
) -> list[Pair]:
    """The pairs that fit the model's heads; named ones must fit.

    Raises:
        UsageError: one does not; the hint names the types that do.
    """
    from localkv.cache.cache_checks import check_cache
    from localkv.cache.layout import fits_head

    if all_pairs:
        return [pair for pair in pairs if all(fits_head(name, config) for name in pair)]
    for type_k, type_v in pairs:
        check_cache(replace(cache, type_k=type_k, type_v=type_v), config.groups)
    return pairs


plan = Command(
    "plan",
    examples=[
        ("Whether a model fits, with which caches and contexts", "localkv plan model.gguf"),
        ("Before it is fetched: only the header is read", "localkv plan -hf ORG/REPO:Q4_K_M"),
        ("For another machine", "localkv plan model.gguf --memory 24GiB --device cuda -c 32768"),
        ("A shape without a file", "localkv plan --synthetic llama-70b:q4_K --memory 48GiB"),
    ],
    essentials="--memory --sequences --quality -hf --synthetic -c -ctk -ctv --all -dev --plot "
    "--json",
    params=[
        file_argument(),
        *_PLAN_OPTIONS,
        *model_options(),
        MODEL.option(
            "--synthetic",
            metavar="SHAPE:TYPE",
            help="Plan for a shape instead of a file, such as llama-70b:q4_K.",
        ),
        context_option(0),
        _types_option("K", "-ctk"),
        _types_option("V", "-ctv"),
        KV_CACHE.flag("all_pairs --all", help="Plan for every pair of types."),
        preset_option(),
        profile_option(),
        *ladder_options(),
        *window_options(),
        *adapter_options(),
        *draft_model_options(),
        *compute_options("one per core"),
        *offload_options(),
        activations_option(),
        *override_options(),
        OUTPUT.option(
            "--plot plot_file",
            metavar="FILE",
            help="Draw the size of the cache over its context (.png, .svg, .pdf).",
        ),
        json_option(),
    ],
    callback=_run,
    help="Say what fits in memory: weights, KV cache and scratch, for pairs of cache types.\n\n"
    "Only the header is read. If a model on Hugging Face isn't here, only its header is fetched.",
    epilog="Exits with 1, after the table, if -c N fits with none of its pairs (the named ones, if "
    "any), or, without -c, if no context fits. 'slowly' counts as fitting.\n\n"
    f"Shapes: {', '.join(KNOWN_MODELS)}.\n\n"
    f"Types of the cache: {', '.join(KV_FORMATS)}.\n\n"
    f"Types of weights: {', '.join(fmt.name for fmt in FORMATS.values() if fmt.is_weight)}.",
)
