"""`localkv perplexity`: how well a model predicts a text, with one cache or with many."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from localkv.cache.cache_checks import check_before_rope, check_exact_rows
from localkv.cache.profile import check_scales, read_kv_scales, require_scales, write_kv_scales
from localkv.commands.cache_pairs import fitting_pairs, parse_pairs
from localkv.commands.loading_options import loading_options
from localkv.commands.model import all_warnings, load_llm
from localkv.commands.model_file import check_model_is_named
from localkv.commands.options import MEASURE, OUTPUT, TEXTS, json_option
from localkv.commands.output import ProgressLine, TextOutput, check_writable, note, table, warn
from localkv.commands.parsing import Command, Whole
from localkv.commands.pictures import (
    INK,
    MIXED,
    MUTED,
    TICKS,
    check_plot,
    family_colour,
    family_marker,
    name_points,
    quiet,
    save,
    title,
)
from localkv.commands.texts import read_file, without_final_newline
from localkv.errors import UsageError, counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from localkv.arch.spec import ModelSpec
    from localkv.config import CacheConfig, KVScales
    from localkv.engine.logprobs import TokenScores
    from localkv.llm import LLM
    from localkv.quality.base_file import BaseFile, BaseWriter
    from localkv.quality.scores import Divergence, Estimate


DEFAULT_N_CTX = 512  # llama-perplexity's

_TEXT_OPTIONS: list[click.Parameter] = [
    TEXTS.option(
        "-f --file",
        required=True,
        metavar="FILE",
        help="The text, UTF-8, unchanged except for one final line break; - is stdin.",
    ),
    TEXTS.option(
        "--chunks",
        type=Whole(-1),
        default=-1,
        help="Most chunks to evaluate; -1 takes the whole text.",
    ),
]

_MEASURE_OPTIONS: list[click.Parameter] = [
    MEASURE.flag("--kl-divergence", help="Compare with an f16 cache too, in the same run."),
    MEASURE.option(
        "base_path --base",
        metavar="FILE",
        help="Compare with a file of --save-base instead of an f16 cache.",
    ),
    MEASURE.option(
        "--save-base",
        metavar="FILE",
        help="Write the logits of the f16 cache of --kl-divergence or --sweep; without these, of "
        "the cache that is measured.",
    ),
    MEASURE.flag(
        "--prefill-exact",
        help="Let the tokens of a batch (-ub) see each other's K and V unpacked, and only earlier "
        "batches through the cache. Engines that pack only after the prompt measure "
        "this way, which hides most of the cost.",
    ),
    MEASURE.option(
        "--sweep",
        metavar="PAIRS",
        help="Measure these caches and compare each with an f16 one: K/V,K/V,... such as "
        "f16/f16,bf16/f16, or pure (K as V), or all.",
    ),
    MEASURE.flag(
        "--needle",
        help="Instead, hide a sentence in the text, a quarter, half and all of a context "
        "back, and measure how often and how surely it is recalled. It compares an f16 "
        "cache with the one that is asked for, or with the pairs of --sweep.",
    ),
    MEASURE.option(
        "calibrate_file --calibrate-kv",
        metavar="FILE",
        help="Instead, run the text through an f32 cache, and write the largest K and V of each "
        "head to a file for --kv-scales.",
    ),
    OUTPUT.option(
        "--plot plot_file",
        metavar="FILE",
        help="Draw the sweep, divergence against bits, as a picture (.png, .svg, .pdf).",
    ),
    json_option(),
]


def _run(
    *,
    file: str,
    chunks: int,
    kl_divergence: bool,
    base_path: str | None,
    save_base: str | None,
    prefill_exact: bool,
    sweep: str | None,
    plot_file: str | None,
    calibrate_file: str | None,
    needle: bool,
    as_json: bool,
    **values: Any,
) -> None:
    check_model_is_named(values)
    compare = kl_divergence or base_path is not None or sweep is not None
    _check(chunks, sweep, plot_file, calibrate_file)
    if needle:
        _check_needle()
    if save_base is not None and not compare:
        _check_base_types(values)
    check_base_options(base_path, save_base, compare=compare, prefill_exact=prefill_exact)
    if values["kv_k_before_rope"]:
        check_before_rope(values["kv_profile"], values["kv_scales"])
        if calibrate_file is not None:
            raise UsageError(
                "--calibrate-kv measures K as it is after RoPE", hint="leave out --kv-k-before-rope"
            )
    scales, exact = None, dict[str, Any]()
    if sweep is not None:
        scales = _sweep_scales(sweep, values["kv_scales"])
        values |= {"cache_type_k": "f16", "cache_type_v": "f16", "kv_scales": None}
        values["preset"] = values["kv_profile"] = values["kv_bits"] = None
        values["kv_budget"] = values["kv_ladder"] = None
        exact = {name: values[name] for name in ("kv_tail", "kv_sink")}
        values |= {"kv_tail": None, "kv_sink": None}  # the pairs have their own
    if calibrate_file is not None:
        values |= {"cache_type_k": "f32", "cache_type_v": "f32", "preset": None}
        values |= {"kv_profile": None, "kv_bits": None, "kv_budget": None, "kv_ladder": None}
        values |= {"cache_type_k_swa": None, "cache_type_v_swa": None, "swa_full": False}
        values |= {"kv_tail": None, "kv_sink": None}
    text = without_final_newline(read_file(file, "the text"))
    llm = load_llm(values)
    from localkv.quality.scores import base_cache, divergence, perplexity, text_chunks

    tokenizer = llm.tokenizer
    for line in all_warnings(llm):
        warn(line)
    caches = [llm.cache]
    if sweep is not None:
        caches = [
            replace(llm.cache, type_k=type_k, type_v=type_v, kv_scales=scales, **exact)
            for type_k, type_v in fitting_pairs(sweep, llm.config, scales is not None)
        ]
        check_exact_rows(caches, llm.config.groups)
        for cache in caches:
            check_scales(cache, llm.config)
            llm.check_further_cache(cache)
    ids = llm.tokenize(text, add_special=not needle)
    if needle:
        f16 = base_cache(llm.cache.n_ctx)
        if sweep is None and llm.cache.types != f16.types:
            llm.check_further_cache(f16)
            caches.insert(0, f16)
        find_needles(llm, ids, caches, {"path": file, "n_tokens": len(ids)} if as_json else None)
        return
    pieces = text_chunks(
        ids,
        llm.cache.n_ctx,
        bos_id=tokenizer.bos_id if tokenizer.add_bos else None,
        limit=chunks if chunks >= 0 else None,
    )
    if calibrate_file is not None:
        facts = {"path": file, "n_tokens": len(ids), "n_chunks": len(pieces)}
        calibrate_kv(llm, pieces, calibrate_file, facts if as_json else None)
        return
    base: CacheConfig | BaseFile | None = None
    if base_path is not None:
        base = open_base(base_path, llm, pieces)
    elif compare:
        base = base_cache(llm.cache.n_ctx)
        llm.check_further_cache(base)
    elif save_base is not None:
        base = llm.cache
    started = time.perf_counter()
    with base_writer(save_base, llm, base, pieces) as writer:
        scores = _score(llm, pieces, caches, base, writer, prefill_exact)
    seconds = time.perf_counter() - started
    results = [
        CacheResult(cache, perplexity(s.nll), divergence(s) if compare else None)
        for cache, s in zip(caches, scores, strict=True)
    ]
    mode = f"prefill exact in batches of {llm.engine.n_batch}" if prefill_exact else ""
    with TextOutput(None) as out:
        if as_json:
            facts = {"path": file, "n_tokens": len(ids), "n_chunks": len(pieces)}
            facts["n_scored"] = len(scores[0].nll)
            compared = base if compare else None
            report = to_json(llm, facts, compared, results, seconds, prefill_exact=prefill_exact)
            out.write(json.dumps(report, ensure_ascii=False))
        elif sweep is not None:
            out.write(
                "\n".join(sweep_lines(results, llm.config, llm.engine.n_batch))
                + (mode and f"\n{mode}")
            )
        else:
            if results[0].divergence is not None:
                out.write("\n".join([*divergence_lines(results[0]), "", ""]))
            ppl = results[0].ppl
            out.write(f"Final estimate: PPL = {ppl.value:.4f} +/- {ppl.error:.5f}")
            out.write(mode and f", {mode}")
    if plot_file is not None:
        title = f"{llm.config.name}, {llm.cache.n_ctx} tokens of context"
        plot(results, plot_file, heading=title + (mode and f", {mode}"), config=llm.config)


def _check(
    chunks: int, sweep: str | None, plot_file: str | None, calibrate_file: str | None
) -> None:
    """Refuse options that can't work before anything is loaded."""
    if chunks == 0:
        raise UsageError("--chunks 0 leaves nothing to measure", hint="-1 takes the whole text")
    if sweep is not None:
        parse_pairs(sweep)
        profile = ("kv_profile", "kv_bits", "kv_budget", "kv_ladder")
        if _on_command_line("cache_type_k", "cache_type_v", "preset", *profile):
            raise UsageError(
                "--sweep names the cache types",
                hint="leave out -ctk, -ctv, --preset, --kv-profile, --kv-bits and --kv-budget",
            )
    if calibrate_file is not None:
        swa = ("cache_type_k_swa", "cache_type_v_swa", "swa_full", "kv_tail", "kv_sink")
        kv = ("kv_scales", "kv_profile", "kv_bits", "kv_budget", "kv_ladder")
        if _on_command_line("cache_type_k", "cache_type_v", "preset", *kv, *swa):
            raise UsageError(
                "--calibrate-kv measures with an f32 cache",
                hint="leave out -ctk, -ctv, -ctk-swa, -ctv-swa, --swa-full, --kv-tail, "
                "--kv-sink, --preset, --kv-scales, --kv-profile, --kv-bits and --kv-budget",
            )
        if sweep is not None or _on_command_line(
            "kl_divergence", "base_path", "save_base", "prefill_exact"
        ):
            raise UsageError(
                "--calibrate-kv measures nothing else", hint="leave out --sweep and --kl-divergence"
            )
        check_writable(Path(calibrate_file))
    if plot_file is not None:
        if sweep is None:
            raise UsageError("--plot draws what --sweep measures", hint="add --sweep pure")
        check_plot(plot_file)


