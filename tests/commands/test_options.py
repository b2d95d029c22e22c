"""What options, variables and the configuration file turn into; the model is a stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from localkv.cli import COMMANDS, cli
from localkv.commands.complete import complete
from localkv.commands.other_programs import (
    BY_COMMAND,
    BY_NAME,
    FOREIGN_COMMANDS,
    FOREIGN_FLAGS,
    foreign_flag,
)
from localkv.commands.parsing import check_arguments
from localkv.quant_formats import KV_FORMATS
from localkv.sampling.params import SAMPLER_LETTERS, SAMPLER_ORDER, SamplingParams
from support.fake_llm import FakeLLM
from support.program import Program

BREAKER = "--dry-sequence-breaker"


@pytest.fixture
def params(program: Program, llm: type[FakeLLM], model: Path) -> Any:
    """Flags -> the `SamplingParams` that reach the model."""

    def run(*flags: str) -> SamplingParams:
        result = program("complete", "-m", model, "-p", "x", *flags)
        assert result.code == 0, result.err
        return llm.asked["params"]

    return run


def test_no_flags_are_the_defaults(params, llm) -> None:
    assert params() == SamplingParams(seed=-1)
    assert llm.asked["max_tokens"] is None
    assert llm.asked["stop"] == ()
    assert not llm.asked["ignore_eos"]
    assert not llm.asked["parse_special"]
    expected = {
        "n_ctx": None,
        "cache_type_k": "f16",
        "cache_type_v": "f16",
        "cache_type_k_swa": None,
        "cache_type_v_swa": None,
        "swa_full": False,
        "cache_type_k_rope": "f16",
        "ctx_checkpoints": 8,
        "checkpoint_min_step": 1024,
        "kv_tail": None,
        "kv_sink": None,
        "kv_rotation": "auto",
        "k_before_rope": False,
        "kv_scales": None,
        "n_batch": 512,
        "n_gpu_layers": None,
        "n_cpu_moe": 0,
        "override_tensor": [],
        "offload_kqv": True,
        "tensor_split": None,
        "main_gpu": 0,
        "n_threads": None,
        "n_threads_batch": None,
        "cpus": None,
        "cpu_strict": False,
        "device": "auto",
        "rope_scaling": None,
        "rope_scale": None,
        "rope_freq_base": None,
        "rope_freq_scale": None,
        "yarn_orig_ctx": None,
        "yarn_ext_factor": None,
        "yarn_attn_factor": None,
        "yarn_beta_slow": None,
        "yarn_beta_fast": None,
        "override_pre": None,
        "override_kv": None,
        "spec": None,
        "draft_model": None,
        "draft_max": 15,
        "draft_min": 1,
        "draft_p_min": 0.0,
        "cache_type_k_draft": "f16",
        "cache_type_v_draft": "f16",
        "fit": "on",
        "mlock": False,
        "use_mmap": True,
        "activations": "auto",
    }
    assert llm.loaded == {"path": llm.loaded["path"], **expected}


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("-s 7", "seed", 7),
        ("--seed -1", "seed", -1),
        ("--temp 0", "temperature", 0.0),
        ("--temperature 1.5", "temperature", 1.5),
        ("--top-k 5", "top_k", 5),
        ("--top-p 0.5", "top_p", 0.5),
        ("--min-p 0.1", "min_p", 0.1),
        ("--typical 0.7", "typ_p", 0.7),
        ("--typical-p 0.7", "typ_p", 0.7),
        ("--top-nsigma 2", "top_n_sigma", 2.0),
        ("--top-n-sigma 2", "top_n_sigma", 2.0),
        ("--xtc-probability 0.5", "xtc_probability", 0.5),
        ("--xtc-threshold 0.2", "xtc_threshold", 0.2),
        ("--dynatemp-range 0.3", "dynatemp_range", 0.3),
        ("--dynatemp-exp 2", "dynatemp_exponent", 2.0),
        ("--repeat-last-n -1", "repeat_last_n", -1),
        ("--repeat-penalty 1.1", "repeat_penalty", 1.1),
        ("--presence-penalty 0.4", "presence_penalty", 0.4),
        ("--frequency-penalty -0.4", "frequency_penalty", -0.4),
        ("--dry-multiplier 0.8", "dry_multiplier", 0.8),
        ("--dry-base 2", "dry_base", 2.0),
        ("--dry-allowed-length 3", "dry_allowed_length", 3),
        ("--dry-penalty-last-n 64", "dry_penalty_last_n", 64),
        (f"{BREAKER} . {BREAKER} \\n", "dry_sequence_breakers", (".", "\n")),
        (f"{BREAKER} none", "dry_sequence_breakers", ()),
        (f"{BREAKER} a {BREAKER} none", "dry_sequence_breakers", ()),
        ("-l 15-1.5 --logit-bias 7+2 -l 9-inf", "logit_bias", {15: -1.5, 7: 2, 9: float("-inf")}),
        ("-l 15-1 -l 15+3", "logit_bias", {15: 2.0}),
        ("--samplers top-k;temp", "samplers", ("top_k", "temperature")),
        ("--sampling-seq kt", "samplers", ("top_k", "temperature")),
        (f"--sampler-seq {SAMPLER_LETTERS}", "samplers", SAMPLER_ORDER),
        ("--top_k 5", "top_k", 5),  # llama.cpp takes _ for - in long options
        ("--top-k=5", "top_k", 5),
    ],
)
def test_a_sampler_flag_sets_its_field(params, flags: str, field: str, value: object) -> None:
    chosen = params(*flags.split(" "))
    assert getattr(chosen, field) == value
    assert chosen == SamplingParams(**{"seed": -1, field: value})


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("-c 128", "n_ctx", 128),
        ("--ctx-size 0", "n_ctx", 0),
        ("-c=128", "n_ctx", 128),
        ("-c128", "n_ctx", 128),
        ("-ctk f32", "cache_type_k", "f32"),
        ("-ctv BF16", "cache_type_v", "bf16"),
        ("--cache-type-v=bf16", "cache_type_v", "bf16"),
        ("-ctk Q4_0", "cache_type_k", "q4_0"),
        ("--kv-rotation off", "kv_rotation", "off"),
        ("-t 3", "n_threads", 3),
        ("-t -1", "n_threads", None),
        ("-tb 3", "n_threads_batch", 3),
        ("-C 1", "cpus", [0]),
        ("-Cr 0-0", "cpus", [0]),
        ("--cpu-strict 1", "cpu_strict", True),
        ("--threads-batch -1", "n_threads_batch", None),
        ("-b 100", "n_batch", 100),
        ("-ub 64", "n_batch", 64),
        ("-ub 1024", "n_batch", 1024),
        ("-ub 4096", "n_batch", 2048),
        ("-b 4096", "n_batch", 512),
        ("--device reference", "device", "reference"),
        ("--rope-scaling yarn", "rope_scaling", "yarn"),
        ("--rope-scale 4", "rope_scale", 4.0),
        ("--rope-freq-base 1e6", "rope_freq_base", 1e6),
        ("--rope-freq-scale 0.25", "rope_freq_scale", 0.25),
        ("--yarn-orig-ctx 32768", "yarn_orig_ctx", 32768),
        ("--yarn-ext-factor -1", "yarn_ext_factor", -1.0),
        ("--yarn-attn-factor 1.5", "yarn_attn_factor", 1.5),
        ("--yarn-beta-slow 2", "yarn_beta_slow", 2.0),
        ("--yarn-beta-fast 16", "yarn_beta_fast", 16.0),
        ("--override-pre qwen2", "override_pre", "qwen2"),
        ("--mlock", "mlock", True),
        ("--activations exact", "activations", "exact"),
        ("--no-mmap", "use_mmap", False),
        ("--mmap", "use_mmap", True),
    ],
)
def test_a_loading_flag_reaches_the_model(
    params, llm, flags: str, name: str, value: object
) -> None:
    params(*flags.split(" "))
    assert llm.loaded[name] == value


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("-n 5", "max_tokens", 5),
        ("-n 0", "max_tokens", 0),
        ("--predict 5", "max_tokens", 5),
        ("--n-predict -1", "max_tokens", None),
        ("-n -2", "max_tokens", None),
        ("-r User: -r \\n\\n --stop end", "stop", ("User:", "\n\n", "end")),
        ("--no-escape -r \\n", "stop", ("\\n",)),
        ("--ignore-eos", "ignore_eos", True),
        ("--parse-special", "parse_special", True),
    ],
)
def test_a_generation_flag_reaches_the_model(
    params, llm, flags: str, name: str, value: object
) -> None:
    params(*flags.split(" "))
    assert llm.asked[name] == value


def test_cache_types_are_those_of_the_registry(program: Program) -> None:
    shown = program("complete", "--help").out
    assert all(name in shown for name in KV_FORMATS)
    result = program("complete", "-m", "x", "-p", "x", "-ctk", "q9_9")
    assert result.code == 2
    assert result.err_lines[1] == "hint: localkv complete --help-all lists them"
    assert "'q9_9' is not one of its values" in result.err


def test_the_help_names_the_default_context(program: Program) -> None:
    from localkv.memory.fit import DEFAULT_N_CTX

    assert f"at most {DEFAULT_N_CTX}]" in " ".join(program("complete", "--help").out.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-c", "abc"], "-c/--ctx-size: 'abc' is not a valid integer"),
        (["-c", "-5"], "-c/--ctx-size: -5 is less than 0"),
        (["-t", "100000"], "-t/--threads: 100000 is more than 512"),
        (["-n", "-3"], "-n/--predict/--n-predict: -3 is less than -2"),
        (["--temp", "warm"], "--temp/--temperature: 'warm' is not a valid float"),
        (["--temp", "nan"], "temperature must be from -1e+30 to 1e+30, not nan"),
        (["--top-p", "2"], "top_p must be from 0 to 1, not 2.0"),
        (["-l", "hello+1"], "-l/--logit-bias: 'hello+1' is not TOKEN_ID+BIAS or TOKEN_ID-BIAS"),
        (["-l", "5*1"], "-l/--logit-bias: '5*1' is not TOKEN_ID+BIAS or TOKEN_ID-BIAS"),
        (["-p"], "option '-p' requires an argument"),
        (["--tempp", "1"], "no such option --tempp; did you mean --temp?"),
        (["--cache-type"], "no such option --cache-type; did you mean --cache-type-k?"),
        (["-nx"], "no such option -nx; did you mean -n?"),
        (["-zz"], "no such option -zz"),
        (["--json=1"], "option '--json' does not take a value"),
        (["-r", "\\xff"], "the escapes in '\\\\xff' do not make valid UTF-8"),
        (["-r", "\udcff"], "-r/--reverse-prompt/--stop: not valid UTF-8"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_2(
    program: Program, flags: list[str], message: str
) -> None:
    result = program("complete", "-m", "x", "-p", "x", *flags)
    assert result.code == 2
    assert result.out == ""
    assert result.err_lines[0] == f"error: {message}"
    assert len(result.err_lines) == 1 or result.err_lines[1:] == ["hint: --no-escape keeps them"]


@pytest.mark.parametrize(
    ("argv", "line", "hint"),
    [
        (
            ["perplexity", "-f", "x"],
            "-m/--model is missing (or set LOCALKV_MODEL)",
            "-hf ORG/REPO takes a model from Hugging Face",
        ),
        (["complete", "-m", "x", "hello"], "unexpected argument 'hello'", "text goes after -p"),
        (
            ["complete", "-m", "x", "-p", "x", "--samplers", "top_z"],
            "unknown sampler 'top_z'; did you mean top_k?",
            f"use {', '.join(SAMPLER_ORDER)}",
        ),
        (
            ["complete", "-m", "x", "-p", "x", "--samplers", "temp", "--sampling-seq", "t"],
            "--samplers and --sampling-seq mean the same, give one",
            None,
        ),
        (
            ["complet"],
            "no such command 'complet'; did you mean complete?",
            f"commands: {', '.join(COMMANDS)}",
        ),
        (
            ["-m", "x", "-p", "x"],
            "no such option -m",
            "options follow a command, as in: localkv complete -m FILE -p TEXT",
        ),
        (
            ["show"],
            "-m/--model is missing (or set LOCALKV_MODEL)",
            "-hf ORG/REPO takes a model from Hugging Face",
        ),
    ],
)
def test_wrong_usage_is_exit_2(
    program: Program, argv: list[str], line: str, hint: str | None
) -> None:
    result = program(*argv)
    assert result.code == 2
    assert result.err_lines == [f"error: {line}", *([f"hint: {hint}"] if hint else [])]


# -- llama.cpp's flags

LLAMA_COMPLETION_FLAGS = """
-h --help -t --threads -tb --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll
-Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch -c
--ctx-size -n --predict --n-predict -b --batch-size -ub --ubatch-size --keep --swa-full -fa
--flash-attn -p --prompt --perf --no-perf -f --file -bf --binary-file -e --escape --no-escape
--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor
--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast -kvo --kv-offload -nkvo --no-kv-offload
--repack -nr --no-repack --no-host -ctk --cache-type-k -ctv --cache-type-v -dt --defrag-thold -np
--parallel --mlock --mmap --no-mmap -dio --direct-io -ndio --no-direct-io -lm --load-mode --numa
-dev --device --list-devices -ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ngl
--gpu-layers --n-gpu-layers -sm --split-mode -ts --tensor-split -mg --main-gpu -fit --fit -fitt
--fit-target -fitc --fit-ctx --check-tensors --override-kv --op-offload --no-op-offload --lora
--lora-scaled --control-vector --control-vector-scaled --control-vector-layer-range -m --model -mu
--model-url -dr --docker-repo -hf -hfr --hf-repo -hff --hf-file -hft --hf-token --log-disable
--log-file --log-colors -v --verbose --offline -lv --verbosity --log-verbosity --log-prefix
--log-timestamps -ctkd --cache-type-k-draft -ctvd --cache-type-v-draft --samplers -s --seed
--sampler-seq --sampling-seq --ignore-eos --temp --temperature --top-k --top-p --min-p --top-nsigma
--top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p --repeat-last-n
--repeat-penalty --presence-penalty --frequency-penalty --dry-multiplier --dry-base
--dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --adaptive-target --adaptive-decay
--dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent -l --logit-bias --grammar
--grammar-file -j --json-schema -jf --json-schema-file -bs --backend-sampling --display-prompt
--no-display-prompt -co --color --context-shift --no-context-shift -sys --system-prompt -sysf
--system-prompt-file -ptc --print-token-count --prompt-cache --prompt-cache-all --prompt-cache-ro -r
--reverse-prompt -sp --special -cnv --conversation -no-cnv --no-conversation -st --single-turn -i
--interactive -if --interactive-first -mli --multiline-input --in-prefix-bos --in-prefix --in-suffix
--warmup --no-warmup -gan --grp-attn-n -gaw --grp-attn-w --jinja --no-jinja --reasoning-format -rea
--reasoning --reasoning-budget --reasoning-budget-message --chat-template --chat-template-file
--skip-chat-parsing --no-skip-chat-parsing --simple-io --verbose-prompt -kvu --kv-unified
"""


def test_every_flag_of_llama_completion_has_an_answer() -> None:
    ours = {name for param in complete.params for name in (*param.opts, *param.secondary_opts)}
    ours |= {"-h", "--help"}
    assert not ours & set(BY_NAME)
    assert len(BY_NAME) == sum(len(flag.names) for flag in FOREIGN_FLAGS)
    assert set(LLAMA_COMPLETION_FLAGS.split()) - ours - set(BY_NAME) == set()


@pytest.mark.parametrize(
    "flags",
    [
        "-fa",
        "-fa on",
        "-fa auto",
        "--flash-attn=on",
        "--flash-attn auto",
        "--direct-io",
        "--load-mode mmap",
        "--keepalive 5m",
        "--jinja",
        "-no-cnv",
        "-st",
        "--no-display-prompt",
        "--color",
        "--color off",
        "--numa distribute",
    ],
)
def test_a_flag_that_changes_nothing_is_noted(program, llm, model, flags: str) -> None:
    result = program("complete", "-q", "-m", model, *flags.split(" "), "-p", "hello", "-n", "3")
    assert result.code == 0, result.err
    assert result.out == "one two\n"
    shown = flags.replace("=", " ").replace("n_gpu", "n-gpu").replace("gpu_l", "gpu-l")
    assert result.err.startswith(f"note: {shown} is not needed: ")
    assert len(result.err_lines) == 1
    assert llm.asked["prompt"] == "hello"
    assert llm.asked["max_tokens"] == 3


@pytest.mark.parametrize(
    "flags",
    [
        "-fa off",
        "--flash-attn=0",
        "-mu https://example.com/model.gguf",
        "-hft hf_token",
        "-cnv",
        "-i",
        "--control-vector-layer-range 1 2",
        "--context-shift",
        "--format json",
    ],
)
def test_a_flag_that_would_change_the_result_is_refused(program, llm, model, flags: str) -> None:
    result = program("complete", "-m", model, "-p", "hello", *flags.split(" "))
    assert result.code == 2
    assert result.out == ""
    assert result.err_lines[0].endswith(" is not supported")
    assert result.err_lines[1].startswith("hint: ")
    assert llm.loaded == {}


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("complete -i", "localkv chat is a conversation"),
        ("complete -cnv", "localkv chat is a conversation"),
        ("complete --port 8080", "localkv serve has it"),
        ("complete --host 0.0.0.0", "localkv serve has it"),
        ("complete --embedding", "localkv embed"),
        ("complete --n-probs 5", "--logprobs N"),
        ("complete --format json", "--json"),
        ("chat -no-cnv", "localkv complete --chat answers one prompt"),
        ("chat --grammar root", "localkv complete keeps its text"),
        ("bench -j {}", "localkv complete keeps its text"),
        ("chat -p hello", "localkv complete --chat answers one prompt"),
        ("bench -fa 0", "attention always reads the packed cache"),
        ("bench -embd 1", "embeddings are not timed"),
    ],
)
def test_the_hint_names_what_to_use(program: Program, line: str, hint: str) -> None:
    result = program(*line.split(" "))
    assert result.code == 2
    assert result.err_lines[0].endswith(" is not supported")
    assert result.err_lines[1].startswith("hint: ")
    assert hint in result.err_lines[1]


def test_a_command_answers_a_flag_in_its_own_way() -> None:
    for command, flags in BY_COMMAND.items():
        found = cli.get_command(click.Context(cli), command)
        ours = {name for param in found.params for name in (*param.opts, *param.secondary_opts)}
        assert not ours & set(flags)
    assert foreign_flag("chat", "-cnv").answer(None) == "not needed"
    assert foreign_flag("complete", "-cnv").answer(None) == "refused"
    assert foreign_flag("bench", "-mmp").n_values == 1


def test_an_option_of_another_command_is_found(program: Program) -> None:
    result = program("perplexity", "--pairs", "f16/f16")
    assert (result.code, result.err_lines) == (
        2,
        ["error: localkv perplexity has no option --pairs", "hint: localkv bench has it"],
    )
    assert program("plan", "--temp", "1").err_lines[1] == (
        "hint: localkv chat, localkv complete and localkv serve have it"
    )


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("run", "localkv chat talks"),
        ("server", "localkv serve serves"),
        ("ls", "localkv list shows"),
    ],
)
def test_a_command_of_another_program_has_a_hint(program: Program, command, hint: str) -> None:
    result = program(command, "llama3")
    assert result.code == 2
    assert result.err_lines[0] == f"error: no such command {command!r}"
    assert result.err_lines[1].startswith(f"hint: {hint}")


def test_foreign_commands_are_not_ours() -> None:
    assert not set(FOREIGN_COMMANDS) & set(COMMANDS)


def test_values_that_look_like_flags_stay_values(program, llm, model) -> None:
    result = program("complete", "-q", "-m", model, "-p", "-ngl 99", "-r", "--lora", "-r", "-fa")
    assert result.code == 0
    assert result.err == ""
    assert llm.asked["prompt"] == "-ngl 99"
    assert llm.asked["stop"] == ("--lora", "-fa")


@pytest.mark.parametrize(
    ("line", "audit"),
    [
        ("--audit -n 3", True),
        ("-n 3 --audit", True),
        ("--audit exact -n 3", "exact"),
        ("--audit=exact -n 3", "exact"),
    ],
)
def test_a_value_may_be_left_out(program, llm, model, line: str, audit: object) -> None:
    result = program("complete", "-q", "-m", model, "-p", "x", *line.split())
    assert result.code == 0, result.err
    assert (llm.asked["audit"], llm.asked["max_tokens"]) == (audit, 3)


def test_help_wins_over_notes_and_a_broken_configuration(program: Program) -> None:
    program.write_config("this is not TOML")
    result = program("complete", "-ngl", "99", "--help")
    assert result.code == 0
    assert result.err == ""
    assert result.out.startswith("Usage: localkv complete [OPTIONS]")


def test_arguments_after_a_double_dash_are_left_alone() -> None:
    from localkv.commands.tokenize import detokenize

    with detokenize.make_context("detokenize", ["--help"], resilient_parsing=True) as ctx:
        assert check_arguments(detokenize, ctx, ["--", "-ngl"]) == (["--", "-ngl"], False)


# -- variables


@pytest.mark.parametrize(
    ("variables", "field", "value"),
    [
        ({"LOCALKV_TEMP": "0.25"}, "temperature", 0.25),
        ({"LOCALKV_TEMPERATURE": "0.25"}, "temperature", 0.25),
        ({"LOCALKV_TOP_K": "3"}, "top_k", 3),
        ({"LLAMA_ARG_TOP_K": "3"}, "top_k", 3),
        ({"LOCALKV_TOP_K": "4", "LLAMA_ARG_TOP_K": "3"}, "top_k", 4),
        ({"LOCALKV_TOP_K": ""}, "top_k", 40),
        ({"LOCALKV_DRY_SEQUENCE_BREAKER": "a b"}, "dry_sequence_breakers", ("a b",)),
        ({"LOCALKV_LOGIT_BIAS": "5-1"}, "logit_bias", {5: -1.0}),
    ],
)
def test_a_variable_sets_an_option(params, program, variables, field: str, value: object) -> None:
    program.setenv(**variables)
    assert getattr(params(), field) == value


@pytest.mark.parametrize("prefix", ["LOCALKV", "LLAMA_ARG"])
def test_loading_variables(program, llm, model, prefix: str) -> None:
    values = {"MODEL": str(model), "CTX_SIZE": "96", "CACHE_TYPE_K": "f32", "CACHE_TYPE_V": "bf16"}
    program.setenv(**{f"{prefix}_{name}": value for name, value in values.items()})
    program.setenv(**{f"{prefix}_N_PREDICT": "7", f"{prefix}_THREADS": "2"})
    assert program("complete", "-p", "x").code == 0
    assert llm.loaded["path"] == model
    assert llm.loaded["n_ctx"] == 96
    assert (llm.loaded["cache_type_k"], llm.loaded["cache_type_v"]) == ("f32", "bf16")
    assert llm.loaded["n_threads"] == 2
    assert llm.asked["max_tokens"] == 7


def test_flags_by_variable(program, llm, model) -> None:
    program.setenv(LOCALKV_IGNORE_EOS="1", LOCALKV_ESCAPE="0", LOCALKV_STOP="User: x")
    assert program("complete", "-m", model, "-p", "a\\nb").code == 0
    assert llm.asked["ignore_eos"] is True
    assert llm.asked["prompt"] == "a\\nb"
    assert llm.asked["stop"] == ("User: x",)


def test_a_wrong_variable_is_named(program: Program) -> None:
    program.setenv(LLAMA_ARG_CTX_SIZE="many")
    result = program("complete", "-m", "x", "-p", "x")
    assert (result.code, result.err) == (
        2,
        "error: LLAMA_ARG_CTX_SIZE: 'many' is not a valid integer\n",
    )


# -- the configuration file

CONFIG = """
[complete]
ctx-size = 100
cache_type_k = "f32"
temp = 0
stop = ["A:", "B:"]
escape = false
top-k = 9

