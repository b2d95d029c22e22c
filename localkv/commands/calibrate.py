"""`localkv calibrate`: measure a model's KV profile, and write it."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from localkv import __version__
from localkv.cache.layout import DEFAULT_TAIL
from localkv.commands.cache_pairs import require_cache_type
from localkv.commands.loading_options import OVERRIDES, loading_options, unoffered_values
from localkv.commands.model import all_warnings, load_llm
from localkv.commands.model_file import named_or_shipped
from localkv.commands.options import MEASURE, OUTPUT, TEXTS, json_option
from localkv.commands.output import ProgressLine, TextOutput, check_writable, note, say, table, warn
from localkv.commands.parsing import Command, Whole
from localkv.commands.pictures import check_plot
from localkv.commands.texts import read_file, without_final_newline
from localkv.config import MOST_EXACT
from localkv.errors import UsageError, counted, printable
from localkv.quant_formats import KV_FORMATS

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec
    from localkv.cache.profile import KVProfile
    from localkv.llm import LLM
    from localkv.loader.smoothing import Smoothing
    from localkv.model import Transformer
    from localkv.quality.kv_profile import Plan
    from localkv.quality.weight_profile import WeightProfile


BUILT_IN = "the built-in text"
CHUNK, DEFAULT_TOKENS = 2048, 2048
LEAST_CHUNK = 64

_USED = (
    *("model", "hf_repo", "hf_file", "offline", "batch_size", "ubatch_size", "threads"),
    *("threads_batch", "device", "kv_rotation", "fit", "mlock", "use_mmap", *OVERRIDES),
    "activations",
)
"""Options as other commands have them."""


def _run(
    *,
    file: str | None,
    output: str | None,
    tokens: int | None,
    minutes: float | None,
    types: str | None,
    bits: str | None,
    smooth: float,
    kv_tail: str,
    plot_file: str | None,
    weight_types: str | None,
    imatrix: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    unnamed = named_or_shipped(values)
    if tokens is not None and minutes is not None:
        raise UsageError("--tokens and --time both say how much is measured", hint="give one")
    if output is not None:
        check_writable(Path(output))
    if plot_file is not None:
        check_plot(plot_file)
    if weight_types is not None:
        of_cache = {"--types": types, "--bits": bits, "--time": minutes, "--plot": plot_file}
        given = [flag for flag, value in of_cache.items() if value is not None]
        if given:
            raise UsageError(f"{given[0]} is for a KV profile, and --weight-types for weights")
        if output is None:
            raise UsageError("--weight-types needs a name for the file", hint="-o weights.json")
        if unnamed:
            note(unnamed)
        _measure_weights(weight_types, imatrix, file, tokens, Path(output), as_json, values)
        return
    if imatrix is not None:
        raise UsageError("--imatrix is for costs of weights", hint="with --weight-types q8_0,q4_0")
    names = types_of(types)
    budgets = budgets_of(bits)
    tails = tails_of(kv_tail, names)
    text = None if file is None else without_final_newline(read_file(file, "the text"))
    if unnamed:
        note(unnamed)
    llm = load_llm({**unoffered_values(_USED), **values})
    llm.engine.check_writes()
    for line in all_warnings(llm):
        warn(line)
    from localkv.cache.profile import write_profile
    from localkv.config import preset_pairs
    from localkv.loader.chosen_cache import in_data_folder
    from localkv.loader.model_fingerprint import measured_hash
    from localkv.quality.kv_profile import BUDGETS, Plan, Results, measure, sensible_types
    from localkv.quality.scores import calibration_text

    types_measured = tuple(names or sensible_types())
    if minutes is not None:
        n_runs = _n_runs(llm.config, len(types_measured), len(budgets or BUDGETS), len(tails))
        tokens = _tokens_in(llm, minutes, n_runs)
    whole = text if text is not None else calibration_text()
    chunks = _chunks(llm, whole, tokens or DEFAULT_TOKENS)
    check_tails(tails, max(map(len, chunks)))
    plan = Plan(
        types_measured,
        tuple(budgets or BUDGETS),
        n_ctx=max(map(len, chunks)),
        kv_rotation=values["kv_rotation"],
        pairs=preset_pairs(),
        tails=tails,
    )
    check_budgets(budgets, plan.budgets, plan.least_bits(llm.config))
    digest = measured_hash(llm.gguf)
    path = Path(output) if output is not None else in_data_folder(digest)
    if output is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    seconds, bandwidth = _speed(llm)
    kept = path.with_name(f"{path.name}.part") if path.is_file() or not path.exists() else None
    results = Results(kept, repr((digest, chunks, plan, smooth, llm.backend.name, __version__)))
    if results.n_found:
        note(f"goes on after {counted(results.n_found, 'result')} that an earlier start kept")
    with CalibrateProgress() as progress:
        model, smoothing = _smoothed(llm, chunks, plan, smooth)
        profile = measure(
            model,
            chunks,
            plan,
            digest=digest,
            text=BUILT_IN if file is None else Path(file).name,
            token_seconds=seconds,
            bandwidth=bandwidth,
            smoothing=smoothing,
            on_step=progress.step,
            results=results,
        )
    write_profile(path, profile)
    results.finish()
    with TextOutput(None) as out:
        if as_json:
            facts = {"path": str(path), "seconds": progress.seconds, **report(profile)}
            out.write(json.dumps(facts, ensure_ascii=False))
        else:
            out.write("\n".join([*report_lines(profile), "", _saved(path, output, progress)]))
    if plot_file is not None:
        from localkv.commands.kv_plot import draw
        from localkv.commands.kv_view import of_profile

        draw(of_profile(profile), plot_file)


def _measure_weights(
    types: str,
    imatrix: str | None,
    file: str | None,
    tokens: int | None,
    output: Path,
    as_json: bool,
    values: dict[str, Any],
) -> None:
    """Measure a weight profile, and write it."""
    from localkv.kernels.cpu.quantize.rows import ONLY_WEIGHTED
    from localkv.kernels.select import select_backend
    from localkv.loader.importance import read_importance
    from localkv.loader.quantised_format import tensor_type
    from localkv.quality.scores import calibration_text
    from localkv.quality.weight_costs import WeightPlan, check_measurable, measure_weights
    from localkv.quality.weight_profile import write_weight_profile

    formats = []
    for word in filter(None, map(str.strip, types.split(","))):
        fmt = tensor_type(word)
        if fmt is None:
            raise UsageError(
                f"--weight-types: {word!r} is not a type of weights", hint="as in q8_0,q5_0,q4_0"
            )
        if fmt.name in ONLY_WEIGHTED and imatrix is None:
            raise UsageError(
                f"--weight-types: {fmt.name} needs an importance matrix", hint="--imatrix FILE"
            )
        formats.append(fmt)
    if not formats:
        raise UsageError("--weight-types names no type", hint="as in q8_0,q5_0,q4_0")
    importance = None if imatrix is None else read_importance(imatrix)
    text = (
        calibration_text() if file is None else without_final_newline(read_file(file, "the text"))
    )
    llm = load_llm({**unoffered_values(_USED), **values})
    check_measurable(llm.config)
    if llm.backend.name != "cpu":
        raise UsageError("costs of weights are measured on a CPU", hint="--device cpu")
    n_tokens = tokens or DEFAULT_WEIGHT_TOKENS
    chunk = _chunks(llm, text, min(n_tokens, CHUNK))[0]
    gguf = llm.gguf
    llm.close()
    plan = WeightPlan(tuple(dict.fromkeys(formats)), importance, n_ctx=len(chunk))
    with CalibrateProgress() as progress:
        profile = measure_weights(
            gguf,
            select_backend("cpu"),
            chunk,
            plan,
            text=BUILT_IN if file is None else Path(file).name,
            on_step=progress.step,
        )
    write_weight_profile(output, profile)
    with TextOutput(None) as out:
        if as_json:
            facts = {"path": str(output), "seconds": progress.seconds, **asdict(profile)}
            out.write(json.dumps(facts, ensure_ascii=False))
        else:
            use = f"{printable(output)}: measured in {progress.seconds:.0f} s; localkv plan "
            use += "--quality reads it"
            out.write("\n".join([*weight_lines(profile), "", use]))


DEFAULT_WEIGHT_TOKENS = 512


def weight_lines(profile: WeightProfile) -> list[str]:
    """What was found of weights, for people."""
    from localkv.quality.weight_profile import kind_of

    rows = [("all matrices in", "KLD predicted", "verified")]
    rows += [(w.type, f"{w.predicted:.2e}", f"{w.verified:.2e}") for w in profile.whole]
    names = {
        kind: [m for m in profile.matrices if kind_of(m.name) == kind] for kind in profile.kinds
    }
    types = [one.type for one in profile.whole]
    kinds = [("", "8-bit activations", *types)]
    for kind, matrices in names.items():
        sums = [
            f"{sum(m.kld[name] for m in matrices):.2e}" if name in matrices[0].kld else "-"
            for name in types
        ]
        kinds.append((kind, f"{profile.kinds[kind]:.2e}", *sums))
    kinds.append(("all together", f"{profile.all_activations:.2e}", *["" for _ in types]))
    layers = [(f"layer {i}", f"{cost:.2e}") for i, cost in enumerate(profile.layers[:-1])]
    layers.append(("output", f"{profile.layers[-1]:.2e}"))
    return [
        f"{counted(profile.n_tokens, 'token')} of {printable(profile.text)}, "
        f"{profile.n_scored} predictions compared with those of the same file in float32",
        "",
        *table(rows),
        "",
        "KLD by kind of matrix: of 8-bit activations, and of types with exact activations",
        *table(kinds),
        "",
        "KLD of 8-bit activations by layer",
        *table(layers),
    ]


def _smoothed(
    llm: LLM, chunks: list[list[int]], plan: Plan, alpha: float
) -> tuple[Transformer, Smoothing]:
    """The model with large channels of K and V made smaller, loaded again for that.

    The one that was loaded is closed before, so that its weights are in memory once.
    """
    from localkv.kernels.select import select_backend
    from localkv.loader.smoothing import NO_SMOOTHING, smoothing_of
    from localkv.loader.weights import load_model
    from localkv.quality.ranges import channel_sizes

    model, gguf, device = llm.engine.model, llm.gguf, llm.backend.name
    if not alpha:
        return model, NO_SMOOTHING
    sizes = channel_sizes(model, chunks, n_ctx=plan.n_ctx)
    smoothing = smoothing_of(llm.config, llm.gguf.tensors, sizes.k, sizes.v, alpha, q=sizes.q)
    if not (smoothing.k or smoothing.v):
        note("no layer's weights can hold the smoothing of K or V")
        return model, NO_SMOOTHING
    del model
    llm.close()  # its backend, too, whose chains keep weights
    return load_model(gguf, select_backend(device), smoothing=smoothing)[0], smoothing


def _chunks(llm: LLM, text: str, n_tokens: int) -> list[list[int]]:
    """The first tokens of a text, in chunks of one length."""
    from localkv.quality.scores import text_chunks

    tokenizer, ids = llm.tokenizer, llm.tokenize(text)
    if len(ids) < LEAST_CHUNK:
        raise UsageError(
            f"the text has {counted(len(ids), 'token')}, too few to measure with",
            hint=f"use one of at least {LEAST_CHUNK}, better {DEFAULT_TOKENS} (-f)",
        )
    n_ctx = min(CHUNK, len(ids), n_tokens, llm.config.n_ctx_train)
    bos_id = tokenizer.bos_id if tokenizer.add_bos else None
    return text_chunks(ids, n_ctx, bos_id=bos_id, limit=max(1, n_tokens // n_ctx))


def _speed(llm: LLM) -> tuple[float, float]:
    """Seconds of a generated token without history, and bytes per second of memory."""
    from localkv.bench.result import bandwidth

    engine = llm.engine
    engine.reset()
    engine.evaluate([0])
    best = float("inf")
    for _ in range(_SPEED_TOKENS):
        started = time.perf_counter()
        llm.backend.arrays.to_numpy(engine.evaluate([0], generated=True))
        best = min(best, time.perf_counter() - started)
    engine.reset()
    return best, bandwidth(llm.backend, _SPEED_BYTES)


_SPEED_TOKENS, _SPEED_BYTES = 8, 128 << 20


def _n_runs(config: ModelSpec, n_types: int, n_budgets: int, n_tails: int) -> float:
    """About how many runs of the whole model `measure` makes of a chunk.

    For each layer there are two runs of it and the layers after it. Measuring the errors of all
    types takes as long as some runs.
    """
    n_layers = sum(len(group.layers) for group in config.groups)
    return n_tails * (n_layers + n_types + n_budgets + _RUNS_OF_ERRORS)


def _tokens_in(llm: LLM, minutes: float, n_runs: float) -> int:
    """How many tokens can be measured in this time.

    Raises:
        UsageError: too few.
    """
    engine, best = llm.engine, float("inf")
    for _ in range(3):
        started = time.perf_counter()
        engine.logits([0] * _TIMED_TOKENS)
        best = min(best, time.perf_counter() - started)
    engine.reset()
    each = best / _TIMED_TOKENS * n_runs  # seconds
    tokens = int(60 * minutes / each) // LEAST_CHUNK * LEAST_CHUNK
    if tokens < LEAST_TIMED:
        needed = LEAST_TIMED * each / 60
        raise UsageError(
            f"--time {minutes:g}: in that time too few tokens can be measured",
            hint=f"use at least {needed:.2g} minutes, or fewer --types",
        )
    note(f"--time {minutes:g} is about {tokens} tokens")
    return tokens


_TIMED_TOKENS, LEAST_TIMED, _RUNS_OF_ERRORS = 128, 256, 8


def _saved(path: Path, output: str | None, progress: CalibrateProgress) -> str:
    use = "auto" if output is None else printable(path)
    return (
        f"{printable(path)}: measured in {progress.seconds:.0f} s; use it with --kv-profile {use}"
    )


TAILS_OF_CHUNK = 4
"""A chunk is at least this many times as long as a tail. Its second half is scored: the first token
there reads as many packed tokens as the tail has, and the last one reads three times as many."""


def types_of(text: str | None) -> list[str]:
    """The types that `--types` names, f16 in front of them; none if it is not given."""
    names = [item.strip().lower() for item in (text or "").split(",") if item.strip()]
    for name in names:
        require_cache_type(name, "--types: ")
    if text is not None and not set(names) - {"f16"}:
        raise UsageError("--types names no type to compare with f16", hint="as in q8_0,q5_1,q4_0")
    return list(dict.fromkeys(["f16", *names])) if names else []


def budgets_of(text: str | None) -> list[float]:
    """The bits per value that `--bits` names; none if it is not given."""
    if text is None:
        return []
    try:
        found = [float(item) for item in text.split(",")]
    except ValueError:
        found = [-1.0]
    if any(not 0 < bits <= 32 for bits in found):
        raise UsageError(f"--bits {text}: not a list of bits per value", hint="as in 4.5,5,6")
    return found


def tails_of(text: str, names: list[str]) -> tuple[int, ...]:
    """The tails that `--kv-tail` names."""
    items = [item.strip() for item in text.split(",")]
    are_numbers = all(item.isdecimal() and len(item) < 10 for item in items)
    tails = tuple(dict.fromkeys(map(int, items))) if are_numbers else ()
    if not tails or max(tails) > MOST_EXACT:
        raise UsageError(f"--kv-tail {text}: not a list of tokens", hint="as in 0,64")
    needing = [name for name in names if KV_FORMATS[name].group_tokens > 1]
    if needing and not any(tails):
        raise UsageError(
            f"--types {needing[0]} packs {KV_FORMATS[needing[0]].group_tokens} tokens together, "
            "and --kv-tail 0 measures types that need no tail",
            hint=f"as in --kv-tail 0,{DEFAULT_TAIL}",
        )
    return tails


def check_budgets(named: Sequence[float], budgets: Sequence[float], least: float) -> None:
    """Refuse, before anything is measured, fewer bits than the smallest of the types has.

    Args:
        named: the budgets that the user wants; each must hold some types.
        budgets: all budgets; one must.
        least: bits per value of the smallest types that rows of the model can be of.
    """
    for bits in named:
        if bits < least:
            raise UsageError(
                f"--bits {bits:g} holds none of the types; the smallest has {least:g}",
                hint=f"as in --bits {least:g}, or with smaller --types",
            )
    if max(budgets) < least:
        raise UsageError(
            f"the smallest types that go with this model's heads have {least:g} bits per value, "
            f"and {max(budgets):g} is the largest budget",
            hint=f"with other --types, or --bits {least:g}",
        )


def check_tails(tails: Sequence[int], n_tokens: int) -> None:
    """Refuse a tail that would hide what types cost.

    Where tokens read hardly any others packed, all types look alike, and fewest bits look best.

    Args:
        n_tokens: the length of a chunk.
    """
    needed = TAILS_OF_CHUNK * max(tails)
    if n_tokens < needed:
        raise UsageError(
            f"a tail of {max(tails)} tokens is measured with {needed} tokens at a time at least, "
            f"and these are {n_tokens}",
            hint="take a longer text (-f, --tokens), or --kv-tail 0",
        )


BEFORE_ESTIMATE = 3
"""Steps before time is estimated; kernels of all types are compiled in the first."""
LATEST = 20
"""Steps that tell how long one takes."""
LONG = 120
"""Seconds that are worth a line."""


class CalibrateProgress(ProgressLine):
    """A line on a terminal, else one at the start.

    Attributes:
        seconds: since it was made.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self._started = clock()
        self._latest = deque[float]([], LATEST + 1)
        self._shown = 0
        self._told = False

    @property
    def seconds(self) -> float:
        return self._clock() - self._started

    def step(self, done: int, of: int, what: str) -> None:
        """Say what is next, when `done` of all steps are done."""
        times = self._latest
        times.append(self._clock())
        self._shown += 1
        estimate = ""
        if self._shown > BEFORE_ESTIMATE:
            each = median(b - a for a, b in pairwise(times))
            left = each * (of - done)
            estimate = f", about {left:.0f} s left"
            self._tell(of - done, left)
        if what:
            self.show(f"{done} of {of}: {what}{estimate}")

    def _tell(self, steps: int, left: float) -> None:
        if not self._told and left > LONG:
            self.clear()
            say(
                f"{steps} more measurements take about {left / 60:.0f} minutes; fewer tokens "
                "(--tokens, --time) or types (--types) take less"
            )
        self._told = True