def _check_needle() -> None:
    """Refuse options that a needle has no use for."""
    others = {
        "kl_divergence": "--kl-divergence",
        "base_path": "--base",
        "save_base": "--save-base",
        "prefill_exact": "--prefill-exact",
        "calibrate_file": "--calibrate-kv",
        "plot_file": "--plot",
        "chunks": "--chunks",
    }
    named = [flag for name, flag in others.items() if _on_command_line(name)]
    if named:
        raise UsageError(
            f"--needle measures recall alone, without {' and '.join(named)}",
            hint="run it on its own; --sweep names several caches",
        )


def _check_base_types(values: Mapping[str, Any]) -> None:
    """Refuse types of layers with a window that differ: a base says one pair of types."""
    for side in "kv":
        name = values[f"cache_type_{side}_swa"]
        if name not in (None, values[f"cache_type_{side}"]):
            raise UsageError(
                f"--save-base writes one pair of types, not -ct{side}-swa {name} as well",
                hint="leave it out, or add --kl-divergence, whose base is f16",
            )


def _on_command_line(*names: str) -> bool:
    ctx = click.get_current_context()
    return any(ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE for name in names)


def _sweep_scales(sweep: str, path: str | None) -> KVScales | None:
    """The scales that a sweep's types share."""
    types = [name for pair in parse_pairs(sweep) for name in pair]
    if path is not None or sweep.lower() not in ("all", "pure"):
        require_scales(types, path is not None)
    return None if path is None else read_kv_scales(path)


