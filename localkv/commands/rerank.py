"""`localkv rerank`: documents in the order in which they answer a query."""

from __future__ import annotations

import json
from typing import Any

import click

from localkv.commands.loading_options import loading_options
from localkv.commands.model import all_warnings, load_llm, memory_line
from localkv.commands.model_file import check_model_is_named
from localkv.commands.options import OUTPUT, TEXTS, escape_option
from localkv.commands.output import TextOutput, say, warn
from localkv.commands.parsing import Command, Whole
from localkv.commands.texts import read_file, read_stdin, unescape, without_final_newline
from localkv.errors import UsageError

_OPTIONS: list[click.Parameter] = [
    TEXTS.option("--query", metavar="TEXT", help="What the documents should answer."),
    TEXTS.option("-p --prompt", metavar="TEXT", help="The documents, one in each line."),
    TEXTS.option(
        "-f --file",
        metavar="FILE",
        help="Read them from a UTF-8 file; - is stdin, as without -p and -f.",
    ),
    escape_option(TEXTS, "--query, -p and --separator; never in files and stdin"),
    TEXTS.option(
        "--separator",
        metavar="TEXT",
        default=r"\n",
        help="Where one document ends and the next begins.",
    ),
]

_OUTPUT_OPTIONS: list[click.Parameter] = [
    OUTPUT.option("-o --output", metavar="FILE", help="Write to this file instead of stdout."),
    OUTPUT.option("--top-n", type=Whole(1), help="Print as many of the best. [default: all]"),
    OUTPUT.flag("as_json --json", help="Print one JSON object, as Jina's and Cohere's APIs do."),
    OUTPUT.flag("-q --quiet", help="Leave out the line on stderr about memory."),
]


def _run(
    *,
    query: str | None,
    prompt: str | None,
    file: str | None,
    escape: bool,
    separator: str,
    output: str | None,
    top_n: int | None,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> None:
    """Print documents and their scores, the best first."""
    check_model_is_named(values)
    if query is None:
        raise UsageError("there is no query: give --query TEXT")
    query, between = (unescape(text) if escape else text for text in (query, separator))
    documents = _documents(prompt, file, escape, between)
    with TextOutput(output) as out:
        llm = load_llm(values, quiet=quiet)
        if not quiet:
            say(memory_line(llm))
        for line in all_warnings(llm):
            warn(line)
        ranked = llm.rerank(query, documents, top_n=top_n)
        if as_json:
            results = [
                {
                    "index": one.index,
                    "relevance_score": float(f"{one.score:.8g}"),
                    "document": {"text": documents[one.index]},
                }
                for one in ranked
            ]
            out.write(
                json.dumps({"model": llm.config.name, "results": results}, ensure_ascii=False)
            )
            return
        out.write("\n".join(f"{one.score:.6g}\t{documents[one.index]}" for one in ranked))


def _documents(prompt: str | None, file: str | None, escape: bool, separator: str) -> list[str]:
    """What -p, a file or stdin holds."""
    if prompt is not None and file is not None:
        raise UsageError("-p and -f both give the documents, use one")
    if prompt is not None:
        text = unescape(prompt) if escape else prompt
    else:
        text = without_final_newline(
            (read_file(file, "the documents") if file else read_stdin()) or ""
        )
    if not text:
        raise UsageError("there are no documents: give -p TEXT, -f FILE, or text on stdin")
    return text.split(separator) if separator else [text]


rerank = Command(
    "rerank",
    examples=[
        (
            "Which lines of a file answer a question best",
            'localkv rerank -m bge-reranker-v2-m3-Q8_0.gguf --query "Where do foxes sleep?" '
            "-f lines.txt --top-n 3",
        ),
        (
            "As JSON, of two documents",
            'localkv rerank -m reranker.gguf --query "a fox" -p "A fox.\\nA wolf." --json',
        ),
    ],
    essentials="--query -p -f -m -hf --top-n --json -o -q",
    params=[*_OPTIONS, *loading_options(), *_OUTPUT_OPTIONS],
    callback=_run,
    help="Order documents by how well they answer a query, with a model that was trained for it "
    "(a reranker).\n\nA line has a score and a document, the best first. Scores are as the model "
    "gives them: logits in most, probabilities in Qwen 3 Reranker.",
)
