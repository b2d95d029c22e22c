"""Advice about flags and names: what hints name works, and what is nearly right is recognised."""

from __future__ import annotations

import ast
import io
import re
from contextlib import redirect_stderr
from pathlib import Path

import click
import pytest

from localkv.cli import COMMANDS, cli
from localkv.commands.other_programs import BY_COMMAND, BY_NAME, FOREIGN_COMMANDS, foreign_flag
from localkv.commands.parsing import Choice, check_arguments
from localkv.errors import UsageError
from support.paths import ROOT
from support.program import Program


def _found(command: str) -> click.Command:
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    return found


def _spellings(command: str) -> set[str]:
    params = [param for param in _found(command).params if isinstance(param, click.Option)]
    return {"-h", "--help"}.union(*({*param.opts, *param.secondary_opts} for param in params))


def _checked(command: str, *args: str) -> tuple[list[str], str]:
    """The arguments that click gets, and the notes."""
    found, stream = _found(command), io.StringIO()
    parent = click.Context(cli, **cli.context_settings)
    ctx = click.Context(found, parent=parent, info_name=command, **found.context_settings)
    with ctx, redirect_stderr(stream):
        kept, _ = check_arguments(found, ctx, [*args])
    return kept, stream.getvalue()


# -- advice about flags and commands of other programs


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("-ngl 20", "n_gpu_layers", 20),
        ("-ngl all", "n_gpu_layers", "all"),
        ("-ngl -1", "n_gpu_layers", None),
        ("--n-cpu-moe 4", "n_cpu_moe", 4),
        ("-cmoe", "n_cpu_moe", "all"),
        ("-ot exps=CPU", "override_tensor", ["exps=CPU"]),
        ("-nkvo", "offload_kqv", False),
        ("-ts 3,1", "tensor_split", (3.0, 1.0)),
        ("-mg 1", "main_gpu", 1),
        ("-dev CUDA0,cuda:1", "device", "cuda0,cuda1"),
    ],
)
def test_what_is_on_the_gpu(program, llm, model, flags: str, name: str, value: object) -> None:
    result = program("complete", "-q", "-m", model, *flags.split(" "), "-p", "hello")
    assert result.code == 0, result.err
    assert llm.loaded[name] == value


def test_layers_are_not_cut(program, llm, model) -> None:
    result = program("complete", "-q", "-m", model, "-sm", "row", "-p", "hello")
    assert result.code == 0, result.err
    assert result.err.startswith("note: -sm row is not supported yet, and left out: ")


_NAMED = re.compile(r"localkv (\w+)|(?<![\w-])(--?[a-zA-Z][\w-]*)")


def _names_what_works(command: str, advice: str) -> None:
    """Each named option belongs to the command that its clause names, or to this one."""
    for clause in re.split("[;,]", advice):
        spoken_of = command
        for other, option in _NAMED.findall(clause):
            if other:
                assert other in COMMANDS, advice
                spoken_of = other
            else:
                assert option in _spellings(spoken_of), advice


@pytest.mark.parametrize("command", COMMANDS)
def test_no_advice_leads_in_a_circle(command: str) -> None:
    for name in sorted({*BY_NAME, *BY_COMMAND.get(command, {})} - _spellings(command)):
        flag = foreign_flag(command, name)
        assert flag is not None
        try:
            advice = _checked(command, name, *["7"] * flag.n_values)[1]
        except UsageError as error:
            advice = error.hint or ""
        else:
            advice = advice.partition(": ")[2].partition(": ")[2]
        assert advice
        _names_what_works(command, advice)
        if found := re.search(r"localkv (\w+) has it", advice):
            assert name in _spellings(found[1]), advice


@pytest.mark.parametrize("hint", sorted(set(FOREIGN_COMMANDS.values())))
def test_advice_about_a_command_names_ours(hint: str) -> None:
    for command, option in _NAMED.findall(hint):
        assert not command or command in {*COMMANDS, "COMMAND"}
        known = {"--version"}.union(*map(_spellings, COMMANDS))
        assert not option or option in known


@pytest.mark.slow
def test_options_that_hints_name_exist() -> None:
    known = {"--version", "--gpus"}.union(*map(_spellings, COMMANDS))  # --gpus is Docker's
    for path in (ROOT / "localkv").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "hint=" in source else ():
            if isinstance(node, ast.keyword) and node.arg == "hint":
                for part in ast.walk(node.value):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        for option in re.findall(r"(?<![\w`-])--[a-z][\w-]+\b", part.value):
                            assert option in known, f"{path}: {part.value}"


