"""`localkv perplexity`: how well a model predicts a text, with one cache or with many."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from localkv.cache.cache_checks import check_before_rope, check_exact_rows
from localkv.cache.scales import check_scales, read_kv_scales, require_scales
from localkv.cli.model.file import check_model_is_named
from localkv.cli.model.loading import all_warnings, load_llm
from localkv.cli.options import flag, json_option, option
from localkv.cli.options.cache_pairs import fitting_pairs, parse_pairs
from localkv.cli.options.loading import loading_options
from localkv.cli.output.messages import warn
from localkv.cli.output.picture_file import check_plot
from localkv.cli.output.text_output import TextOutput, check_writable
from localkv.cli.parsing.command import Command
from localkv.cli.parsing.option_types import Whole
from localkv.cli.parsing.prompt import read_file, without_final_newline
from localkv.cli.perplexity.base import base_writer, check_base_options, open_base
from localkv.cli.perplexity.calibrate import calibrate_kv
from localkv.cli.perplexity.needle import find_needles
from localkv.cli.perplexity.plot import plot
from localkv.cli.perplexity.progress import ChunkProgress
from localkv.cli.perplexity.report import (
    CacheResult,
    divergence_lines,
    sweep_lines,
    to_json,
)
from localkv.errors import UsageError

if TYPE_CHECKING:
    from localkv.config import CacheConfig, KVScales
    from localkv.engine.token_scores import TokenScores
    from localkv.llm import LLM
    from localkv.quality.base_file import BaseFile, BaseWriter

DEFAULT_N_CTX = 512  # llama-perplexity's

_TEXT_OPTIONS: list[click.Parameter] = [
    option(
        "-f",
        "--file",
        panel="Text",
        required=True,
        metavar="FILE",
        help="The text, UTF-8, unchanged except for one final line break; - is stdin.",
    ),
    option(
        "--chunks",
        panel="Text",
        type=Whole(-1),
        default=-1,
        show_default=True,
        metavar="N",
        help="Most chunks to evaluate; -1 takes the whole text.",
    ),
]

_MEASURE_OPTIONS: list[click.Parameter] = [
    flag(
        "--kl-divergence",
        panel="Measure",
        help="Compare with an f16 cache too, in the same run.",
    ),
    option(
        "base_path",
        "--base",
        panel="Measure",
        metavar="FILE",
        help="Compare with a file of --save-base instead of an f16 cache.",
    ),
    option(
        "--save-base",
        panel="Measure",
        metavar="FILE",
        help="Write the logits of the f16 cache of --kl-divergence or --sweep; without these, of "
        "the cache that is measured.",
    ),
    flag(
        "--prefill-exact",
        panel="Measure",
        help="Let the tokens of a batch (-ub) see each other's K and V unpacked, and only earlier "
        "batches through the cache. Engines that pack only after the prompt measure "
        "this way, which hides most of the cost.",
    ),
    option(
        "--sweep",
        panel="Measure",
        metavar="PAIRS",
        help="Measure these caches and compare each with an f16 one: K/V,K/V,... such as "
        "f16/f16,bf16/f16, or pure (K as V), or all.",
    ),
    flag(
        "--needle",
        panel="Measure",
        help="Instead, hide a sentence in the text, a quarter, half and all of a context back, and "
        "measure how often and how surely it is recalled: with an f16 cache and the one that is "
        "asked for, or those of --sweep.",
    ),
    option(
        "calibrate_file",
        "--calibrate-kv",
        panel="Measure",
        metavar="FILE",
        help="Instead, run the text through an f32 cache, and write the largest K and V of each "
        "head to a file for --kv-scales.",
    ),
    option(
        "--plot",
        "plot_file",
        panel="Output",
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
        values |= {"kv_tail": None, "kv_sink": None}  # they are those of the pairs
    if calibrate_file is not None:
        values |= {"cache_type_k": "f32", "cache_type_v": "f32", "preset": None}
        values |= {"kv_profile": None, "kv_bits": None, "kv_budget": None, "kv_ladder": None}
        values |= {"cache_type_k_swa": None, "cache_type_v_swa": None, "swa_full": False}
        values |= {"kv_tail": None, "kv_sink": None}
    text = without_final_newline(read_file(file, "the text"))
    llm = load_llm(values)
    from localkv.quality.chunks import text_chunks
    from localkv.quality.scores import base_cache
    from localkv.quality.statistics import divergence, perplexity

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
        plot(
            results,
            plot_file,
            heading=title + (mode and f", {mode}"),
            config=llm.config,
        )


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
                "--calibrate-kv measures nothing else",
                hint="leave out --sweep and --kl-divergence",
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
                f"--save-base writes one pair of types, not -ct{side}-swa {name} besides",
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
    from localkv.quality.scores import joined, score_chunks
    from localkv.quality.statistics import perplexity

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
    "llama-perplexity does. --kl-divergence and --sweep compare every prediction with that of the "
    "same model with an f16 cache.",
)