def _score(
    llm: LLM,
    pieces: list[list[int]],
    caches: list[CacheConfig],
    base: CacheConfig | BaseFile | None,
    save_base: BaseWriter | None,
    prefill_exact: bool,
) -> list[TokenScores]:
    """The scores of the whole text with each cache."""
    from localkv.quality.scores import joined, perplexity, score_chunks

    engine = llm.engine
    found: list[list[TokenScores]] = []
    by_chunk = score_chunks(
        engine.model,
        pieces,
        caches,
        base=base,
        save_base=save_base,
        n_batch=engine.n_batch,
        prefill_exact=prefill_exact,
    )
    with ChunkProgress(len(pieces)) as progress:
        for scores in by_chunk:
            found.append(scores)
            if progress.on_terminal:
                nll = joined([chunk[0] for chunk in found]).nll
                name = f"K {caches[0].type_k} V {caches[0].type_v}"
                progress.show_chunk(len(found), f"{name}, PPL {perplexity(nll).value:.4f}")
    return [joined(list(chunks)) for chunks in zip(*found, strict=True)]


def check_base_options(
    path: str | None, save_path: str | None, *, compare: bool, prefill_exact: bool
) -> None:
    """Refuse options that can't work before anything is loaded."""
    if path is not None:
        if save_path is not None:
            raise UsageError("--base reads a base and --save-base writes one, use one")
        from localkv.quality.base_file import BaseFile

        BaseFile(path)  # raises the error, if any
    if save_path is not None:
        if prefill_exact and not compare:
            raise UsageError(
                "--save-base writes the logits of a cache, which --prefill-exact bypasses",
                hint="leave out one of them, or add --kl-divergence",
            )
        check_writable(Path(save_path))


