"""`localkv complete`: continue a prompt, or answer it with `--chat`. stdout holds the text only."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING, Any

from localkv.cli.complete.options import OUTPUT_OPTIONS, PROMPT_OPTIONS
from localkv.cli.complete.prompt import prompt_text
from localkv.cli.complete.report import report_json, stats_lines, summary_lines
from localkv.cli.complete.waited import Waited
from localkv.cli.model.file import named_or_shipped
from localkv.cli.model.loading import all_warnings, load_llm
from localkv.cli.model.memory import memory_line
from localkv.cli.options.chat import (
    chat_arguments,
    system_text,
    template_text,
    uses_chat_options,
)
from localkv.cli.options.grammar import grammar_of_options, grammar_options
from localkv.cli.options.length import length_options
from localkv.cli.options.loading import loading_options
from localkv.cli.options.sampling import sampling_options, sampling_params
from localkv.cli.options.speculation import speculation_options
from localkv.cli.options.state import SavedStates, state_options
from localkv.cli.output.messages import note, say, warn
from localkv.cli.output.terminal import is_terminal
from localkv.cli.output.text_output import TextOutput
from localkv.cli.parsing.command import Command
from localkv.cli.parsing.escapes import unescape
from localkv.cli.process.failure import INTERRUPTED
from localkv.errors import UsageError

if TYPE_CHECKING:
    from localkv.engine.text.stream import Completion, TextStream
    from localkv.llm import LLM


def _run(
    *,
    prompt: str | None,
    file: str | None,
    escape: bool,
    parse_special: bool,
    chat: bool,
    n_predict: int,
    stop: tuple[str, ...],
    ignore_eos: bool,
    output: str | None,
    as_json: bool,
    logprobs: int | None,
    audit: str | None,
    stream: bool,
    raw: bool,
    stats: bool,
    verbose: bool,
    quiet: bool,
    **values: Any,
) -> int:
    """Complete one prompt; returns the exit code."""
    unnamed = named_or_shipped(values)
    states = SavedStates.of(values)
    chat = chat or uses_chat_options(values)
    if chat and parse_special:
        raise UsageError(
            "--parse-special is for plain prompts",
            hint="in a chat only the template writes control tokens",
        )
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs has no place in plain text", hint="--json prints them")
    params = sampling_params(values, escape=escape)
    template_options = chat_arguments(values, escape=escape)
    if escape:
        stop = tuple(map(unescape, stop))
    system_prompt, template = system_text(values, escape=escape), template_text(values)
    grammar = grammar_of_options(values)
    text = prompt_text(prompt, file, escape)
    if unnamed:
        note(unnamed)
    with TextOutput(output, raw=raw) as out:
        if chat:
            from localkv.loader.template_process import start_ahead

            start_ahead()
        llm = load_llm(values, quiet=quiet)
        waited = Waited.for_model(llm.load_seconds)
        if not quiet:
            say(memory_line(llm))
        if verbose:
            for line in summary_lines(llm):
                say(line)
        saved_ids = states.load(llm, quiet=quiet)
        cancel = Event()
        options: dict[str, Any] = {
            "max_tokens": n_predict if n_predict >= 0 else None,
            "stop": stop,
            "ignore_eos": ignore_eos,
            "params": params,
            "cancel": cancel,
        }
        if logprobs is not None:
            options["logprobs"] = logprobs
        if audit is not None:
            options["audit"] = "exact" if audit == "exact" else True
        if grammar is not None:
            options["grammar"] = grammar
        if chat:
            pieces = _answer(llm, text, system_prompt, template, template_options, options)
        else:
            start = saved_ids if saved_ids and not text else text
            pieces = llm.stream(start, parse_special=parse_special, **options)
        for line in all_warnings(llm):
            warn(line)
        with _interruptible(cancel):
            completion = _generate(pieces, out if stream and not as_json else None, waited)
        if as_json:
            out.write(json.dumps(report_json(llm, completion, waited), ensure_ascii=False))
        elif not stream:
            out.write(completion.text)
    states.save(llm, completion, quiet=quiet)
    if completion.context_full:
        note(f"the context of {llm.cache.n_ctx} tokens is full; a larger one (-c) makes more room")
    if grammar is not None and completion.finish_reason == "length":
        warn(f"the text broke off before it was all of what the {grammar.what} asks for")
    if not chat and not parse_special and llm.has_chat_template:
        said_nothing = not completion.text.strip() and completion.finish_reason == "stop"
        shown = not (quiet or unnamed or output) and is_terminal(sys.stdout)
        if said_nothing or shown:
            note("the model went on with the text; --chat asks it through its chat template")
    if audit is not None:
        found = completion.audit
        say(f"audit: {found.line() if found is not None else 'there are no tokens'}")
    if stats:
        for line in stats_lines(llm, completion, waited):
            say(line)
        ladder = llm.engine.cache.ladder
        if line := pieces.degeneration().line(llm.cache, ladder.counts() if ladder else ()):
            say(f"degenerate:   {line}")
    return INTERRUPTED if completion.finish_reason == "cancelled" else 0


def _answer(
    llm: LLM,
    text: str,
    system_prompt: str | None,
    template: str | None,
    template_options: dict[str, Any],
    options: dict[str, Any],
) -> TextStream:
    messages = [{"role": "user", "content": text}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    if template is not None:
        template_options["template"] = llm.chat_template_from(template)
    prompt = llm.chat_prompt(messages, **template_options)
    for line in prompt.warnings:
        warn(line)
    return llm.stream(prompt, **options)


def _generate(pieces: TextStream, out: TextOutput | None, waited: Waited) -> Completion:
    for piece in pieces:
        waited.has_token()
        if out is not None:
            out.write(piece)
    waited.has_token()
    return pieces.completion


@contextmanager
def _interruptible(cancel: Event) -> Iterator[None]:
    """The first Ctrl-C ends the generation after the next token, the second one at once."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cancel.set()

    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or current_thread() is not main_thread():
        yield  # SIGINT is ignored (nohup), or Python allows no handlers here
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