def test_the_servers_flags_at_the_server(program: Program) -> None:
    assert program("complete", "--models-dir", "x").err_lines == [
        "error: --models-dir x is not supported",
        "hint: localkv serve has it",
    ]
    done = program("serve", "--no-webui", "--cache-reuse", "256", "--print-config", "zed")
    assert done.code == 0
    assert "--cache-reuse 256 is not needed" in done.err


# -- a model without -m, and values of which one would be lost


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_model_is_taken_without_m(program, llm, model: Path, place: int) -> None:
    words = ["-p", "x", "-n", "1"]
    words.insert(place, str(model))
    assert program("complete", *words).code == 0
    assert llm.loaded["path"] == model


@pytest.mark.parametrize("command", [name for name in COMMANDS if "-m" in _spellings(name)])
def test_every_command_takes_a_model_without_m(command: str) -> None:
    assert _checked(command, "a.GGUF") == (["-m", "a.GGUF"], "")
    assert _checked(command, "-m", "a.gguf", "a.gguf") == (["-m", "a.gguf"] * 2, "")
    if command not in ("bench", "serve"):  # which take several models
        with pytest.raises(UsageError, match=r"-m/--model is given 2 times: a.gguf and b.gguf"):
            _checked(command, "a.gguf", "-m", "b.gguf")


def test_a_model_instead_of_a_command(program: Program) -> None:
    result = program("a.gguf")
    assert result.code == 2
    assert "hint: localkv chat a.gguf talks with a model" in result.err


@pytest.mark.parametrize("option", ["-m", "-p", "-f", "-hf", "-sys", "-o", "--samplers", "-j"])
def test_two_texts_for_one_option_are_refused(program: Program, option: str) -> None:
    result = program("complete", option, "one", option, "two")
    assert result.code == 2
    assert result.err_lines[0].endswith(" is given 2 times: one and two")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("-c 64 -c 128", "note: -c/--ctx-size: 128 counts, not 64 before it"),
        ("-n3 -n 4", "note: -n/--predict/--n-predict: 4 counts, not 3 before it"),
        ("-ctk f32 -ctk f16", "note: -ctk/--cache-type-k: f16 counts, not f32 before it"),
        ("--mmap --no-mmap", "note: --no-mmap counts, not --mmap before it"),
        ("-c 64 -c 64", ""),
        ("-q -q --ignore-eos --ignore-eos", ""),
        ("-r a -r b", ""),
    ],
)
def test_the_last_number_or_choice_counts(program, llm, model, flags: str, said: str) -> None:
    result = program("complete", "-q", "-m", model, "-p", "x", *flags.split())
    assert (result.code, result.err.strip()) == (0, said)


# -- names that are nearly right


@pytest.mark.parametrize("command", COMMANDS)
def test_every_choice_says_what_is_nearest(program: Program, command: str) -> None:
    for param in _found(command).params:
        if not isinstance(param.type, click.Choice):
            continue
        assert isinstance(param.type, Choice), param.opts
        longest = max(param.type.choices, key=len)
        result = program(command, param.opts[-1], f"{longest}x")
        assert result.code == 2
        if len(longest) > 1:
            assert f"did you mean {longest}?" in result.err_lines[0]
        if len(param.type.choices) > 10:
            assert len(result.err_lines[0]) < 160
            shown = program(*result.err_lines[1].split()[2:4]).out
            assert all(name in shown for name in param.type.choices)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("complete -p x -ctk q4_9", "'q4_9' is not one of its values; did you mean q4_0?"),
        ("chat -ctv q9_0", "'q9_0' is not one of its values; did you mean q8_0?"),
        ("plan m.gguf -ctk q4_9", "unknown cache type 'q4_9'; did you mean q4_0?"),
        ("bench m.gguf --pairs q4_9/f16", "unknown cache type 'q4_9'; did you mean q4_0?"),
        ("plan --synthetic llama-9b:q4_0", "unknown shape 'llama-9b'; did you mean llama-8b?"),
        ("bench --synthetic llama-8b:q4_9", "unknown type of weights 'q4_9'; did you mean q4_0?"),
        ("complete -p x --samplers temprature", "'temprature'; did you mean temperature?"),
        ("serve --chat-template lama3", "'lama3'; did you mean llama3?"),
        ("complete -p x --preset sped", "did you mean speed?"),
        ("complete -p x --kv-budget 1GiB --kv-ladder f16,q9_0", "'q9_0'; did you mean q8_0?"),
    ],
)
def test_a_mistyped_name_gets_the_nearest_one(program: Program, line: str, said: str) -> None:
    result = program(*line.split())
    assert result.code == 2
    assert said in result.err
    assert len(result.err) < 400


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_suggested_that_is_not_near(program: Program, command: str) -> None:
    assert program(command, "--foo").err_lines == ["error: no such option --foo"]
