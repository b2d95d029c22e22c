"""`localkv quantize`: a model's weights in another type."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localkv.commands.completion import file_values
from localkv.commands.options import MAX_THREADS, MODEL, OUTPUT, Panel, json_option
from localkv.commands.output import ProgressLine, TextOutput, did_you_mean, table, warn
from localkv.commands.parsing import FILE, TEXT, Argument, Choice, Command, Whole
from localkv.commands.texts import read_file
from localkv.errors import UsageError, byte_size, counted, printable
from localkv.loader.quantised_format import (
    FILE_TYPE_ALIASES,
    FILE_TYPES,
    TypeChoices,
    file_type_name,
    tensor_type,
)
from localkv.quant_formats import WEIGHT_FORMATS
from localkv.system.files import check_place, written_whole

if TYPE_CHECKING:
    from localkv.loader.importance import Importance
    from localkv.loader.quantize import Conversion, Errors, MomentsOf, Quantization
    from localkv.quant_formats import QuantFormat

TYPES, IMPORTANCE, ROUNDING = Panel("Types"), Panel("Importance"), Panel("Rounding")
CALIBRATION_CHUNK = 512
"""Tokens of a piece of the calibration text, as `localkv imatrix` has it."""
COPY = "COPY"
_MOST_PATTERN = 1 << 10


def _words(words: Sequence[str]) -> tuple[Path, Path | None, str, int | None]:
    """The model, the new file, its type and the threads; as llama-quantize takes them."""
    if len(words) < 2:
        raise UsageError(
            "a model and a type are needed",
            hint="localkv quantize model-f16.gguf model-q4_k_m.gguf Q4_K_M",
        )
    source, *rest = words
    out = None
    if _file_type(rest[0]) is None:
        out = Path(rest.pop(0))
        if not rest:
            raise _unknown_type(str(out))
    name = _file_type(rest[0])
    if name is None:
        raise _unknown_type(rest[0])
    if len(rest) > 2 or (len(rest) == 2 and not rest[1].isdecimal()):
        raise UsageError(f"{rest[1]!r} is one word too many: a type is followed by threads, if any")
    threads = int(rest[1]) if len(rest) == 2 else None
    return Path(source), out, name, threads


def _file_type(word: str) -> str | None:
    return COPY if word.upper() == COPY else file_type_name(word)


def _unknown_type(word: str) -> UsageError:
    known = [*FILE_TYPES, *FILE_TYPE_ALIASES, COPY]
    return UsageError(
        f"{word!r} is not a type of files{did_you_mean(word.upper(), known)}",
        hint=f"types: {' '.join(known)}",
    )


def _tensor_type(word: str, option: str) -> QuantFormat:
    found = tensor_type(word)
    if found is None:
        known = [fmt.name for fmt in WEIGHT_FORMATS.values()]
        raise UsageError(
            f"{option}: {word!r} is not a type of weights{did_you_mean(word.lower(), known)}",
            hint=f"types: {' '.join(known)}",
        )
    return found


def _patterns(
    options: Sequence[str], file: str | None
) -> list[tuple[re.Pattern[str], QuantFormat]]:
    """Patterns for names of tensors in lower case, and their types."""
    entries = [("--tensor-type", entry) for entry in options]
    if file is not None:
        words = read_file(file, "the list of types").split()
        entries += [(f"--tensor-type-file {file}", word) for word in words]
    patterns = []
    for option, entry in entries:
        pattern, is_pair, name = entry.partition("=")
        if not (is_pair and pattern and name):
            raise UsageError(f"{option}: {entry!r} is not PATTERN=TYPE", hint="attn_v=q8_0 is one")
        if len(pattern) > _MOST_PATTERN:
            raise UsageError(f"{option}: a pattern of more than {_MOST_PATTERN:,} characters")
        try:
            compiled = re.compile(pattern.lower())
        except (re.error, OverflowError, RecursionError) as error:
            raise UsageError(
                f"{option}: {pattern!r} is not a regular expression: {error}"
            ) from None
        patterns.append((compiled, _tensor_type(name, option)))
    return patterns


def _layers(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise UsageError(f"--prune-layers: {text!r} is not a list of layers", hint="3,4,5 is one")
    return sorted({int(word) for word in words})


def _run(
    *,
    words: tuple[str, ...],
    imatrix: str | None,
    include_weights: tuple[str, ...],
    exclude_weights: tuple[str, ...],
    method: str | None,
    calibration: str | None,
    tensor_type: tuple[str, ...],
    tensor_type_file: str | None,
    output_tensor_type: str | None,
    token_embedding_type: str | None,
    leave_output_tensor: bool,
    pure: bool,
    allow_requantize: bool,
    keep_split: bool,
    prune_layers: str | None,
    smooth: float,
    dry_run: bool,
    report: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    source, out, name, n_given = _words(words)
    choices = None
    if name != COPY:
        choices = TypeChoices(
            name,
            pure,
            leave_output_tensor,
            _tensor_type(output_tensor_type, "--output-tensor-type")
            if output_tensor_type
            else None,
            _tensor_type(token_embedding_type, "--token-embedding-type")
            if token_embedding_type
            else None,
            _patterns(tensor_type, tensor_type_file),
        )
    _check_effect(choices, imatrix, include_weights, exclude_weights, smooth)
    if smooth and method is not None:
        raise UsageError(
            f"--method {method} measures the model before --smooth changes it; give one of them",
            hint="localkv perplexity shows which is better",
        )
    if calibration is not None and method is None:
        raise UsageError("--calibration is the text that --method gptq reads; give both")
    text = None if calibration is None else read_file(calibration, "the calibration text")
    if out is None:
        out = source.with_name(f"ggml-model-{name}.gguf")
    from localkv.loader.error_feedback import TYPES as FED_TYPES
    from localkv.loader.gguf_file import open_gguf
    from localkv.loader.quantize import Request, check_goal, plan_quantization
    from localkv.system.threads import default_threads

    gguf = open_gguf(source)
    importance = _importance(imatrix, include_weights, exclude_weights)
    pruned = [] if prune_layers is None else _layers(prune_layers)
    request = Request(
        choices, importance, keep_split, allow_requantize, pruned, is_trial=dry_run, smooth=smooth
    )
    plan = plan_quantization(gguf, request)
    if report is not None:
        _check_report(Path(report), [source, *plan.paths(out)], is_trial=dry_run)
    if not dry_run:
        check_goal(plan, out)
    if plan.without_importance:
        shown = ", ".join(plan.without_importance[:3])
        more = ", ..." if len(plan.without_importance) > 3 else ""
        count = counted(len(plan.without_importance), "tensor")
        warn(f"the importance matrix has nothing for {count}: {shown}{more}")
    if method is not None and not any(item.can_feed_back for item in plan.conversions):
        raise UsageError(
            f"--method {method} has no effect: no matrix changes to a type that it knows",
            hint=f"types that it knows: {' '.join(FED_TYPES)}",
        )
    if not dry_run:
        n_threads = threads or n_given or default_threads()
        errors: dict[str, Errors] | None = None if report is None else {}
        if method is None:
            _write(plan, out, n_threads, errors)
        else:
            _write_fed(plan, out, n_threads, errors, text)
        if report is not None and errors is not None:
            _write_report(Path(report), _all_facts(plan, name, out), errors)
    with TextOutput(None) as output:
        output.write(_report(plan, name, None if dry_run else out, as_json))


def _check_effect(
    choices: TypeChoices | None,
    imatrix: str | None,
    included: tuple[str, ...],
    excluded: tuple[str, ...],
    smooth: float,
) -> None:
    """Refuse options that would change nothing."""
    if included and excluded:
        raise UsageError("give one of --include-weights and --exclude-weights")
    if (included or excluded) and imatrix is None:
        raise UsageError("--include-weights and --exclude-weights choose from --imatrix FILE")
    if smooth and choices is None:
        raise UsageError(
            f"--smooth changes tensors, and {COPY} leaves all as they are", hint="name a type"
        )
    if smooth and imatrix is None:
        raise UsageError(
            "--smooth needs the sizes of activations, which --imatrix FILE has",
            hint="localkv imatrix measures it",
        )
    is_float = choices is None or FILE_TYPES[choices.file_type].base in ("f32", "f16", "bf16")
    if is_float and choices is not None and choices.patterns:
        raise UsageError(
            f"--tensor-type has no effect on a file of type {choices.file_type}, "
            "whose matrices all have that type",
            hint="take Q8_0, say, and name what is to be in another type",
        )


def _importance(
    path: str | None, included: tuple[str, ...], excluded: tuple[str, ...]
) -> Importance | None:
    if path is None:
        return None
    from localkv.loader.importance import read_importance

    found = read_importance(path).only(included, excluded)
    if not found.columns:
        raise UsageError("no entry of the importance matrix has such a name")
    return found


def _check_report(path: Path, others: Sequence[Path], *, is_trial: bool) -> None:
    if is_trial:
        raise UsageError("--report measures a file that is made, and --dry-run makes none")
    try:
        check_place(path)
    except OSError as error:
        raise UsageError(
            f"--report: {printable(path)} can't be written: {error.strerror}"
        ) from None
    if path.resolve() in [other.resolve() for other in others]:
        raise UsageError(f"--report: {printable(path)} is a model of this command")


def _write_report(path: Path, facts: dict[str, Any], errors: dict[str, Errors]) -> None:
    """Write what was made, and how far values of each tensor are from what they were."""
    for item in facts["tensors"]:
        squares, weighted, weights = errors[item["name"]].tolist()
        item["rmse"] = math.sqrt(squares / max(1, math.prod(item["shape"])))
        item["weighted_rmse"] = math.sqrt(weighted / weights) if weights > 0 else None
    try:
        with written_whole(path) as file:
            file.write(json.dumps(facts, indent=1).encode() + b"\n")
    except OSError as error:
        raise UsageError(
            f"--report: {printable(path)} can't be written: {error.strerror}"
        ) from None


def _write_fed(
    plan: Quantization,
    out: Path,
    n_threads: int,
    errors: dict[str, Errors] | None,
    text: str | None,
) -> None:
    """Write files whose matrices are rounded with error feedback, measured with a text."""
    from localkv.llm import LLM
    from localkv.quality.activations import TextMoments
    from localkv.quality.scores import calibration_text, text_chunks

    widths = {
        item.source.name: item.source.shape[-1] for item in plan.conversions if item.can_feed_back
    }
    whole = calibration_text() if text is None else text
    path = plan.gguf.path
    with LLM(path, n_ctx=CALIBRATION_CHUNK, device="cpu", n_threads=n_threads) as llm:
        ids, tokenizer = llm.tokenize(whole), llm.tokenizer
        if len(ids) < CALIBRATION_CHUNK:
            raise UsageError(
                f"the calibration text has {counted(len(ids), 'token')}, too few to measure with",
                hint=f"take one of at least {CALIBRATION_CHUNK}, better of 20,000",
            )
        bos_id = tokenizer.bos_id if tokenizer.add_bos else None
        chunks = text_chunks(ids, CALIBRATION_CHUNK, bos_id=bos_id)
        with ProgressLine() as progress:

            def on_chunk(done: int, total: int) -> None:
                progress.show(f"reading the calibration text: chunk {done} of {total}")

            moments = TextMoments(llm.engine.model, chunks, llm.cache, widths, on_chunk)
            _write(plan, out, n_threads, errors, moments.of)


def _write(
    plan: Quantization,
    out: Path,
    n_threads: int,
    errors: dict[str, Errors] | None,
    moments_of: MomentsOf | None = None,
) -> None:
    from localkv.loader.quantize import write_files

    with ProgressLine() as progress:

        def on_tensor(done: int, total: int, name: str) -> None:
            progress.show(f"{done + 1}/{total} {name}")

        def on_kernel(done: int, total: int) -> None:
            progress.show(f"compiling kernels: {done} of {total}")

        try:
            write_files(plan, out, n_threads, on_tensor, on_kernel, errors, moments_of)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"{printable(out)} can't be written: {reason}") from None


def _bits(n_bytes: int, n_values: int) -> float:
    return 8 * n_bytes / max(1, n_values)


def _report(plan: Quantization, name: str, out: Path | None, as_json: bool) -> str:
    """What was made: by type, or, of a dry run, by tensor; or a JSON object."""
    items, facts = plan.conversions, _all_facts(plan, name, out)
    if as_json:
        return json.dumps(facts)
    rows = [("TENSOR", "SHAPE", "TYPE", "", "SIZE")] if out is None else []
    lines = table([*rows, *map(_row, items)]) if out is None else table(_rows_by_type(items))
    for what in ("before", "after"):
        n_bytes = facts[f"bytes_{what}"]
        bits = _bits(n_bytes, facts["n_values"])
        lines.append(f"{what}: {byte_size(n_bytes)} ({bits:.2f} bits a weight)")
    if plan.n_smoothed:
        lines.append(f"smoothed: the inputs of {plan.n_smoothed} matrices")
    if out is not None:
        lines += [str(path) for path in plan.paths(out)]
    return "\n".join(lines)


def _all_facts(plan: Quantization, name: str, out: Path | None) -> dict[str, Any]:
    items = plan.conversions
    return {
        "type": name,
        "files": [] if out is None else [str(path) for path in plan.paths(out)],
        "n_values": sum(math.prod(item.goal.shape) for item in items),
        "bytes_before": sum(item.source.n_bytes for item in items),
        "bytes_after": sum(item.goal.n_bytes for item in items),
        "file_bytes": plan.n_bytes,
        "n_smoothed": plan.n_smoothed,
        "tensors": [_facts(item) for item in items],
    }


def _facts(item: Conversion) -> dict[str, Any]:
    return {
        "name": item.goal.name,
        "shape": list(item.goal.shape),
        "type_before": item.source.format.name,
        "type_after": item.goal.format.name,
        "bytes_before": item.source.n_bytes,
        "bytes_after": item.goal.n_bytes,
        "has_importance": item.importance is not None,
    }


def _row(item: Conversion) -> tuple[str, ...]:
    """A line for a tensor."""
    old, new = item.source.format.name, item.goal.format.name
    return (
        item.goal.name,
        " x ".join(map(str, item.goal.shape)),
        old,
        f"-> {new}" if item.changes else "",
        byte_size(item.goal.n_bytes),
    )


def _rows_by_type(items: Sequence[Conversion]) -> list[tuple[str, ...]]:
    """How many tensors have which type now, and their bytes."""
    rows: list[tuple[str, ...]] = [("TYPE", "TENSORS", "SIZE")]
    for name in dict.fromkeys(item.goal.format.name for item in items):
        mine = [item for item in items if item.goal.format.name == name]
        n_bytes = sum(item.goal.n_bytes for item in mine)
        rows.append((name, str(len(mine)), byte_size(n_bytes)))
    return rows


quantize = Command(
    "quantize",
    examples=[
        ("Four bits and some more", "localkv quantize model-f16.gguf model-q4_k_m.gguf Q4_K_M"),
        (
            "With an importance matrix, which few bits need",
            "localkv quantize --imatrix model.imatrix.gguf model-f16.gguf small.gguf IQ3_S",
        ),
        ("How large it would be", "localkv quantize --dry-run model-f16.gguf Q4_K_M"),
        (
            "Some tensors in a type of their own",
            "localkv quantize --tensor-type attn_v=q8_0 model-f16.gguf out.gguf Q4_K_M",
        ),
    ],
    params=[
        Argument(
            ["words"],
            nargs=-1,
            type=TEXT,
            metavar="IN [OUT] TYPE [THREADS]",
            shell_complete=file_values,
            help="The model (any part of a split one), the new file, its type, and how many "
            "threads. Without OUT it is ggml-model-TYPE.gguf beside the model. A file of the name "
            "is replaced once the new one is whole.",
        ),
        TYPES.option(
            "--tensor-type",
            multiple=True,
            metavar="PATTERN=TYPE",
            help="The type of tensors whose names a regular expression finds, as in attn_v=q8_0. "
            "Can be given again; the first that fits counts.",
        ),
        TYPES.option(
            "--tensor-type-file",
            metavar="FILE",
            help="More of these, with spaces or line breaks between them.",
        ),
        TYPES.option("--output-tensor-type", metavar="TYPE", help="The type of output.weight."),
        TYPES.option(
            "--token-embedding-type", metavar="TYPE", help="The type of the tokens' embeddings."
        ),
        TYPES.flag("--leave-output-tensor", help="Leave output.weight as it is."),
        TYPES.flag("--pure", help="Give all matrices the same type."),
        TYPES.flag(
            "--allow-requantize",
            help="Also change tensors that have been rounded before, which costs quality.",
        ),
        IMPORTANCE.option(
            "--imatrix",
            metavar="FILE",
            help="How much errors of each column count: llama-imatrix's file.",
        ),
        IMPORTANCE.option(
            "--include-weights",
            multiple=True,
            metavar="NAME",
            help="Use it only for tensors whose names contain this. Can be given again.",
        ),
        IMPORTANCE.option(
            "--exclude-weights",
            multiple=True,
            metavar="NAME",
            help="Don't use it for tensors whose names contain this. Can be given again.",
        ),
        ROUNDING.option(
            "--smooth",
            type=click.FloatRange(0, 1),
            default=0.0,
            show_default=False,
            metavar="ALPHA",
            help="Divide channels of what meets matrices by their size to this power, inside the "
            "weights, and multiply columns. The model stays as it is, and 8-bit activations lose "
            "less beside large channels. Sizes are --imatrix's. 0.5 is good, 0 is off.",
        ),
        ROUNDING.option(
            "--method",
            type=Choice(["gptq"]),
            help="Round with error feedback: later columns of a matrix make up for the errors of "
            "earlier ones, as a text's activations say. It costs less quality at the same size, "
            "and some minutes.",
        ),
        ROUNDING.option(
            "--calibration",
            metavar="FILE",
            help="The text that --method reads, better of 20,000 tokens and more. "
            "[default: one of 2,000 that ships]",
        ),
        MODEL.option("--prune-layers", metavar="LIST", help="Leave out these layers, as in 3,4,5."),
        MODEL.option(
            "-t --threads",
            llama_env="THREADS",
            type=Whole(1, MAX_THREADS),
            help="CPU threads. [default: the physical cores]",
        ),
        OUTPUT.flag("--keep-split", help="Write as many files as the model has."),
        OUTPUT.option(
            "--report",
            type=FILE,
            metavar="FILE",
            help="Write a JSON file of all tensors: types, bytes, and root mean square errors.",
        ),
        OUTPUT.flag("--dry-run", help="Print types and sizes, and write nothing."),
        json_option(),
    ],
    callback=_run,
    help="Write a model's weights in another type, with the bytes that llama-quantize writes.\n\n"
    "TYPE is one of those below, in any case. Types such as Q4_K_M are mixtures: some matrices "
    "get more bits, by their place in the model. COPY writes all tensors as they are.",
    epilog=f"Types: {' '.join([*FILE_TYPES, *FILE_TYPE_ALIASES, COPY])}. "
    f"Types of tensors: {' '.join(fmt.name for fmt in WEIGHT_FORMATS.values())}.",
)