def open_base(path: str, llm: LLM, chunks: Sequence[Sequence[int]]) -> BaseFile:
    """The base in a file, if it was made from these chunks with this vocabulary."""
    from localkv.quality.base_file import BaseFile

    base = BaseFile(path)
    base.check(llm.cache.n_ctx, llm.config.n_vocab, _vocabulary(llm), chunks)
    return base


def base_writer(
    path: str | None, llm: LLM, base: CacheConfig | BaseFile | None, chunks: Sequence[Sequence[int]]
) -> AbstractContextManager[BaseWriter | None]:
    """A writer of the base to a file, or nothing if no file is wanted."""
    from localkv.quality.base_file import BaseFacts, BaseFile, BaseWriter
    from localkv.quality.scores import n_scored

    if path is None or base is None or isinstance(base, BaseFile):
        return nullcontext()
    facts = BaseFacts(
        model=llm.config.name,
        type_k=base.type_k,
        type_v=base.type_v,
        kv_rotation=base.kv_rotation,
        n_ctx=llm.cache.n_ctx,
        n_vocab=llm.config.n_vocab,
        vocabulary=_vocabulary(llm),
    )
    return BaseWriter(path, facts, chunks, n_scored(llm.cache.n_ctx))


def _vocabulary(llm: LLM) -> str:
    from localkv.quality.base_file import vocabulary_hash

    return vocabulary_hash(llm.gguf.metadata.strings("tokenizer.ggml.tokens"))


def calibrate_kv(
    llm: LLM, pieces: list[list[int]], path: str, text_facts: dict[str, Any] | None
) -> None:
    """Measure and write the scales; `text_facts` are for JSON, None for a line of text."""
    from localkv.quality.ranges import calibrate

    scales = None
    with ChunkProgress(len(pieces)) as progress:
        found = calibrate(
            llm.engine.model,
            pieces,
            n_ctx=llm.cache.n_ctx,
            kv_rotation=llm.cache.kv_rotation,
            n_batch=llm.engine.n_batch,
        )
        for n_done, scales_so_far in enumerate(found, start=1):
            scales = scales_so_far
            if progress.on_terminal:
                progress.show_chunk(n_done, "K and V of every head")
    assert scales is not None  # a text has a chunk
    write_kv_scales(path, scales)
    with TextOutput(None) as out:
        if text_facts is not None:
            facts = {**identity(llm), "text": text_facts, "n_ctx": llm.cache.n_ctx}
            facts["kv_scales"] = {"path": path, **asdict(scales)}
            out.write(json.dumps(facts, ensure_ascii=False))
        else:
            out.write(
                f"{path}: K up to {max(map(max, scales.absmax_k)):.4g}, "
                f"V up to {max(map(max, scales.absmax_v)):.4g}, "
                f"in {counted(scales.n_layers, 'layer')} of "
                f"{counted(scales.n_kv_heads, 'KV head')}, over {counted(scales.n_tokens, 'token')}"
            )


def find_needles(
    llm: LLM, ids: Sequence[int], caches: Sequence[CacheConfig], text_facts: dict[str, Any] | None
) -> None:
    """Measure and print; `text_facts` are for JSON, None for a table.

    Raises:
        UsageError: the text or the context is too short.
    """
    from localkv.quality.needle import plant, recall

    tokenizer = llm.tokenizer
    planted = plant(
        lambda text: llm.tokenize(text, add_special=False),
        ids,
        llm.cache.n_ctx,
        bos_id=tokenizer.bos_id if tokenizer.add_bos else None,
    )
    found = []
    with ChunkProgress(len(caches) * len(planted)) as progress:
        for cache in caches:
            for needles in planted:
                one = recall(llm.engine.model, cache, needles, n_batch=llm.engine.n_batch)
                found.append((cache, one))
                if progress.on_terminal:
                    progress.show_chunk(len(found), f"{one.right} of {one.count} found")
    with TextOutput(None) as out:
        if text_facts is not None:
            recalled = [{**types_json(cache), **asdict(one)} for cache, one in found]
            facts = {**identity(llm), "text": text_facts, "n_ctx": llm.cache.n_ctx}
            out.write(json.dumps({**facts, "needles": recalled}, ensure_ascii=False))
            return
        rows = [("K/V", "tokens back", "found", "ln p")]
        for cache, one in found:
            right = f"{one.right} of {one.count}"
            rows.append((cache.types_text, f"{one.distance:,}", right, f"{one.log_p:.3g}"))
        out.write("\n".join(table(rows)))


