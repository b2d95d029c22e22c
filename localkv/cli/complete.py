"""`localkv complete`: continue a prompt, or answer it with `--chat`. stdout holds the text only."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from threading import Event, current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from localkv.cache.codebook_uses import codebooks_in_words
from localkv.cache.layer_types import in_words
from localkv.cli.chat_options import chat_arguments, chat_options, uses_chat_options
from localkv.cli.command import Command
from localkv.cli.complete_prompt import STDIN, prompt_text
from localkv.cli.escapes import unescape
from localkv.cli.failure import INTERRUPTED
from localkv.cli.grammar_options import grammar_of_options, grammar_options
from localkv.cli.length_options import length_options
from localkv.cli.loading import all_warnings, load_llm
from localkv.cli.loading_options import loading_options
from localkv.cli.memory_report import (
    cache_types,
    groups_json,
    memory_bytes,
    memory_json,
    memory_line,
)
from localkv.cli.messages import note, say, warn
from localkv.cli.model_file import named_or_shipped
from localkv.cli.option_types import Whole
from localkv.cli.options import escape_option, flag, json_option, option, raw_option
from localkv.cli.prompt import read_file
from localkv.cli.sampling_options import sampling_options, sampling_params
from localkv.cli.speculation_options import speculation_options
from localkv.cli.state_options import SavedStates, state_options
from localkv.cli.text_output import TextOutput
from localkv.cli.waited import Waited
from localkv.errors import UsageError, byte_size, counted

if TYPE_CHECKING:
    from localkv.config import CacheConfig
    from localkv.engine.text_stream import Completion, TextStream, Usage
    from localkv.llm import LLM

_PROMPT_OPTIONS: list[click.Parameter] = [
    option(
        "-p",
        "--prompt",
        panel="Prompt",
        metavar="TEXT",
        help=f"The text to continue; {STDIN} in it is the place of the text on stdin, which is "
        "not read otherwise.",
    ),
    option(
        "-f",
        "--file",
        panel="Prompt",
        metavar="FILE",
        help="Read the prompt from a UTF-8 file, unchanged except for one final line break; - is "
        "stdin, which -p may follow, after an empty line.",
    ),
    escape_option(
        "Prompt", "-p, -sys, --prefill, -r and --dry-sequence-breaker; never in files and stdin"
    ),
    flag(
        "--parse-special",
        panel="Prompt",
        help="Read control tokens written in the prompt, such as <|im_start|>, as control tokens.",
    ),
    flag("--chat", panel="Prompt", help="Answer the prompt through the model's chat template."),
    option(
        "-sys",
        "--system-prompt",
        panel="Prompt",
        metavar="TEXT",
        help="An instruction that comes before the prompt; implies --chat.",
    ),
    option(
        "--chat-template-file",
        panel="Prompt",
        llama_env="CHAT_TEMPLATE_FILE",
        metavar="FILE",
        help="A Jinja template instead of the model's; implies --chat.",
    ),
    *chat_options("Prompt", implied="; implies --chat"),
]

_OUTPUT_OPTIONS: list[click.Parameter] = [
    option(
        "-o",
        "--output",
        panel="Output",
        metavar="FILE",
        help="Write to this file instead of stdout, while the text is generated.",
    ),
    json_option(),
    option(
        "--logprobs",
        panel="Output",
        type=Whole(0),
        metavar="N",
        help="With --json, say how probable each token was, and the N most probable ones: natural "
        "logarithms of the model's own probabilities, before all samplers.",
    ),
    option(
        "--audit",
        panel="Output",
        type=click.Choice(["kept", "exact"]),
        is_flag=False,
        flag_value="kept",
        metavar="[exact]",
        help="Evaluate the text once more through an f16 cache, and say on stderr what the packed "
        "cache changed: divergence, and the tokens with another most likely choice. With exact the "
        "divergence leaves nothing out, and it takes twice as long.",
    ),
    option(
        "--stream/--no-stream",
        panel="Output",
        type=bool,
        default=True,
        help="Print the text while it is generated, or once it is complete.  [default: stream]",
    ),
    raw_option(),
    flag("--stats", panel="Output", help="Print speed and sizes on stderr at the end."),
    flag(
        "-v",
        "--verbose",
        panel="Output",
        help="Describe on stderr the model, and the kernels that run it.",
    ),
    flag(
        "-q",
        "--quiet",
        panel="Output",
        help="Leave out the lines on stderr about memory and about the flags of --preset.",
    ),
]


def _run(
    *,
    prompt: str | None,
    file: str | None,
    escape: bool,
    parse_special: bool,
    chat: bool,
    system_prompt: str | None,
    chat_template_file: str | None,
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
    given = (system_prompt, chat_template_file)
    chat = chat or any(value is not None for value in given) or uses_chat_options(values)
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
        system_prompt = unescape(system_prompt) if system_prompt is not None else None
    template_text = None
    if chat_template_file is not None:
        template_text = read_file(chat_template_file, "the chat template")
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
            for line in _summary(llm):
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
            pieces = _answer(llm, text, system_prompt, template_text, template_options, options)
        else:
            start = saved_ids if saved_ids and not text else text
            pieces = llm.stream(start, parse_special=parse_special, **options)
        for line in all_warnings(llm):
            warn(line)
        with _interruptible(cancel):
            completion = _generate(pieces, out if stream and not as_json else None, waited)
        if as_json:
            out.write(json.dumps(_report(llm, completion, waited), ensure_ascii=False))
        elif not stream:
            out.write(completion.text)
    states.save(llm, completion, quiet=quiet)
    if completion.context_full:
        note(f"the context of {llm.cache.n_ctx} tokens is full; a larger one (-c) makes more room")
    if grammar is not None and completion.finish_reason == "length":
        warn(f"the text broke off before it was all of what the {grammar.what} asks for")
    if audit is not None:
        found = completion.audit
        say(f"audit: {found.line() if found is not None else 'there are no tokens'}")
    if stats:
        for line in _stats(llm, completion, waited):
            say(line)
        if line := pieces.degeneration().line(llm.cache):
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


def _summary(llm: LLM) -> list[str]:
    segments = [spec for layout in llm.engine.cache.layouts for spec in layout.segments]
    rotations = [("K", spec.rotation_k) for spec in segments]
    rotations += [("V", spec.rotation_v) for spec in segments]
    rotated = "".join(f"{side} rotated by {n}, " for side, n in dict.fromkeys(rotations) if n)
    device = llm.backend.name + (f", {llm.backend.hardware}" if llm.backend.hardware else "")
    model = f"{llm.config.name}: {llm.config.architecture}"
    kernels = (f"{operation}: {words}" for operation, words in llm.kernels.items())
    if not llm.backend.hardware:
        device += f", {llm.engine.slot.threads.in_words()}"
    types = [f"K/V by layer: {in_words(llm.cache.layer_types)}"] if llm.cache.layer_types else []
    if books := codebooks_in_words(llm.engine.cache.codebooks):
        types.append(f"codebooks: {books}")
    spec = llm.speculation
    guesses = f"speculation: {spec.drafter}, up to {counted(spec.draft_max, 'token')} at a time"
    return [f"{model}, {rotated}on {device}", *types, *kernels, *[guesses] * spec.is_on]


def _report(llm: LLM, completion: Completion, waited: Waited) -> dict[str, Any]:
    """The object that `--json` prints."""
    result = asdict(replace(completion, logprobs=None))
    for name in ("logprobs", "tool_calls", "content"):  # no tools, no calls
        del result[name]
    if completion.audit is None:
        del result["audit"]
    if completion.logprobs is not None:
        from localkv.engine.logprobs import as_openai

        result["logprobs"] = as_openai(completion.logprobs)
    waits = {f"{name}_seconds": seconds for name, seconds in asdict(waited).items()}
    result["timings"] = {**waits, **result["timings"]}
    return {
        **result,
        "model": {
            "path": str(llm.gguf.path),
            "name": llm.config.name,
            "architecture": llm.config.architecture,
        },
        "cache": {
            **_types_json(llm.cache),
            "n_ctx": llm.cache.n_ctx,
            "bytes": llm.memory.cache_k + llm.memory.cache_v,
            "groups": groups_json(llm.memory),
        },
        "memory": memory_json(llm.memory),
        "backend": llm.backend.name,
        "warnings": all_warnings(llm),
    }


def _types_json(cache: CacheConfig) -> dict[str, Any]:
    """The types of K and of V, and of each layer where these differ."""
    type_k, type_v = cache.shown_types
    layers = [pair and "/".join(pair) for pair in cache.layer_types]
    found: dict[str, Any] = {"type_k": type_k, "type_v": type_v}
    if cache.kv_budget is not None:
        found["ladder"] = ["/".join(pair) for pair in cache.kv_ladder]
    return {**found, **({"layer_types": layers} if layers else {})}


def _stats(llm: LLM, completion: Completion, waited: Waited) -> list[str]:
    usage, timings = completion.usage, completion.timings
    evaluated = counted(usage.prompt_tokens - usage.cached_tokens, "token")
    generated = counted(usage.completion_tokens, "token")
    return [
        f"start:        {waited.start:.2f} s",
        f"load:         {waited.load:.2f} s",
        f"first token:  {waited.first_token:.2f} s",
        f"prompt eval:  {evaluated} in {timings.prompt_seconds:.2f} s, "
        f"{timings.prompt_per_second:.2f} tokens/s",
        f"eval:         {generated} in {timings.decode_seconds:.2f} s, "
        f"{timings.decode_per_second:.2f} tokens/s",
        *_speculated(llm, usage),
        *_requantised(llm, completion),
        f"cache:        {cache_types(llm)}, "
        f"{usage.total_tokens} of {llm.cache.n_ctx} tokens, "
        f"{byte_size(llm.memory.cache_k + llm.memory.cache_v)}",
        f"memory:       {memory_bytes(llm.memory)}",
        f"attention:    {llm.kernels['attention']}",
        f"products:     {llm.kernels['products']}",
        f"finished:     {completion.finish_reason}, seed {completion.seed}",
    ]


def _requantised(llm: LLM, completion: Completion) -> list[str]:
    """What became of the pages of a cache with a budget."""
    ladder = llm.engine.cache.ladder
    if ladder is None:
        return []
    seconds = completion.timings.requantise_seconds
    pairs = ("/".join(pair) for pair in llm.cache.kv_ladder)
    mix = ", ".join(f"{n} in {pair}" for n, pair in zip(ladder.counts(), pairs, strict=True) if n)
    pages = counted(completion.usage.requantised_pages, "page")
    return [f"requantised:  {pages} in {seconds:.3f} s; now {mix}"]


def _speculated(llm: LLM, usage: Usage) -> list[str]:
    """What came of guesses, if there could be any."""
    if not llm.speculation.is_on:
        return []
    drafted = counted(usage.drafted_tokens, "drafted token")
    share = f" ({usage.accepted_tokens / usage.drafted_tokens:.0%})" if usage.drafted_tokens else ""
    verified = counted(usage.verified_batches, "verification")
    return [f"speculation:  {usage.accepted_tokens} of {drafted} accepted{share}, in {verified}"]


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
        *_PROMPT_OPTIONS,
        *loading_options(),
        *length_options(),
        *sampling_options(),
        *grammar_options(),
        *speculation_options(),
        *state_options(),
        *_OUTPUT_OPTIONS,
    ],
    callback=_run,
    help="Continue a prompt, or answer it with --chat.\n\n"
    "stdout gets the text and a final line break if it has none; the prompt is not repeated. "
    "Without -p and -f the prompt is the text on stdin. If no model is named, the one that ships "
    "with localkv answers.",
    epilog="Every option can also be set as LOCALKV_<NAME> (LOCALKV_CTX_SIZE), where llama.cpp has "
    "a variable for it as LLAMA_ARG_<NAME>, or in the [complete] table of config.toml.",
)
