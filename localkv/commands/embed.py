"""`localkv embed`: texts to vectors, from the hidden states of a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from localkv.commands.loading_options import loading_options
from localkv.commands.model import all_warnings, load_llm, memory_line
from localkv.commands.model_file import check_model_is_named
from localkv.commands.options import OUTPUT, TEXTS, Panel, escape_option
from localkv.commands.output import TextOutput, say, warn
from localkv.commands.parsing import Choice, Command, Whole
from localkv.commands.texts import read_file, read_stdin, unescape, without_final_newline
from localkv.errors import UsageError

if TYPE_CHECKING:
    from localkv.engine.embedding import Pooling
    from localkv.llm import LLM

_EMBEDDING = Panel("Embedding")


_OPTIONS: list[click.Parameter] = [
    TEXTS.option("-p --prompt", metavar="TEXT", help="The texts, one in each line."),
    TEXTS.option(
        "-f --file",
        metavar="FILE",
        help="Read them from a UTF-8 file; - is stdin, as without -p and -f.",
    ),
    escape_option(TEXTS, "-p and --embd-separator; never in files and stdin"),
    TEXTS.option(
        "--embd-separator",
        metavar="TEXT",
        default=r"\n",
        help='Where one text ends and the next begins; "" makes all of it one text.',
    ),
    TEXTS.flag(
        "--parse-special",
        help="Read control tokens written in the texts, such as <|im_start|>, as control tokens.",
    ),
    _EMBEDDING.option(
        "--pooling",
        llama_env="POOLING",
        type=Choice(("none", "mean", "cls", "last"), case_sensitive=False),
        metavar="NAME",
        help="From tokens to a text: their mean, the first one (cls), the last one, or none, which "
        "prints every token's vector. [default: what the model was trained for, or mean]",
    ),
    _EMBEDDING.option(
        "--embd-normalize",
        type=Whole(-1),
        default=2,
        help="The norm that a vector is divided by: -1 none, 0 the largest magnitude (which "
        "becomes 32760), 1 taxicab, 2 Euclidean, other p p-norm.",
    ),
]

_OUTPUT_OPTIONS: list[click.Parameter] = [
    OUTPUT.option("-o --output", metavar="FILE", help="Write to this file instead of stdout."),
    OUTPUT.option(
        "--embd-output-format",
        type=Choice(("raw", "array", "json", "json+"), case_sensitive=False),
        metavar="NAME",
        help="raw: a line of numbers for each vector. array: an array of arrays. json: as OpenAI's "
        "API. json+: with a matrix of cosine similarities. [default: raw]",
    ),
    OUTPUT.flag("as_json --json", help="Short for --embd-output-format json."),
    OUTPUT.flag("-q --quiet", help="Leave out the line on stderr about memory."),
]


def _run(
    *,
    prompt: str | None,
    file: str | None,
    escape: bool,
    embd_separator: str,
    parse_special: bool,
    pooling: Pooling | None,
    embd_normalize: int,
    output: str | None,
    embd_output_format: str | None,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> None:
    """Print the embeddings."""
    check_model_is_named(values)
    if as_json and embd_output_format not in (None, "json"):
        raise UsageError(f"--json and --embd-output-format {embd_output_format}: use one")
    form = "json" if as_json else embd_output_format or "raw"
    separator = unescape(embd_separator) if escape else embd_separator
    text = _text(prompt, file, escape)
    texts = text.split(separator) if separator else [text]
    with TextOutput(output) as out:
        llm = load_llm(values, quiet=quiet)
        if not quiet:
            say(memory_line(llm))
        for line in all_warnings(llm):
            warn(line)
        vectors = _vectors(llm, texts, pooling, embd_normalize, parse_special)
        out.write(_in_form(form, vectors, llm.config.name))


def _text(prompt: str | None, file: str | None, escape: bool) -> str:
    """What -p, a file or stdin holds."""
    if prompt is not None and file is not None:
        raise UsageError("-p and -f both give the text, use one")
    if prompt is not None:
        return unescape(prompt) if escape else prompt
    text = without_final_newline((read_file(file, "the text") if file else read_stdin()) or "")
    if not text:
        raise UsageError("there is no text: give -p TEXT, -f FILE, or text on stdin")
    return text


def _vectors(
    llm: LLM, texts: list[str], pooling: Pooling | None, norm: int, parse_special: bool
) -> list[list[float]]:
    """One for each text, or for each token without pooling; numbers have float32's digits."""
    from localkv.engine.embedding import normalised

    options: dict[str, Any] = {"normalize": False, "parse_special": parse_special}
    found = llm.embed(texts, pooling=pooling, **options)
    rows = [row for text in found for row in text] if pooling == "none" else found
    if norm == 0:  # llama.cpp prints whole numbers
        return [normalised(row, norm).round().astype(int).tolist() for row in rows]
    return [[float(str(x)) for x in normalised(row, norm)] for row in rows]


def _in_form(form: str, vectors: list[list[float]], model: str) -> str:
    if form == "raw":
        return "\n".join(" ".join(map(str, vector)) for vector in vectors)
    if form == "array":
        return json.dumps(vectors)
    data = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, vector in enumerate(vectors)
    ]
    result: dict[str, Any] = {"object": "list", "model": model, "data": data}
    if form == "json+":
        from localkv.engine.embedding import similarities

        result["cosineSimilarity"] = similarities(vectors)
    return json.dumps(result, ensure_ascii=False)


embed = Command(
    "embed",
    examples=[
        ("A line of numbers for each text", 'localkv embed -m model.gguf -p "The fox ran home."'),
        (
            "The texts of a file, one in each line, as OpenAI's API has them",
            "localkv embed -m model.gguf -f texts.txt --json",
        ),
        (
            "How alike two texts are",
            'localkv embed -m model.gguf -p "A fox.\\nA wolf." --embd-output-format json+',
        ),
    ],
    essentials="-p -f -m -hf -c --pooling --embd-normalize --embd-output-format --json -o -q",
    params=[*_OPTIONS, *loading_options(), *_OUTPUT_OPTIONS],
    callback=_run,
    help="Turn texts into vectors: the model's hidden states after its last norm, pooled.\n\n"
    "Every model has them. One that was trained for embeddings has good ones; others need more "
    "care, and mean pooling.",
)
