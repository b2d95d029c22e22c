"""Flags and commands of llama.cpp, ollama and llm that mean nothing here, and what to use instead.

A flag that would change nothing is skipped with a note. So is a flag that is not supported yet, if
the result is the same without it; its note says so. A flag that would change the result is
refused. An option that a command has itself is never looked up here.

Advice names options plainly: where a command lacks one, `parsing.check_arguments` names a command
that has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Answer = Literal["not needed", "left out", "refused"]

_TRUE = frozenset({"on", "enabled", "true", "1"})
_FALSE = frozenset({"off", "disabled", "false", "0"})
_AUTO = frozenset({"auto", "-1"})


@dataclass(frozen=True)
class ForeignFlag:
    """One flag of another program.

    Attributes:
        names: all its spellings.
        advice: the reason why it is not needed, or the alternative.
        n_values: arguments that follow it.
        optional_values: words that belong to it if they follow it.
        kind: it changes nothing here, it is not supported but the result is the same, or it would
            change the result.
        except_values: with one of these, "not needed" becomes "refused", and the others
            "not needed".
    """

    names: tuple[str, ...]
    advice: str
    n_values: int = 0
    optional_values: frozenset[str] = frozenset()
    kind: Answer = "not needed"
    except_values: frozenset[str] = frozenset()

    def answer(self, value: str | None) -> Answer:
        """What becomes of it with a value, in lower case."""
        if value not in self.except_values:
            return self.kind
        return "refused" if self.kind == "not needed" else "not needed"


def _skipped(
    names: str,
    advice: str,
    n_values: int = 0,
    optional: frozenset[str] = frozenset(),
    refused_for: frozenset[str] = frozenset(),
) -> ForeignFlag:
    return ForeignFlag(tuple(names.split()), advice, n_values, optional, except_values=refused_for)


def _left_out(
    names: str, advice: str, n_values: int = 0, unless: frozenset[str] = frozenset()
) -> ForeignFlag:
    return ForeignFlag(
        tuple(names.split()), advice, n_values, kind="left out", except_values=unless
    )


def _refused(
    names: str, advice: str, n_values: int = 0, unless: frozenset[str] = frozenset()
) -> ForeignFlag:
    return ForeignFlag(tuple(names.split()), advice, n_values, kind="refused", except_values=unless)


_ONE_DEVICE = "products are computed where their weights are"
_ROWS = "layers are divided over GPUs (--device cuda0,cuda1), and none is cut"
_NO_CACHE_COPY = "attention always reads the packed cache as it is"
_READ = "--mlock and --no-mmap say how the file is read"
_THREADS = "-t and -tb set the threads; they sleep by themselves when there is nothing to do"
_LOGS = "-q leaves out the line about memory; nothing else is logged unless -v or --stats is given"
_TEMPLATE = "--chat renders the model's own template; --chat-template NAME takes another"
_JINJA = "templates are always Jinja; --chat-template NAME takes another than the model's"
_IN_REQUESTS = "requests say what they want: a chat, or plain text that goes on"
_CONVERSATION = "localkv chat is a conversation; localkv complete --chat answers one prompt"
_NO_CONVERSATION = "only localkv chat is a conversation"
_SERVER = "localkv serve has it"
_EMBED = "localkv embed prints embeddings; localkv serve makes them without an option"
_RERANK = "localkv rerank orders documents; localkv serve does without an option"
_GRAMMAR = "localkv complete keeps its text to a grammar or a JSON schema"
_FORMAT = (
    "localkv complete -j SCHEMA keeps the text to a JSON schema; --json reports the text and its "
    "figures"
)
_NO_TASKS = "`perplexity` scores plain text only, with no choice of how"
_HF_ONLY = "-hf ORG/REPO takes a model from Hugging Face; download any other and give its path"
_NO_ADAPTER = "control vectors can't be applied; LoRA adapters can (--lora)"

FOREIGN_FLAGS = (
    # attention and cache
    _skipped(
        "-fa --flash-attn",
        f"{_NO_CACHE_COPY}, with any type of K and V",
        optional=_TRUE | _FALSE | _AUTO,
        refused_for=_FALSE,
    ),
    _skipped("-kvu --kv-unified -no-kvu --no-kv-unified", "this command continues one text"),
    _skipped("-np --parallel", "this command continues one text; LLM(n_parallel=) does many", 1),
    _skipped("-cb --cont-batching -nocb --no-cont-batching", "this command continues one text"),
    _skipped("-dt --defrag-thold", "the paged cache does not fragment", 1),
    _skipped("-cram --cache-ram", "texts are kept in the cache itself, as far as it has room", 1),
    _skipped("--keep", "the context is never shifted", 1),
    _skipped("--no-context-shift", "the context is never shifted"),
    _refused("--context-shift", "the text ends where the context does; -c makes it longer"),
    _refused("-gan --grp-attn-n -gaw --grp-attn-w", "self-extend is not supported", 1),
    # devices and loading
    _left_out("-sm --split-mode", _ROWS, 1, unless=frozenset({"none", "layer"})),
    _skipped("--op-offload --no-op-offload --no-host", _ONE_DEVICE),
    _skipped("-fitt --fit-target -fitc --fit-ctx", "nothing is adjusted; -c sets the context", 1),
    _skipped("-dio --direct-io -ndio --no-direct-io", _READ),
    _refused("-lm --load-mode", _READ, 1, unless=_AUTO | {"mmap"}),
    _skipped("--repack -nr --no-repack", "weights are read as they lie in the file"),
    _skipped("--check-tensors", "the header is always checked, the weights never"),
    _skipped("--warmup --no-warmup", "there is no warm-up run"),
    _refused("-mu --model-url -dr --docker-repo", _HF_ONLY, 1),
    _refused("-hft --hf-token", "set HF_TOKEN, which other users can't see in the process list", 1),
    _refused("--list-devices", "localkv doctor shows what there is; --device cuda or cpu chooses"),
    # threads
    _skipped("--prio --prio-batch --poll --poll-batch --numa", _THREADS, 1),
    _skipped(
        "-Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch",
        "-C, -Cr and --cpu-strict hold for prompts, too",
        1,
    ),
    # the prompt and the conversation
    _skipped("--jinja", f"templates are always Jinja; {_TEMPLATE}"),
    _refused("--no-jinja", f"templates are always Jinja; {_TEMPLATE}"),
    _skipped("-no-cnv --no-conversation -st --single-turn", _NO_CONVERSATION),
    _refused("-cnv --conversation -i --interactive -if --interactive-first", _CONVERSATION),
    _refused("-ins --instruct -cml --chatml", _CONVERSATION),
    _refused("-mli --multiline-input --in-prefix-bos", _CONVERSATION),
    _refused("--in-prefix --in-suffix", _CONVERSATION, 1),
    _refused("-bf --binary-file", "use -f FILE, which must be UTF-8", 1),
    _skipped("--no-display-prompt", "the prompt is never printed"),
    _refused("--display-prompt", "the prompt is never printed"),
    _refused("-sp --special", "control tokens are never printed; --json has their count"),
    _refused(
        "-rea --reasoning", "--think and --no-think switch it, --reasoning-budget N limits it", 1
    ),
    _refused("--reasoning-format", "the text has the reasoning as the model writes it", 1),
    _refused("--reasoning-budget-message", "--reasoning-budget N ends it without a message", 1),
    _skipped("--skip-chat-parsing --no-skip-chat-parsing", "the text is never parsed"),
    _refused("-mm --mmproj --image --audio", "only text models are supported", 1),
    # sampling
    _refused("--format --response-format --schema", _FORMAT, 1),
    _refused("--n-probs --top-logprobs", "localkv complete --json --logprobs N prints them", 1),
    _skipped("-bs --backend-sampling", "tokens are always sampled on the CPU"),
    # the model
    _refused("--control-vector --control-vector-scaled", _NO_ADAPTER, 1),
    _refused("--control-vector-layer-range", _NO_ADAPTER, 2),
    # servers and embeddings
    _refused("--port --host --api-key --api-key-file -a --alias", _SERVER, 1),
    _refused("--ssl-key-file --ssl-cert-file -to --timeout --slot-save-path", _SERVER, 1),
    _refused("--slots --no-slots --metrics --webui --no-webui --ui --no-ui", _SERVER),
    _refused("--path", "localkv serve has a page of its own, which --no-ui leaves out", 1),
    _refused("--api-prefix", "a proxy before localkv serve can add a prefix", 1),
    _refused("--props", "options say how the server works; /props shows it"),
    _skipped("--threads-http", "one process takes all requests; -np N runs N of them at a time", 1),
    _skipped("--cache-reuse", "what texts have in common from their start is read once", 1),
    _refused("--models-dir --models-max --models-preset --sleep-idle-seconds", _SERVER, 1),
    _refused("--models-autoload --no-models-autoload", _SERVER),
    _refused("--embedding --embeddings --embd-output-format", _EMBED),
    _refused("--rerank --reranking", _RERANK),
    _skipped("--keepalive", "the model stays loaded for as long as the command runs", 1),
    # perplexity
    _refused(
        "--kl-divergence-base --save-all-logits",
        "--save-base FILE writes a base, of our own format, and --base FILE compares with it",
        1,
    ),
    _refused("--hellaswag --winogrande --multiple-choice", _NO_TASKS),
    _refused("--hellaswag-tasks --winogrande-tasks --multiple-choice-tasks", _NO_TASKS, 1),
    _refused("--ppl-stride --ppl-output-type", _NO_TASKS, 1, unless=frozenset({"0"})),
    # output
    _skipped(
        "-co --color", "only messages on a terminal are coloured", optional=_TRUE | _FALSE | _AUTO
    ),
    _skipped("--simple-io", "stdout carries the text and nothing else"),
    _skipped("--log-disable --log-prefix --log-timestamps --verbose-prompt", _LOGS),
    _skipped("--log-file --log-colors -lv --verbosity --log-verbosity", _LOGS, 1),
    _skipped("--perf --no-perf --show-timings --no-show-timings", "--stats shows the timings"),
    _skipped("-ptc --print-token-count", "--stats shows the counts", 1),
    _skipped("--nowordwrap", "lines are never wrapped"),
    _refused("--hidethinking", f"--no-think keeps a model from reasoning; {_TEMPLATE}"),
)

_GRAMMAR_FLAGS = (
    _refused("--grammar --grammar-file -j --json-schema -jf --json-schema-file", _GRAMMAR, 1),
)
_SERVE_FLAGS = (  # what llama-server has, and speaks of the text of one
    _refused(
        "-sys --system-prompt -sysf --system-prompt-file",
        "a request's first message can be one of the role system",
        1,
    ),
    _skipped("--jinja", _JINJA),
    _refused("--no-jinja", _JINJA),
    _refused("--hidethinking", "-rea off keeps a model from reasoning"),
    _refused("-cnv --conversation -i --interactive -if --interactive-first", _IN_REQUESTS),
    _refused("-ins --instruct -cml --chatml -mli --multiline-input --in-prefix-bos", _IN_REQUESTS),
    _skipped("-kvu --kv-unified -no-kvu --no-kv-unified", "all requests share one cache"),
    _skipped("-cb --cont-batching -nocb --no-cont-batching", "requests always share steps"),
    _skipped("-v --verbose", "--log-file FILE has a line for each request"),
)
_BENCH_FLAGS = (  # llama-bench's: some take a value that they lack elsewhere
    *_GRAMMAR_FLAGS,
    _skipped("-fa --flash-attn", _NO_CACHE_COPY, 1, refused_for=_FALSE),
    _skipped("-nopo --no-op-offload --no-host", _ONE_DEVICE, 1),
    _skipped("-mmp --mmap -dio --direct-io", "the model is loaded before anything is timed", 1),
    _refused("-embd --embeddings", "embeddings are not timed", 1, _FALSE),
    _skipped("--delay", "tests follow each other at once", 1),
    _skipped("--progress", "a terminal always shows the progress"),
    _skipped("-v --verbose", "-o json says all that was measured"),
)
_CHAT_FLAGS = (
    *_GRAMMAR_FLAGS,
    _skipped("-cnv --conversation -i --interactive -if --interactive-first", "this is the chat"),
    _skipped("-mli --multiline-input", "Ctrl+J starts a new line in the chat"),
    _refused("-no-cnv --no-conversation -st --single-turn", _CONVERSATION),
    _refused("-p --prompt -f --file", _CONVERSATION, 1),
    _skipped("--jinja", "templates are always Jinja"),
    _skipped("-v --verbose --stats", "F2 shows the model, its memory and its speed"),
)

BY_NAME = {name: flag for flag in FOREIGN_FLAGS for name in flag.names}
BY_COMMAND = {
    command: {name: flag for flag in flags for name in flag.names}
    for command, flags in {
        "bench": _BENCH_FLAGS,
        "chat": _CHAT_FLAGS,
        "serve": _SERVE_FLAGS,
    }.items()
}


def foreign_flag(command: str | None, name: str) -> ForeignFlag | None:
    """The flag of this name, as a command answers it."""
    return BY_COMMAND.get(command or "", BY_NAME).get(name) or BY_NAME.get(name)


_TALK = "localkv chat talks with a model, localkv complete -p TEXT continues a text once"
_SERVES = "localkv serve serves a model over HTTP until Ctrl-C"
_LOADED = (
    "a model is loaded for as long as a command runs; localkv list shows those on this machine"
)
_FILES = "models are GGUF files: localkv pull fetches one, -m FILE takes any other"

FOREIGN_COMMANDS = {
    **dict.fromkeys(("run", "cli", "prompt", "generate", "completion"), _TALK),
    **dict.fromkeys(("server", "start", "stop"), _SERVES),
    **dict.fromkeys(("ps", "status"), _LOADED),
    **dict.fromkeys(("create", "cp", "push"), _FILES),
    **dict.fromkeys(("ls", "models"), "localkv list shows the models on this machine"),
    **dict.fromkeys(("download", "get", "install"), "localkv pull ORG/REPO fetches a model"),
    **dict.fromkeys(("remove", "delete", "uninstall"), "localkv rm deletes a fetched model"),
    **dict.fromkeys(("info", "inspect"), "localkv show FILE shows what is in a model file"),
    **dict.fromkeys(("ppl", "eval"), "localkv perplexity measures how well a text is predicted"),
    "help": "localkv --help, and localkv COMMAND --help",
    "version": "localkv --version",
}
"""Command -> the hint for who types it."""