def report_lines(profile: KVProfile) -> list[str]:
    """What was found, for people."""
    from localkv.cache.layout import in_words

    rows = [("bits", "tail", "KLD predicted", "verified", "K/V by layer")]
    rows += [
        (
            f"{one.bits:.3f}",
            str(one.kv_tail or 0),
            f"{one.predicted:.2e}",
            f"{one.verified:.2e}",
            in_words(one.layers),
        )
        for one in sorted(profile.lists, key=lambda one: (one.kv_tail or 0, one.bits))
    ]
    outliers = [
        f"layer {i} {side} {len(facts.outliers)}"
        for i, layer in enumerate(profile.layers)
        if layer is not None
        for side, facts in (("K", layer.k), ("V", layer.v))
        if facts.outliers
    ]
    ratios = [one.verified / one.predicted for one in profile.uniform if one.predicted > 0]
    lines = [
        f"{counted(profile.n_tokens, 'token')} of {printable(profile.text)}, "
        f"{profile.n_scored} predictions compared with an f16 cache's",
        f"outlier channels: {', '.join(outliers) if outliers else 'none'}",
    ]
    if ratios:
        lines.append(
            "one type for all layers costs "
            f"{min(ratios):.2g} to {max(ratios):.2g} times what it costs in each alone"
        )
    return [*lines, "", *table(rows)]


