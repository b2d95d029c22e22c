"""llama.cpp's flags that mean nothing here, and the advice for users who paste one.

One that would change nothing is skipped with a note; one that would change the result is refused.
Flags that localkv has itself are not in this table.
"""

from __future__ import annotations

from dataclasses import dataclass

_TRUE = frozenset({"on", "enabled", "true", "1"})
_FALSE = frozenset({"off", "disabled", "false", "0"})
_AUTO = frozenset({"auto", "-1"})


@dataclass(frozen=True)
class ForeignFlag:
    """One flag of llama.cpp.

    Attributes:
        names: all its spellings.
        advice: the reason why it is not needed, or the alternative.
        n_values: arguments that follow it.
        optional_values: words that belong to it if they follow it.
        refused: it would change the result.
        except_values: with one of these, `refused` is the other way round.
    """

    names: tuple[str, ...]
    advice: str
    n_values: int = 0
    optional_values: frozenset[str] = frozenset()
    refused: bool = False
    except_values: frozenset[str] = frozenset()

    def is_refused(self, value: str | None) -> bool:
        return self.refused != (value in self.except_values)


def _skipped(
    names: str,
    advice: str,
    n_values: int = 0,
    optional: frozenset[str] = frozenset(),
    refused_for: frozenset[str] = frozenset(),
) -> ForeignFlag:
    return ForeignFlag(tuple(names.split()), advice, n_values, optional, False, refused_for)


def _refused(
    names: str, advice: str, n_values: int = 0, unless: frozenset[str] = frozenset()
) -> ForeignFlag:
    return ForeignFlag(tuple(names.split()), advice, n_values, refused=True, except_values=unless)


_ONE_DEVICE = "the whole model and its cache run on one device (--device)"
_NO_CACHE_COPY = "attention always reads the packed cache as it is"
_MAPPED = "the file is always memory-mapped"
_THREADS = "-t sets the threads of prefill and decode; the system schedules them"
_LOGS = "-q leaves out the line about memory; nothing else is logged unless -v or --stats is given"
_TEMPLATE = "--chat renders the model's own template; --chat-template-file FILE takes another"
_NO_CONVERSATION = "`complete` answers once; --chat applies the chat template to the prompt"
_NO_DRAFT = "there is no speculative decoding, which only changes the speed"
_NO_GRAMMAR = "output can't be constrained by a grammar or a schema"
_NO_TASKS = "`perplexity` scores plain text only, with no choice of how"
_ROPE = "RoPE is scaled as the model file says; its settings can't be overridden"
_HF_ONLY = "-hf ORG/REPO takes a model from Hugging Face; download any other and give its path"
_NO_ADAPTER = "adapters can't be applied at load; merge them into the model file first"