PACKED_BITS = 9.0
"""Types to choose between have fewer; f16, bf16 and f32 would take most of the picture."""
FEW = 3
"""Points that are worth a picture of their own."""
MOST_BEYOND = 4
"""Points outside the axes that are listed."""
MOST_LABELS = 40
"""Points up to which every one gets its name; beyond, only single types and those that no other
beats do."""

Point = tuple[float, float, str]
"""Bits per value, KLD and name."""


def plot(results: Sequence[CacheResult], path: str, *, heading: str, config: ModelSpec) -> None:
    """Draw mean KLD on a log scale, where a divergence of 0 has no place, against bits per value.

    A pair is labelled K/V, and with one name where both are the same.
    """
    from matplotlib.figure import Figure

    points = _points(results, config)
    shown, beyond = cut(points)
    figure = Figure(figsize=(8, 5), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    title(axes, heading)
    axes.set_xlabel("bits per cached value, mean of K and V")
    axes.set_ylabel("mean KL divergence from f16 (nats)")
    quiet(axes, grid="y")
    if shown:
        _draw(axes, shown)
    if beyond:
        axes.annotate(
            _beyond_words(beyond), (0.015, 0.02), xycoords="axes fraction", fontsize=8, color=MUTED
        )
    save(figure, path)


def _beyond_words(points: Sequence[Point]) -> str:
    in_order = sorted(points, key=lambda point: ("/" in point[2], point))
    lines = [f"{name}: {kld:.1g}" for _, kld, name in in_order[:MOST_BEYOND]]
    more = len(points) - len(lines)
    lines += [f"and {counted(more, 'pair')} more"] if more else []
    return "\n".join([f"with more than {PACKED_BITS:g} bits", *lines])


def _points(results: Sequence[CacheResult], config: ModelSpec) -> list[Point]:
    from localkv.cache.layout import mean_bits

    points = []
    for result in results:
        assert result.divergence is not None
        name = result.cache.type_k
        if result.cache.type_v != name:
            name += f"/{result.cache.type_v}"
        if result.divergence.kld.value > 0:
            bits = mean_bits((result.cache.type_k, result.cache.type_v), config)
            points.append((bits, result.divergence.kld.value, name))
        else:
            note(f"{name} is not in the picture: its divergence is 0")
    return points


def cut(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Points that the axes show, and the others, if there are enough of packed types."""
    packed = [point for point in points if point[0] < PACKED_BITS]
    if len(packed) < FEW:
        return list(points), []
    return packed, [point for point in points if point[0] >= PACKED_BITS]


def _draw(axes: Axes, points: Sequence[Point]) -> None:
    best = unbeaten(points)
    least, most = min(p[1] for p in points), max(p[1] for p in points)
    axes.set_yscale("log")
    axes.set_ylim(least / 2, most * 2)
    bits = [p[0] for p in points]
    if max(bits) < PACKED_BITS:
        axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    room = 0.12 * max(1.0, max(bits) - min(bits))
    axes.set_xlim(min(bits) - room, max(bits) + room)
    axes.plot([p[0] for p in best], [p[1] for p in best], color=INK, linewidth=1.1, zorder=1)
    for x, kld, name in sorted(points, key=lambda point: "/" not in point[2]):
        axes.scatter(
            [x], [kld], s=26, c=_colour(name), marker=_marker(name), linewidths=0, zorder=3
        )
    rest = sorted(set(points) - set(best), key=lambda point: ("/" in point[2], -point[1]))
    if len(points) > MOST_LABELS:
        rest = [point for point in rest if "/" not in point[2]]
    named = [
        (x, kld, name, MUTED if "/" in name else _colour(name)) for x, kld, name in (*best, *rest)
    ]
    corners = [point[:2] for point in best]
    name_points(axes, named, others=[point[:2] for point in points], line=corners)


def _colour(name: str) -> str:
    return MIXED if "/" in name else family_colour(name)


def _marker(name: str) -> str:
    return "o" if "/" in name else family_marker(name)


def unbeaten(points: Sequence[Point]) -> list[Point]:
    """(bits, KLD, name) of those that no other has both fewer bits and less divergence than."""
    best: list[Point] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


class ChunkProgress(ProgressLine):
    """Shows which chunk is evaluated, and how long the others will take."""

    def __init__(self, n_chunks: int) -> None:
        super().__init__()
        self.n_chunks = n_chunks
        self._started = time.perf_counter()

    def show_chunk(self, n_done: int, text: str) -> None:
        left = (time.perf_counter() - self._started) / n_done * (self.n_chunks - n_done)
        self.show(f"chunk {n_done} of {self.n_chunks}: {text}, {left:.0f} s left")


MIB = 1 << 20


@dataclass(frozen=True)
class CacheResult:
    """The measurements of one cache; without a divergence if it was compared with nothing."""

    cache: CacheConfig
    ppl: Estimate
    divergence: Divergence | None


def divergence_lines(result: CacheResult) -> list[str]:
    """The statistics in llama-perplexity's words and order."""
    d = result.divergence
    assert d is not None
    lines = [
        "====== Perplexity statistics ======",
        f"Mean PPL(Q)                   : {_plain(result.ppl)}",
        f"Mean PPL(base)                : {_plain(d.ppl_base)}",
        f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * d.correlation:6.2f}%",
        f"Mean ln(PPL(Q)/PPL(base))     : {_plain(d.log_ppl_ratio)}",
        f"Mean PPL(Q)/PPL(base)         : {_plain(d.ppl_ratio)}",
        f"Mean PPL(Q)-PPL(base)         : {_plain(d.ppl_difference)}",
    ]
    lines += ["", "====== KL divergence statistics ======"]
    lines.append(f"Mean    KLD: {_plain(d.kld)}")
    lines += [f"{_place(at)} KLD: {value:10.6f}" for at, value in d.kld_percentiles.items()]
    lines += ["", "====== Token probability statistics ======"]
    lines.append(f"Mean    Δp: {_percent(d.delta_p)}")
    lines += [f"{_place(at)} Δp: {100 * p:6.3f}%" for at, p in d.delta_p_percentiles.items()]
    lines.append(f"RMS Δp    : {_percent(d.rms_delta_p)}")
    lines.append(f"Same top p: {_percent(d.same_top)}")
    return lines


_NAMES = {100.0: "Maximum", 50.0: "Median ", 0.0: "Minimum"}


def _place(percentile: float) -> str:
    return _NAMES.get(percentile) or f"{percentile:4.1f}%  "


def _plain(estimate: Estimate) -> str:
    return f"{estimate.value:10.6f} ± {estimate.error:10.6f}"


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:6.3f} ± {100 * estimate.error:5.3f} %"


