"""`localkv tokenize` and `localkv detokenize`: text to token ids and back, without the model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from localkv.commands.model_file import check_model_is_named, model_file
from localkv.commands.options import (
    OUTPUT,
    TEXTS,
    escape_option,
    json_option,
    model_options,
    override_kv_option,
    override_pre_option,
    raw_option,
)
from localkv.commands.output import TextOutput, escaped, warn
from localkv.commands.parsing import TEXT, Argument, Command
from localkv.commands.texts import read_file, read_stdin, unescape
from localkv.config import Overrides
from localkv.errors import UsageError
from localkv.loader.pre_tokenizers import PRE_TOKENIZERS

if TYPE_CHECKING:
    from localkv.loader.tokenizer import Tokenizer


def _load(values: Mapping[str, Any]) -> Tokenizer:
    from localkv.loader.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model_file(values), Overrides.of(values))
    for line in tokenizer.warnings:
        warn(line)
    return tokenizer


def _tokenize(
    *,
    prompt: str | None,
    file: str | None,
    stdin: bool,
    escape: bool,
    no_bos: bool,
    parse_special: bool,
    ids: bool,
    show_count: bool,
    as_json: bool,
    **values: Any,
) -> None:
    check_model_is_named(values)
    if sum((prompt is not None, file is not None, stdin)) > 1:
        raise UsageError("give one of -p TEXT, -f FILE and --stdin")
    if prompt is not None:
        text = unescape(prompt) if escape else prompt
    else:
        piped = read_file(file) if file is not None else read_stdin()
        if piped is None:
            raise UsageError("there is no text: give -p TEXT, -f FILE, or text on stdin")
        text = piped
    tokenizer = _load(values)
    tokens = tokenizer.encode(text, parse_special=parse_special)
    if no_bos and tokenizer.add_bos:
        tokens = tokens[1:]
    with TextOutput(None) as out:
        for line in _token_lines(tokenizer, tokens, ids, as_json):
            out.write(line + "\n")
        if show_count and not as_json:
            out.write(f"Total number of tokens: {len(tokens)}\n")


def _token_lines(tokenizer: Tokenizer, tokens: list[int], ids: bool, as_json: bool) -> list[str]:
    if as_json:
        pieces = [_piece(tokenizer, token) for token in tokens]
        fields = {"ids": tokens, "pieces": pieces, "count": len(tokens)}
        return [json.dumps(fields, ensure_ascii=False)]
    if ids:
        return [str(tokens)]
    return [f"{token:6d} -> '{escaped(_piece(tokenizer, token))}'" for token in tokens]


def _piece(tokenizer: Tokenizer, token: int) -> str:
    r"""The text of a token; bytes that are not a whole character show as \xHH."""
    return tokenizer.token_bytes(token, special=True).decode("utf-8", errors="backslashreplace")


def _detokenize(*, ids: tuple[str, ...], raw: bool, as_json: bool, **values: Any) -> None:
    check_model_is_named(values)
    text = " ".join(ids) if ids else read_stdin()
    if text is None:
        raise UsageError("there are no token ids: localkv detokenize -m FILE 1 2 3, or on stdin")
    tokens = _parse_ids(text)
    tokenizer = _load(values)
    result = tokenizer.decode(tokens)
    if as_json:
        result = json.dumps({"text": result, "ids": tokens}, ensure_ascii=False)
    with TextOutput(None, raw=raw) as out:
        out.write(result)


def _parse_ids(text: str) -> list[int]:
    """Ids with spaces or commas between them, in brackets or not."""
    tokens = []
    for word in re.split(r"[\s,\[\]]+", text):
        if word and not word.isdecimal():
            raise UsageError(f"{word!r} is not a token id")
        if word:
            tokens.append(int(word))
    return tokens


detokenize = Command(
    "detokenize",
    examples=[("The text of three tokens", "localkv detokenize -m model.gguf 1 2 3")],
    params=[
        Argument(
            ["ids"], nargs=-1, type=TEXT, metavar="[IDS]...", help="Token ids; else those on stdin."
        ),
        *model_options(),
        override_pre_option(),
        override_kv_option(),
        raw_option(),
        json_option(),
    ],
    callback=_detokenize,
    help="Token ids to text: 1 2 3, or [1, 2, 3], as arguments or on stdin.",
)


tokenize = Command(
    "tokenize",
    examples=[
        ("One token per line", 'localkv tokenize -m model.gguf -p "Once upon a time"'),
        (
            "How many tokens a file has",
            "localkv tokenize -m model.gguf -f text.txt --show-count --ids",
        ),
    ],
    params=[
        *model_options(),
        override_pre_option(),
        override_kv_option(),
        TEXTS.option("-p --prompt", metavar="TEXT", help="The text."),
        TEXTS.option("-f --file", metavar="FILE", help="Read it from a UTF-8 file."),
        TEXTS.flag("--stdin", help="Read it from stdin, as without -p and -f."),
        escape_option(TEXTS, "-p"),
        TEXTS.flag("--no-bos", help="Put no BOS token before it."),
        TEXTS.option(
            "--parse-special/--no-parse-special",
            type=bool,
            default=True,
            show_default=True,
            help="Read control tokens written in the text as control tokens.",
        ),
        OUTPUT.flag("--ids", help="Print the ids only, as [1, 2, 3]."),
        OUTPUT.flag("--show-count", help="Print the number of tokens too."),
        json_option(),
    ],
    callback=_tokenize,
    help="Text to token ids, one token per line. Files and stdin are taken as they are, final line "
    "break included.",
    epilog=f"Pre-tokenizers: {', '.join(sorted(PRE_TOKENIZERS))}.",
)