FOREIGN_FLAGS = (
    # attention and cache
    _skipped(
        "-fa --flash-attn",
        f"{_NO_CACHE_COPY}, with any type of K and V",
        optional=_TRUE | _FALSE | _AUTO,
        refused_for=_FALSE,
    ),
    _skipped("-nkvo --no-kv-offload -kvo --kv-offload", _ONE_DEVICE),
    _skipped("-kvu --kv-unified -no-kvu --no-kv-unified", "there is one sequence"),
    _skipped("-np --parallel", "`complete` runs one sequence", 1),
    _skipped("--swa-full", "the cache always holds the whole context"),
    _skipped("-dt --defrag-thold", "the paged cache does not fragment", 1),
    _skipped("-cram --cache-ram -ctxcp --ctx-checkpoints", "`complete` keeps no prompts", 1),
    _skipped("--keep", "the context is never shifted", 1),
    _skipped("--no-context-shift", "the context is never shifted"),
    _refused("--context-shift", "the text ends where the context does; -c makes it longer"),
    _refused("-gan --grp-attn-n -gaw --grp-attn-w", "self-extend is not supported", 1),
    _skipped("--prompt-cache", "nothing is saved; the prompt is evaluated each time", 1),
    _skipped("--prompt-cache-all --prompt-cache-ro", "nothing is saved"),
    # devices and loading
    _skipped("-ngl --gpu-layers --n-gpu-layers", _ONE_DEVICE, 1),
    _skipped("-sm --split-mode -ts --tensor-split -mg --main-gpu", _ONE_DEVICE, 1),
    _skipped("-ot --override-tensor -ncmoe --n-cpu-moe", _ONE_DEVICE, 1),
    _skipped("-cmoe --cpu-moe --op-offload --no-op-offload --no-host", _ONE_DEVICE),
    _skipped("-fitt --fit-target -fitc --fit-ctx", "nothing is adjusted; -c sets the context", 1),
    _skipped("--mlock --mmap --no-mmap -dio --direct-io -ndio --no-direct-io", _MAPPED),
    _skipped("-lm --load-mode", _MAPPED, 1),
    _skipped("--repack -nr --no-repack", "weights are read as they lie in the file"),
    _skipped("--check-tensors", "the header is always checked, the weights never"),
    _skipped("--warmup --no-warmup", "there is no warm-up run"),
    _refused("-mu --model-url -dr --docker-repo", _HF_ONLY, 1),
    _refused("-hft --hf-token", "set HF_TOKEN, which other users can't see in the process list", 1),
    _refused("--list-devices", "localkv complete --help lists the devices"),
    # threads
    _skipped("-tb --threads-batch --prio --prio-batch --poll --poll-batch --numa", _THREADS, 1),
    _skipped(
        "-C --cpu-mask -Cr --cpu-range -Cb --cpu-mask-batch -Crb --cpu-range-batch", _THREADS, 1
    ),
    _skipped("--cpu-strict --cpu-strict-batch", _THREADS, 1),
    # the prompt and the conversation
    _skipped("--jinja", f"templates are always Jinja; {_TEMPLATE}"),
    _refused("--no-jinja", f"templates are always Jinja; {_TEMPLATE}"),
    _refused("--chat-template", _TEMPLATE, 1),
    _skipped("-no-cnv --no-conversation -st --single-turn", _NO_CONVERSATION),
    _refused("-cnv --conversation -i --interactive -if --interactive-first", _NO_CONVERSATION),
    _refused("-mli --multiline-input --in-prefix-bos", _NO_CONVERSATION),
    _refused("--in-prefix --in-suffix", _NO_CONVERSATION, 1),
    _refused("-sysf --system-prompt-file", 'use -sys "$(cat FILE)"', 1),
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
    _refused("--grammar --grammar-file -j --json-schema -jf --json-schema-file", _NO_GRAMMAR, 1),
    _refused("--mirostat", "--top-p, --min-p and --temp shape the distribution", 1, _FALSE),
    _skipped("--mirostat-lr --mirostat-ent", "there is no Mirostat sampler", 1),
    _refused("--adaptive-target", "there is no adaptive-p sampler", 1, _AUTO | {"-1.0"}),
    _skipped("--adaptive-decay", "there is no adaptive-p sampler", 1),
    _skipped("-bs --backend-sampling", "tokens are always sampled on the CPU"),
    # the model
    _refused("--lora --lora-scaled --control-vector --control-vector-scaled", _NO_ADAPTER, 1),
    _refused("--control-vector-layer-range", _NO_ADAPTER, 2),
    _refused("--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale", _ROPE, 1),
    _refused("--yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor", _ROPE, 1),
    _refused("--yarn-beta-slow --yarn-beta-fast", _ROPE, 1),
    _refused("--override-kv", "--override-pre NAME sets tokenizer.ggml.pre, the rest is fixed", 1),
    _skipped("-md --model-draft --draft --draft-max --draft-min --spec-type", _NO_DRAFT, 1),
    _skipped("-ctkd --cache-type-k-draft -ctvd --cache-type-v-draft", _NO_DRAFT, 1),
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
)

BY_NAME = {name: flag for flag in FOREIGN_FLAGS for name in flag.names}