def sweep_lines(results: Sequence[CacheResult], config: ModelSpec, n_batch: int) -> list[str]:
    """One row per cache, in the order they were named."""
    from localkv.cache.layout import context_bytes, mean_bits_of

    header = ("K/V", "bits", "KV MiB", "PPL", "+/-", "KLD mean", "+/-", "KLD 99 %", "RMS Δp")
    rows = [(*header, "same top")]
    for result in results:
        cache, d = result.cache, result.divergence
        assert d is not None
        rows.append(
            (
                "/".join(cache.shown_types),
                f"{mean_bits_of(cache, config):g}",
                f"{context_bytes(cache, config, n_batch) / MIB:.3f}",
                f"{result.ppl.value:.4f}",
                f"{result.ppl.error:.4f}",
                f"{d.kld.value:.3g}",
                f"{d.kld.error:.1g}",
                f"{d.kld_percentiles[99]:.3g}",
                f"{100 * d.rms_delta_p.value:.3f} %",
                f"{100 * d.same_top.value:.2f} %",
            )
        )
    return table(rows)


def types_json(cache: CacheConfig) -> dict[str, Any]:
    """The types of a cache; with a budget those that pages begin in, and all of its ladder."""
    type_k, type_v = cache.shown_types
    if cache.kv_budget is None:
        return {"type_k": type_k, "type_v": type_v}
    ladder = [f"{k}/{v}" for k, v in cache.kv_ladder]
    return {"type_k": type_k, "type_v": type_v, "kv_budget": cache.kv_budget, "kv_ladder": ladder}