def report(profile: KVProfile) -> dict[str, Any]:
    def lists(found: Sequence[Any]) -> list[dict[str, Any]]:
        return [
            {
                "bits": one.bits,
                "bytes_per_token": one.bytes_per_token,
                "kv_tail": one.kv_tail,
                "kv_sink": one.kv_sink,
                "predicted": one.predicted,
                "verified": one.verified,
                "layers": [pair and "/".join(pair) for pair in one.layers],
            }
            for one in found
        ]

    return {
        "model": profile.model,
        "name": profile.name,
        "n_tokens": profile.n_tokens,
        "n_scored": profile.n_scored,
        "lists": lists(profile.lists),
        "uniform": lists(profile.uniform),
        "pairs": profile.pairs,
    }


calibrate = Command(
    "calibrate",
    examples=[
        ("Measure a model with the built-in text", "localkv calibrate -m model.gguf"),
        (
            "With a text like those it is for, to a file beside it",
            "localkv calibrate -m model.gguf -f text.txt -o model.kv.json",
        ),
        ("Draw what was measured", "localkv calibrate -m model.gguf --plot layers.png"),
        (
            "What types of weights cost, for localkv plan --quality",
            "localkv calibrate -m model.gguf --weight-types f16,q8_0,q5_0,q4_0 -o weights.json",
        ),
        ("Use it", "localkv complete -m model.gguf --kv-profile auto -f long.txt"),
    ],
    essentials="-m -hf -f -o --tokens --time --types --bits --smooth --kv-tail --weight-types -t "
    "-dev --plot --json",
    params=[
        TEXTS.option(
            "-f --file",
            metavar="FILE",
            help="The text, UTF-8; - is stdin. [default: one that comes with localkv]",
        ),
        TEXTS.option(
            "--tokens",
            type=Whole(LEAST_CHUNK),
            help=f"Tokens of the text to measure with, in chunks of {CHUNK}. "
            f"[default: {DEFAULT_TOKENS}]",
        ),
        TEXTS.option(
            "minutes --time",
            type=click.FloatRange(0, min_open=True),
            metavar="MINUTES",
            help="Measure with as many tokens as take about this long.",
        ),
        MEASURE.option(
            "--types",
            metavar="TYPES",
            help="Cache types to measure, with commas between them. [default: integers, but "
            "for those seldom chosen]",
        ),
        MEASURE.option(
            "--bits",
            metavar="LIST",
            help="Budgets of bits per value for which types are found, with commas between them. "
            "[default: 3 to 8.5]",
        ),
        MEASURE.option(
            "--kv-tail",
            default=f"0,{DEFAULT_TAIL}",
            metavar="LIST",
            help="Types are found with each of these numbers of newest tokens in f16, which a "
            "cache with these types has, too. Types with scales by channel need some; with 0 there "
            "is no sink either.",
        ),
        MEASURE.option(
            "--smooth",
            type=click.FloatRange(0, 1),
            default=0.5,
            metavar="ALPHA",
            help="Divide channels of K and V by their magnitude to this power, and multiply K's "
            "with the queries' magnitude to what is left of 1, inside the weights. The model stays "
            "as it is, and small channels keep their precision beside large ones; 0 is off.",
        ),
        MEASURE.option(
            "--weight-types",
            metavar="TYPES",
            help="Measure what these types of weights cost in each matrix, and 8-bit activations "
            "in each layer and kind of matrix, in place of K and V. localkv plan --quality reads "
            "the file.",
        ),
        MEASURE.option(
            "--imatrix",
            metavar="FILE",
            help="The importance matrix that the types of --weight-types are made with.",
        ),
        *(param for param in loading_options() if param.name in _USED),
        OUTPUT.option(
            "-o --output",
            metavar="FILE",
            help="The profile. [default: in the platform's data folder, where --kv-profile auto "
            "finds it]",
        ),
        OUTPUT.option(
            "plot_file --plot",
            metavar="FILE",
            help="Draw the magnitudes of channels, and the divergence of each layer in each type, "
            "as a picture (.png, .svg, .pdf).",
        ),
        json_option(),
    ],
    callback=_run,
    help="Measure which layers of a model need which types of K and V.\n\n"
    "One run finds how far each type of K and of V moves each layer, two runs for each layer "
    "find what that costs in predictions. From that come the types by layer that cost least within "
    "budgets of bits, which are then measured together. The profile is a small file of JSON. What "
    "was measured is kept beside it until it is whole, so that the same command goes on after a "
    "break.",
)
