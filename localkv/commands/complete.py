"""`localkv complete`: continue a prompt, or answer it with `--chat`.

stdout holds the text only. The prompt comes from -p, from a file, or from stdin. A grammar or a
JSON schema may constrain the text, and a saved state may come before it and be written after it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event, current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import click
from click.core import ParameterSource

from localkv.cache.layout import codebooks_in_words, in_words
from localkv.commands.generation_options import (
    chat_arguments,
    chat_options,
    length_options,
    sampling_options,
    sampling_params,
    system_options,
    system_text,
    template_options,
    template_text,
    uses_chat_options,
)
from localkv.commands.loading_options import loading_options, speculation_options
from localkv.commands.model import (
    all_warnings,
    cache_types,
    groups_json,
    load_llm,
    memory_bytes,
    memory_json,
    memory_line,
)
from localkv.commands.model_file import named_or_shipped
from localkv.commands.options import (
    OUTPUT,
    Panel,
    escape_option,
    json_option,
    quiet_option,
    raw_option,
)
from localkv.commands.output import TextOutput, is_terminal, note, say, warn
from localkv.commands.parsing import Choice, Command, Whole
from localkv.commands.process import INTERRUPTED
from localkv.commands.texts import read_file, read_stdin, unescape, without_final_newline
from localkv.errors import UsageError, byte_size, counted, printable
from localkv.system.files import check_place
from localkv.system.this_process import process_age

if TYPE_CHECKING:
    from localkv.config import CacheConfig
    from localkv.engine.stream import Completion, TextStream, Usage
    from localkv.llm import LLM
    from localkv.structured.grammar import Grammar


STDIN = "{stdin}"
"""In -p, the place of the text on stdin."""

_PROMPT = Panel("Prompt")
_INFILL = Panel("Filling in the middle")
_STATE = Panel("Saved state")


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
    gap = Gap.of(values, escape=escape)
    unnamed = named_or_shipped(values)
    states = SavedStates.of(values)
    chat = chat or uses_chat_options(values)
    if chat and parse_special:
        raise UsageError(
            "--parse-special is for plain prompts",
            hint="in a chat only the template writes control tokens",
        )
    if gap is not None and (chat or parse_special or prompt is not None or file is not None):
        raise UsageError(
            "--prefix and --suffix are the prompt: -p, -f, --chat and --parse-special have no place"
        )
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs has no place in plain text", hint="--json prints them")
    params = sampling_params(values, escape=escape)
    template_options = chat_arguments(values, escape=escape)
    if escape:
        stop = tuple(map(unescape, stop))
    system_prompt, template = system_text(values, escape=escape), template_text(values)
    grammar = grammar_of_options(values)
    text = prompt_text(prompt, file, escape) if gap is None else ""
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
        elif gap is not None:
            pieces = llm.stream(gap.prompt(llm, options["max_tokens"]), **options)
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
    if not chat and not parse_special and gap is None and llm.has_chat_template:
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


def infill_options() -> list[click.Parameter]:
    """What `Gap.of` reads."""
    return [
        _INFILL.option(
            "--prefix",
            metavar="TEXT",
            help="Write what belongs between this and --suffix; the model needs tokens for that.",
        ),
        _INFILL.option("--prefix-file", metavar="FILE", help="A UTF-8 file of it, unchanged."),
        _INFILL.option("--suffix", metavar="TEXT", help="What follows the text."),
        _INFILL.option("--suffix-file", metavar="FILE", help="A UTF-8 file of it, unchanged."),
        _INFILL.option(
            "--extra-file",
            metavar="FILE",
            multiple=True,
            help="Another file of the project, for the model to read; may be repeated, the most "
            "important last.",
        ),
        _INFILL.flag("--spm-infill", help="Put the suffix before the prefix, as some models want."),
    ]


@dataclass(frozen=True)
class Gap:
    """A text with a gap that is to be filled in.

    Attributes:
        prefix, suffix: the text before and after it.
        extra: names and texts of other files.
        suffix_first: the suffix comes before the prefix.
    """

    prefix: str
    suffix: str
    extra: list[tuple[str, str]]
    suffix_first: bool

    @classmethod
    def of(cls, values: dict[str, Any], *, escape: bool) -> Gap | None:
        """Take the options of `infill_options` out of a command's; None if there is no gap.

        Raises:
            UsageError: they contradict each other, or a file can't be read.
            LocalKVError: a file is not UTF-8.
        """
        files, suffix_first = values.pop("extra_file"), values.pop("spm_infill")
        sides = list[str | None]()
        for name in ("prefix", "suffix"):
            text, file = values.pop(name), values.pop(f"{name}_file")
            if text is not None and file is not None:
                raise UsageError(f"--{name} and --{name}-file both give the {name}, use one")
            if file is not None:
                text = read_file(file, f"the {name}")
            elif text is not None and escape:
                text = unescape(text)
            sides.append(text)
        prefix, suffix = sides
        if prefix is None and suffix is None:
            if files or suffix_first:
                raise UsageError(
                    "there is nothing to fill in",
                    hint="--prefix and --suffix say what is around it",
                )
            return None
        extra = [(Path(file).name, read_file(file, "the file")) for file in files]
        return cls(prefix or "", suffix or "", extra, suffix_first)

    def prompt(self, llm: LLM, max_tokens: int | None) -> list[int]:
        """The tokens that ask for what fills it.

        Raises:
            UsageError: the model has no tokens for this.
        """
        return llm.infill_prompt(
            self.prefix,
            self.suffix,
            extra=self.extra,
            n_ctx=llm.cache.n_ctx,
            max_tokens=max_tokens,
            suffix_first=self.suffix_first,
        )


PROMPT_OPTIONS: list[click.Parameter] = [
    _PROMPT.option(
        "-p --prompt",
        metavar="TEXT",
        help=f"The text to continue. {STDIN} is replaced by standard input, which is otherwise "
        "not read.",
    ),
    _PROMPT.option(
        "-f --file",
        metavar="FILE",
        help="Read the prompt from a UTF-8 file, unchanged except for one final line break; - is "
        "stdin, which -p may follow, after an empty line.",
    ),
    escape_option(
        _PROMPT, "-p, -sys, --prefill, -r and --dry-sequence-breaker; never in files and stdin"
    ),
    _PROMPT.flag(
        "--parse-special",
        help="Read control tokens written in the prompt, such as <|im_start|>, as control tokens.",
    ),
    _PROMPT.flag("--chat", help="Answer the prompt through the model's chat template."),
    *system_options(_PROMPT, "prompt", "; implies --chat"),
    *template_options(_PROMPT, implied="; implies --chat"),
    *chat_options(_PROMPT, implied="; implies --chat"),
]

OUTPUT_OPTIONS: list[click.Parameter] = [
    OUTPUT.option(
        "-o --output",
        metavar="FILE",
        help="Write to this file instead of stdout, while the text is generated.",
    ),
    json_option(),
    OUTPUT.option(
        "--logprobs",
        type=Whole(0),
        help="With --json, say how probable each token was, and the N most probable ones: natural "
        "logarithms of the model's own probabilities, before all samplers.",
    ),
    OUTPUT.option(
        "--audit",
        type=Choice(["kept", "exact"]),
        is_flag=False,
        flag_value="kept",
        metavar="[exact]",
        help="Evaluate the text once more through an f16 cache, and say on stderr what the packed "
        "cache changed: divergence, and the tokens with another most likely choice. With exact the "
        "divergence leaves nothing out, and it takes twice as long.",
    ),
    OUTPUT.option(
        "--stream/--no-stream",
        type=bool,
        default=True,
        help="Print the text while it is generated, or once it is complete.  [default: stream]",
    ),
    raw_option(),
    OUTPUT.flag("--stats", help="Print speed and sizes on stderr at the end."),
    OUTPUT.flag("-v --verbose", help="Describe on stderr the model, and the kernels that run it."),
    quiet_option("Leave out the lines on stderr about memory and about the flags of --preset."),
]


def prompt_text(prompt: str | None, file: str | None, escape: bool) -> str:
    """The text to continue.

    stdin is read if there is neither -p nor -f, and if they ask for it: `-f -`, or `STDIN` in -p.
    Otherwise it may belong to somebody else, such as the loop of a shell that starts this program.

    Args:
        prompt: the value of -p; after `-f -` it follows the text on stdin and an empty line.
        file: the value of -f.
        escape: process escapes in -p; one of `STDIN`'s own characters makes it plain text.

    Raises:
        UsageError: there is no prompt, or more than one; or a file can't be read.
        LocalKVError: a text is not UTF-8.
    """
    if prompt is not None and file is not None:
        prompt, file = _nearest(prompt, file)
    if prompt is None:
        if file is not None:
            return without_final_newline(read_file(file))
        text = without_final_newline(read_stdin() or "")
        if not text:
            raise UsageError("there is no prompt: give -p TEXT, -f FILE, or text on stdin")
        return text
    pieces = prompt.split(STDIN)
    if escape:
        pieces = [unescape(piece) for piece in pieces]
    if len(pieces) > 1:
        return _piped(f"the text for {STDIN} in -p").join(pieces)
    if file is not None:
        return "\n\n".join(part for part in (_piped("the prompt"), *pieces) if part)
    return pieces[0]


def _piped(what: str) -> str:
    return without_final_newline(read_file("-", what))


def _nearest(prompt: str, file: str) -> tuple[str | None, str | None]:
    """The one of -p and -f that is on the command line; both if -p follows the text of `-f -`."""
    ctx = click.get_current_context()
    given = [
        name
        for name in ("prompt", "file")
        if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE
    ]
    if len(given) == 1:
        return (prompt, None) if given == ["prompt"] else (None, file)
    if file != "-":
        raise UsageError("-p and -f both give the prompt, use one")
    if STDIN in prompt:
        raise UsageError(f"-f - and {STDIN} in -p both read stdin, use one")
    return prompt, file


def summary_lines(llm: LLM) -> list[str]:
    """What `--verbose` says: the model, and what runs it."""
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


def report_json(llm: LLM, completion: Completion, waited: Waited) -> dict[str, Any]:
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


def stats_lines(llm: LLM, completion: Completion, waited: Waited) -> list[str]:
    """What `--stats` says: seconds, bytes, and what came of guesses and of a budget."""
    usage, timings = completion.usage, completion.timings
    evaluated = counted(usage.prompt_tokens - usage.cached_tokens, "token")
    generated = counted(usage.completion_tokens, "token")
    return [
        f"start:        {waited.start:.2f} s",
        f"load:         {waited.load:.2f} s",
        f"first token:  {waited.first_token:.2f} s",
        f"vocabulary:   {llm.tokenizer.read_seconds:.2f} s",
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


@dataclass
class Waited:
    """What a user waits for, in seconds; the sum is the time from the command to the first text.

    Attributes:
        start: from the start of the process until the model is opened.
        load: from then on until the model is ready.
        first_token: from then on until the first text, or the end if there is none.
    """

    start: float
    load: float
    first_token: float = 0.0

    @classmethod
    def for_model(cls, load_seconds: float) -> Self:
        """What it was so far, when a model has just become ready."""
        return cls(process_age() - load_seconds, load_seconds)

    def has_token(self) -> None:
        """There is text now, or the end; only the first call counts."""
        if not self.first_token:
            self.first_token = process_age() - self.start - self.load


_STRUCTURED = Panel("Structured output")
_JSON_BEGINS = ("{", "[", "true", "false")


def grammar_options() -> list[click.Parameter]:
    """What the text has to be."""
    return [
        _STRUCTURED.option(
            "-j --json-schema",
            metavar="JSON",
            help="The text is JSON that this JSON schema describes: the schema itself, such as "
            '\'{"type": "object"}\' for any object, or a file. With --chat it comes after the '
            "reasoning.",
        ),
        _STRUCTURED.option(
            "-jf --json-schema-file",
            metavar="FILE",
            help="The same, with the schema in a file; - is stdin.",
        ),
        _STRUCTURED.option(
            "--grammar",
            metavar="TEXT",
            help="The text is one of this grammar: GBNF, as llama.cpp has it, or llguidance's "
            "Lark.",
        ),
        _STRUCTURED.option(
            "--grammar-file",
            metavar="FILE",
            help="The same, with the grammar in a file; - is stdin.",
        ),
    ]


def grammar_of_options(values: Mapping[str, Any]) -> Grammar | None:
    """The grammar that one of the options asks for.

    Raises:
        UsageError: several do, or the one is malformed, or needs what there is no grammar for.
    """
    names = ("json_schema", "json_schema_file", "grammar", "grammar_file")
    given = [name for name in names if values[name] is not None]
    if not given:
        return None
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise UsageError(f"{flags} say what the text has to be: give one of them")
    from localkv.structured.grammar import Grammar

    [name] = given
    value = str(values[name])
    if name == "json_schema_file":
        value = read_file(value, "the JSON schema")
    elif name == "grammar_file":
        value = read_file(value, "the grammar")
    elif name == "json_schema" and not value.lstrip().startswith(_JSON_BEGINS):
        if not os.path.exists(value):
            raise UsageError(f"{value!r} is neither a JSON schema nor a file of one")
        value = read_file(value, "the JSON schema")
    return Grammar.of_text(value) if "grammar" in name else Grammar.json_schema(value)


_STATE_OPTIONS = ("save_state", "load_state", "prompt_cache", "prompt_cache_all", "prompt_cache_ro")


def state_options() -> list[click.Parameter]:
    """What `SavedStates.of` reads."""
    return [
        _STATE.option(
            "--load-state",
            metavar="FILE",
            help="Go on from the text that --save-state has put there, as far as the prompt begins "
            'like it; -p "" continues all of it. Other types of K and V are converted.',
        ),
        _STATE.option(
            "--save-state",
            metavar="FILE",
            help="Write prompt and answer there at the end, with their rows of K and V.",
        ),
        _STATE.option(
            "--prompt-cache",
            metavar="FILE",
            help="Load this file as --load-state does, if there is one, and write the prompt to it "
            "as --save-state does, if it is another one.",
        ),
        _STATE.flag("--prompt-cache-all", help="Write the answer to --prompt-cache, too."),
        _STATE.flag("--prompt-cache-ro", help="Leave the file of --prompt-cache as it is."),
    ]


@dataclass
class SavedStates:
    """What is loaded before a completion, and saved after it.

    Attributes:
        source: a file, or None.
        target: the same, to be written.
        saves_answer: the answer is saved, not only the prompt.
        if_new: only if the prompt was not in the file already.
    """

    source: str | None
    target: str | None
    saves_answer: bool
    if_new: bool

    @classmethod
    def of(cls, values: dict[str, Any]) -> SavedStates:
        """Take the options of `state_options` out of a command's.

        Raises:
            UsageError: they contradict each other, a file to load is missing, or one can't be
                written.
        """
        save, load, cache, every, read_only = (values.pop(name) for name in _STATE_OPTIONS)
        if cache is None:
            for name, value in (("all", every), ("ro", read_only)):
                if value:
                    raise UsageError(f"--prompt-cache-{name} is about --prompt-cache FILE")
            return cls(load, _checked(save), True, False)
        if load is not None or save is not None:
            raise UsageError(
                "--prompt-cache loads and saves a state itself",
                hint="use it alone, or --load-state and --save-state",
            )
        if every and read_only:
            raise UsageError("--prompt-cache-all writes the file that --prompt-cache-ro keeps")
        is_there = os.path.exists(cache) and (read_only or Path(cache).stat().st_size > 0)
        if read_only and not is_there:
            raise UsageError(
                f"the state {printable(cache)}: no such file",
                hint="leave out --prompt-cache-ro, and it is made",
            )
        target = None if read_only else _checked(cache)
        return cls(cache if is_there else None, target, every, not every)

    def load(self, llm: LLM, *, quiet: bool) -> list[int]:
        """Load the file, if there is one; returns the tokens of its text."""
        if self.source is None:
            return []
        started = time.perf_counter()
        ids = llm.load_state(self.source, convert=True, on_note=note)
        if not quiet:
            seconds = time.perf_counter() - started
            name = printable(self.source)
            say(f"loaded {counted(len(ids), 'token')} from {name} in {seconds:.2f} s")
        return ids

    def save(self, llm: LLM, completion: Completion, *, quiet: bool) -> None:
        """Save what was evaluated, if it is wanted; say if what was loaded was of no use."""
        usage = completion.usage
        if self.source is not None and usage.cached_tokens <= len(llm.tokenize("")):
            note(f"the prompt does not begin like the text of {printable(self.source)}")
        if self.target is None:
            return
        if self.if_new and usage.cached_tokens >= usage.prompt_tokens - 1 > 0:
            return
        if not self.saves_answer:
            llm.engine.truncate(usage.prompt_tokens)
        n_tokens = llm.save_state(self.target)
        if not quiet:
            size = byte_size(os.stat(self.target).st_size)
            say(f"saved {counted(n_tokens, 'token')} to {printable(self.target)}, {size}")


def _checked(target: str | None) -> str | None:
    """A file that is to be written, unless that shows to fail before a prompt is evaluated."""
    if target is not None:
        try:
            check_place(target)
        except OSError as error:
            raise UsageError(
                f"the state {printable(target)}: cannot be written: {error.strerror}"
            ) from error
    return target


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
        (
            "Fill in the middle, with a model for code",
            "localkv complete -m coder.gguf --prefix-file before.py --suffix-file after.py -n 64",
        ),
        ("For scripts", 'localkv complete -m model.gguf -p "2 + 2 =" -n 4 --temp 0 --json'),
    ],
    essentials="-p -f --chat -sys --think -m -hf -c -ctk -ctv --preset -n --temp -s -o --json "
    "--stats -q",
    params=[
        *PROMPT_OPTIONS,
        *infill_options(),
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