complete = Command(
    "complete",
    examples=[
        (
            "Continue a text, with the small model that ships",
            'localkv complete -p "Once upon a time" -n 100',
        ),
        (
            "Answer a question, with a model from Hugging Face",
            'localkv complete -hf ORG/REPO:Q4_K_M --chat -p "Why is the sky blue?"',
        ),
        (
            "A longer context in the same memory: K in 8 bits, V in 4",
            "localkv complete -m model.gguf -f long.txt -c 32768 -ctk q8_0 -ctv q4_0",
        ),
        (
            "JSON that a schema describes",
            'localkv complete -m model.gguf --chat -p "A fruit?" -j \'{"enum": ["fig", "kiwi"]}\'',
        ),
        ("For scripts", 'localkv complete -m model.gguf -p "2 + 2 =" -n 4 --temp 0 --json'),
    ],
    essentials="-p -f --chat -sys --think -m -hf -c -ctk -ctv --preset -n --temp -s -o --json "
    "--stats -q",
    params=[
        *PROMPT_OPTIONS,
        *loading_options(),
        *length_options(),
        *sampling_options(),
        *grammar_options(),
        *speculation_options(),
        *state_options(),
        *OUTPUT_OPTIONS,
    ],
    callback=_run,
    help="Continue a prompt, or answer it with --chat.\n\n"
    "stdout gets the text and a final line break if it has none; the prompt is not repeated. "
    "Without -p and -f the prompt is the text on stdin. If no model is named, the one that ships "
    "with localkv answers.",
    epilog="Every option can also be set as LOCALKV_<NAME> (LOCALKV_CTX_SIZE), where llama.cpp has "
    "a variable for it as LLAMA_ARG_<NAME>, or in the [complete] table of config.toml.",
)
