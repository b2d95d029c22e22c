"""`localkv imatrix`: how much the columns of a model's matrices count, measured with a text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localkv.commands.loading_options import OVERRIDES, loading_options, unoffered_values
from localkv.commands.model import all_warnings, load_llm
from localkv.commands.model_file import check_model_is_named
from localkv.commands.options import MEASURE, OUTPUT, TEXTS, json_option
from localkv.commands.output import ProgressLine, TextOutput, check_writable, note, table, warn
from localkv.commands.parsing import Command, Whole
from localkv.commands.texts import read_file, without_final_newline
from localkv.errors import UsageError, counted, printable

if TYPE_CHECKING:
    from localkv.engine.logprobs import TokenScores
    from localkv.llm import LLM
    from localkv.loader.importance import Measured, Statistics

DEFAULT_N_CTX = 512
"""llama-imatrix's, as all defaults here are."""
_USED = (
    *("model", "hf_repo", "hf_file", "offline", "n_ctx", "batch_size", "ubatch_size", "threads"),
    *("threads_batch", "device", "cache_type_k", "cache_type_v", "fit", "mlock", "use_mmap"),
    *OVERRIDES,
    *("activations", "cache_type_k_rope"),
)
"""Options as other commands have them."""


def _run(
    *,
    file: str | None,
    in_file: tuple[str, ...],
    output: str,
    chunks: int,
    from_chunk: int,
    parse_special: bool,
    process_output: bool,
    ppl: bool,
    output_frequency: int,
    save_frequency: int,
    show_statistics: bool,
    as_json: bool,
    **values: Any,
) -> None:
    from localkv.loader.importance import Measured, read_measured, write_measured

    if show_statistics:
        if len(in_file) != 1 or file is not None:
            raise UsageError(
                "--show-statistics prints what is in one file",
                hint="name it with --in-file, without -f",
            )
        _show(read_measured(in_file[0]), as_json)
        return
    if chunks == 0:
        raise UsageError("--chunks 0 leaves nothing to measure", hint="-1 takes the whole text")
    out = Path(output)
    check_writable(out)
    n_ctx = values["n_ctx"] or DEFAULT_N_CTX
    before = Measured({}, chunk_size=n_ctx)
    for name in in_file:
        before = before.joined(read_measured(name))
    if file is None:
        if not in_file:
            raise UsageError(
                "no text to measure with", hint="-f FILE names one, --in-file FILE what is combined"
            )
        write_measured(out, before)
        _report(before, out, None, as_json)
        return
    check_model_is_named(values)
    text = without_final_newline(read_file(file, "the text"))
    llm = load_llm({**unoffered_values(_USED), **values})
    for line in all_warnings(llm):
        warn(line)
    pieces = _pieces(llm, llm.tokenize(text, parse_special=parse_special), from_chunk, chunks)
    from localkv.quality.activations import Squares, read_chunks
    from localkv.quality.scores import joined, perplexity

    squares = Squares(
        lambda name: name.startswith("blk.") or (process_output and name == "output.weight")
    )
    if process_output and "output.weight" not in llm.gguf.tensors:
        note("--process-output: the model has no output.weight, its output matrix is its embedding")
    scores: list[TokenScores] = []

    def measured() -> Measured:
        return before.joined(Measured(squares.sums, [file], len(pieces), n_ctx))

    reading = read_chunks(
        llm.engine.model,
        pieces,
        llm.cache,
        squares.add,
        n_batch=llm.engine.n_batch,
        with_output=process_output,
        scored=ppl,
    )
    with ProgressLine() as progress:
        for done, scored in enumerate(reading, 1):
            said = ""
            if scored is not None:
                scores.append(scored)
                if progress.on_terminal:
                    said = f", PPL {perplexity(joined(scores).nll).value:.4f}"
            progress.show(f"chunk {done} of {len(pieces)}{said}")
            if output_frequency and done % output_frequency == 0 and done < len(pieces):
                write_measured(out, measured())
            if save_frequency and done % save_frequency == 0:
                write_measured(out.with_name(f"{out.name}.at_{done}"), measured())
    found = measured()
    write_measured(out, found)
    for name, sums in sorted(found.sums.items()):
        n_met = int((sums.counts > 0).sum())
        if n_met < len(sums.counts):
            note(f"{name}: {n_met} of {counted(len(sums.counts), 'expert')} met activations")
    _report(found, out, joined(scores) if scores else None, as_json)


def _pieces(llm: LLM, ids: Sequence[int], skipped: int, limit: int) -> list[list[int]]:
    """The chunks of a text, without the first ones."""
    from localkv.quality.scores import text_chunks

    n_ctx, tokenizer = llm.cache.n_ctx, llm.tokenizer
    if skipped * n_ctx >= len(ids):
        raise UsageError(
            f"--from-chunk {skipped}: the text has {counted(len(ids) // n_ctx, 'chunk')} of "
            f"{n_ctx} tokens"
        )
    return text_chunks(
        ids[skipped * n_ctx :],
        n_ctx,
        bos_id=tokenizer.bos_id if tokenizer.add_bos else None,
        limit=limit if limit >= 0 else None,
    )