[tokenize]
ids = true
"""


def test_the_configuration_gives_defaults(program, llm, model) -> None:
    program.write_config(CONFIG)
    assert program("complete", "-m", model, "-p", "a\\nb").code == 0
    assert llm.loaded["n_ctx"] == 100
    assert llm.loaded["cache_type_k"] == "f32"
    assert llm.asked["stop"] == ("A:", "B:")
    assert llm.asked["prompt"] == "a\\nb"
    assert llm.asked["params"] == SamplingParams(seed=-1, temperature=0.0, top_k=9)


def test_flag_over_variable_over_configuration_over_default(program, llm, model) -> None:
    run = ("complete", "-m", model, "-p", "x")
    program.write_config(CONFIG)
    assert program(*run).code == 0
    assert llm.asked["params"].top_k == 9
    program.setenv(LOCALKV_TOP_K="8")
    assert program(*run).code == 0
    assert llm.asked["params"].top_k == 8
    assert program(*run, "--top-k", "7", "--stop", "C:").code == 0
    assert llm.asked["params"].top_k == 7
    assert llm.asked["stop"] == ("C:",)


def test_localkv_config_names_another_file(program, llm, model, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("[complete]\nn-predict = 4\n")
    program.setenv(LOCALKV_CONFIG=str(other))
    assert program("complete", "-m", model, "-p", "x").code == 0
    assert llm.asked["max_tokens"] == 4
    program.setenv(LOCALKV_CONFIG=str(tmp_path / "none.toml"))
    result = program("complete", "-m", model, "-p", "x")
    assert result.code == 2
    assert "none.toml: no such file, which LOCALKV_CONFIG names" in result.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[complete]\ntopp = 1", "[complete] topp: no such option; did you mean top-p?"),
        ("[complete]\ntop-k = 'a'", "[complete] top-k: a string, expected an integer"),
        ("[complete]\ntop-k = 1.5", "[complete] top-k: a number, expected an integer"),
        ("[complete]\ntop-k = true", "[complete] top-k: a boolean, expected an integer"),
        ("[complete]\ntemp = '1'", "[complete] temp: a string, expected a number"),
        ("[complete]\nescape = 1", "[complete] escape: an integer, expected a boolean"),
        ("[complete]\njson = 'yes'", "[complete] json: a string, expected a boolean"),
        ("[complete]\nstop = [1]", "[complete] stop: an integer, expected a string"),
        ("[complete]\nctx-size = -4", "[complete] ctx-size: -4 is less than 0"),
        ("[complete]\nprompt = ['a']", "[complete] prompt: an array, expected a string"),
        ("[complete]\nhelp = true", "[complete] help: no such option"),
        ("[complet]\ntop-k = 1", "[complet] is not a command; did you mean complete?"),
        ("complete = 1", "complete is an integer, expected a table [complete]"),
    ],
)
def test_a_wrong_configuration_names_file_and_key(program, text: str, message: str) -> None:
    program.write_config(text)
    result = program("complete", "-m", "x", "-p", "x")
    assert result.code == 2
    assert result.err == f"error: {program.config}: {message}\n"


def test_a_wrong_choice_in_the_configuration(program: Program) -> None:
    program.write_config("[complete]\ncache-type-v = 'q9'\n")
    result = program("complete", "-m", "x", "-p", "x")
    assert result.code == 2
    assert result.err.startswith(f"error: {program.config}: [complete] cache-type-v: 'q9' is not")


def test_former_names_of_cache_types(program, llm, model) -> None:
    """The configuration file may have them; a command line learns today's."""
    run = ("complete", "-m", model, "-p", "x")
    program.write_config("[complete]\ncache-type-v = 'q3_1'\n")
    assert program(*run).code == 0
    assert llm.loaded["cache_type_v"] == "kv3_1"
    program.write_config("[complete]\nkv-ladder = 'f16,q3_1c'\n")
    assert program(*run, "--kv-budget", "1G").code == 0
    assert llm.loaded["kv_ladder"] == (("f16", "f16"), ("kv3_1c", "kv3_1c"))
    for options, where in (
        (("-ctk", "Q2_0"), "-ctk/--cache-type-k: q2_0 is called kv2_0 now"),
        (
            ("--kv-budget", "1G", "--kv-ladder", "f16,q2_1c"),
            "the ladder has an unknown cache type q2_1c: it is called kv2_1c now",
        ),
    ):
        result = program(*run, *options)
        assert result.code == 2
        assert result.err == f"error: {where}\nhint: ggml's weight type Q2_0 has other bytes\n"


def test_malformed_toml_is_one_line(program: Program) -> None:
    program.write_config("[complete\ntop-k = 1")
    result = program("complete", "-m", "x", "-p", "x")
    assert result.code == 2
    assert len(result.err_lines) == 1
    assert str(program.config) in result.err
    assert "line 1" in result.err


def test_another_commands_table_is_left_alone(program: Program) -> None:
    program.write_config("[tokenize]\nnothing = 1\n")
    assert "no such option" not in program("complete", "-m", "x", "-p", "x").err


def test_speculation(params, llm) -> None:
    params("--spec-type", "ngram", "--draft-max", "7", "--spec-draft-n-min", "2")
    assert (llm.loaded["spec"], llm.loaded["draft_max"], llm.loaded["draft_min"]) == ("ngram", 7, 2)