def _sizes_json(llm: LLM, cache: CacheConfig) -> dict[str, Any]:
    """Bits of a value, and bytes of a full context; within a budget bits differ from page to page,
    and the bytes are those that are allocated."""
    from localkv.cache.layout import context_bytes, mean_bits_of

    if cache.kv_budget is not None:
        return {"bits_per_value": None, "bytes": llm.memory.cache_k + llm.memory.cache_v}
    return {
        "bits_per_value": mean_bits_of(cache, llm.config),
        "bytes": context_bytes(cache, llm.config, llm.engine.n_batch),
    }


def to_json(
    llm: LLM,
    text: Mapping[str, Any],
    base: CacheConfig | BaseFile | None,
    results: Sequence[CacheResult],
    seconds: float,
    *,
    prefill_exact: bool,
) -> dict[str, Any]:
    """The object of `--json`. Divergences are in nats; Δp and shares are fractions, not percent."""
    found = []
    for result in results:
        cache = result.cache
        found.append(
            {
                **types_json(cache),
                **_swa_json(cache, llm.config),
                "kv_rotation": cache.kv_rotation,
                **_sizes_json(llm, cache),
                "ppl": asdict(result.ppl),
                "divergence": _divergence_json(result.divergence),
            }
        )
    return {
        **identity(llm),
        "text": dict(text),
        "n_ctx": llm.cache.n_ctx,
        "n_batch": llm.engine.n_batch,
        "prefill_exact": prefill_exact,
        "base": _base_json(base),
        "results": found,
        "seconds": seconds,
        "backend": llm.backend.name,
        "products": llm.kernels["products"],
        "warnings": all_warnings(llm),
    }


def _swa_json(cache: CacheConfig, config: ModelSpec) -> dict[str, str]:
    """The types of layers with a window, if there are any."""
    if not any(group.reach for group in config.groups):
        return {}
    type_k, type_v = cache.types_of(windowed=True)
    return {"type_k_swa": type_k, "type_v_swa": type_v}


def _base_json(base: CacheConfig | BaseFile | None) -> dict[str, str] | None:
    from localkv.quality.base_file import BaseFile

    if base is None:
        return None
    cache, file = (base.facts, {"file": base.path}) if isinstance(base, BaseFile) else (base, {})
    types = {"type_k": cache.type_k, "type_v": cache.type_v, "kv_rotation": cache.kv_rotation}
    return {**types, **file}


def identity(llm: LLM) -> dict[str, Any]:
    """The model's path, name and architecture, under "model"."""
    config = llm.config
    return {
        "model": {
            "path": str(llm.gguf.path),
            "name": config.name,
            "architecture": config.architecture,
        }
    }


def _divergence_json(divergence: Divergence | None) -> dict[str, Any] | None:
    if divergence is None:
        return None
    fields = asdict(divergence)
    for name in ("kld_percentiles", "delta_p_percentiles"):
        fields[name] = {f"{at:g}": value for at, value in fields[name].items()}
    return fields


perplexity = Command(
    "perplexity",
    examples=[
        ("How well a model predicts a text", "localkv perplexity -m model.gguf -f text.txt"),
        (
            "What a cache type costs, compared with f16",
            "localkv perplexity -m model.gguf -f text.txt -ctk q8_0 -ctv q4_0 --kl-divergence",
        ),
        (
            "All cache types in one table and one picture",
            "localkv perplexity -m model.gguf -f text.txt --sweep pure --plot sweep.png",
        ),
    ],
    essentials="-f --chunks -m -hf -c -ctk -ctv --preset --kl-divergence --sweep --plot --json",
    params=[*_TEXT_OPTIONS, *loading_options(DEFAULT_N_CTX), *_MEASURE_OPTIONS],
    callback=_run,
    help="Measure how well a model predicts a text, through its cache.\n\n"
    "The text is cut into chunks of -c tokens, and the second half of each is scored, as "
    "llama-perplexity does. --kl-divergence and --sweep compare every prediction with the same "
    "model's through an f16 cache.",
)