def _report(found: Measured, out: Path, scores: TokenScores | None, as_json: bool) -> None:
    from localkv.quality.scores import perplexity

    ppl = None if scores is None else perplexity(scores.nll)
    with TextOutput(None) as text:
        if as_json:
            facts: dict[str, Any] = {
                "path": str(out),
                "n_matrices": len(found.sums),
                "n_chunks": found.n_chunks,
                "chunk_size": found.chunk_size,
                "datasets": list(found.datasets),
                "ppl": None if ppl is None else {"value": ppl.value, "error": ppl.error},
            }
            text.write(json.dumps(facts, ensure_ascii=False))
            return
        if ppl is not None:
            text.write(f"Final estimate: PPL = {ppl.value:.4f} +/- {ppl.error:.5f}\n")
        text.write(
            f"{printable(out)}: {len(found.sums)} matrices, "
            f"{counted(found.n_chunks, 'chunk')} of {found.chunk_size} tokens"
        )


def _show(found: Measured, as_json: bool) -> None:
    """Print the statistics of all matrices."""
    from localkv.loader.importance import statistics

    facts = statistics(found.sums)
    with TextOutput(None) as text:
        if as_json:
            text.write(json.dumps([one._asdict() for one in facts], ensure_ascii=False))
            return
        head = ("LAYER", "TENSOR", "SUM", "MIN", "MAX", "MEAN", "STDDEV", "ACTIVE", "N")
        text.write("\n".join(table([(*head, "ENTROPY", "OF MOST", "ZD", "COSSIM"), *_rows(facts)])))


def _rows(facts: Sequence[Statistics]) -> list[tuple[str, ...]]:
    return [
        (
            "-" if one.layer is None else str(one.layer),
            one.tensor,
            f"{one.total:.2f}",
            f"{one.least:.4f}",
            f"{one.most:.4f}",
            f"{one.mean:.2f}",
            f"{one.deviation:.2f}",
            f"{100 * one.active:.2f} %",
            str(one.n),
            f"{one.entropy:.4f}",
            f"{100 * one.entropy / math.log2(max(2, one.n)):.2f} %",
            f"{100 * one.above:.2f} %",
            "-" if one.cosine is None else f"{one.cosine:.4f}",
        )
        for one in facts
    ]


imatrix = Command(
    "imatrix",
    examples=[
        ("Measure a model with a text", "localkv imatrix -m model-f16.gguf -f text.txt"),
        ("Use it", "localkv quantize --imatrix imatrix.gguf model-f16.gguf small.gguf IQ3_S"),
        (
            "Combine what several texts gave",
            "localkv imatrix --in-file a.gguf --in-file b.gguf -o both.gguf",
        ),
        ("What is in it", "localkv imatrix --in-file imatrix.gguf --show-statistics"),
    ],
    essentials="-m -hf -f -o --chunks --from-chunk --in-file --process-output --no-ppl "
    "--show-statistics -c -t --json",
    params=[
        TEXTS.option(
            "-f --file",
            metavar="FILE",
            help="The text, UTF-8, unchanged except for one final line break; - is stdin. Without "
            "one the files of --in-file are combined.",
        ),
        TEXTS.option(
            "--chunks",
            type=Whole(-1),
            default=-1,
            help="Most chunks to evaluate; -1 takes the whole text.",
        ),
        TEXTS.option(
            "from_chunk --from-chunk --chunk",
            type=Whole(0),
            default=0,
            help="Leave out the first N chunks of the text.",
        ),
        TEXTS.flag("--parse-special", help="Read control tokens that are written in the text."),
        *(param for param in loading_options(DEFAULT_N_CTX) if param.name in _USED),
        MEASURE.option(
            "--in-file",
            multiple=True,
            metavar="FILE",
            help="What was measured before, which is added. Can be given again.",
        ),
        MEASURE.flag("--process-output", help="Measure output.weight, too."),
        MEASURE.option(
            "--ppl/--no-ppl",
            type=bool,
            default=True,
            help="Compute the text's perplexity on the way.  [default: ppl]",
        ),
        MEASURE.flag("--show-statistics", help="Print what is in the file of --in-file."),
        OUTPUT.option(
            "-o --output --output-file",
            default="imatrix.gguf",
            metavar="FILE",
            help="Where the importance matrix is written.",
        ),
        OUTPUT.option(
            "-ofreq --output-frequency",
            type=Whole(0),
            default=10,
            help="Write what was measured so far after every N chunks; 0 is only at the end.",
        ),
        OUTPUT.option(
            "--save-frequency",
            type=Whole(0),
            default=0,
            help="Also write it to FILE.at_CHUNK after every N chunks; 0 never does.",
        ),
        json_option(),
    ],
    callback=_run,
    help="Measure how much errors of each column of a model's matrices count, for quantize.\n\n"
    "The text is cut into chunks of -c tokens. For each matrix the squares of all activations that "
    "meet it are summed, for each expert those that are routed to it. The file is llama-imatrix's.",
)
