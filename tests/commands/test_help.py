"""The help of every command: short first, with examples that can be run."""

from __future__ import annotations

import os
import shlex
from itertools import takewhile

import click
import pytest

from localkv.cli import COMMANDS, cli
from localkv.commands.parsing import Command, check_arguments
from support.program import Program, on_terminal

LONG = ("chat", "complete", "perplexity", "bench", "plan")


def command_of(name: str) -> Command:
    found = cli.get_command(click.Context(cli), name)
    assert isinstance(found, Command)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_valid(name: str) -> None:
    """Each is a command line of this command, all of whose options exist and have valid values."""
    page = command_of(name).page
    assert page.examples
    for _, line in page.examples:
        program, command, *words = takewhile(lambda word: word != "|", shlex.split(line))
        assert program == "localkv"
        assert command in COMMANDS
        found = command_of(command)
        with (
            click.Context(cli) as parent,
            click.Context(found, parent, **found.context_settings) as ctx,
        ):
            args, asks_help = check_arguments(found, ctx, words)
            assert not asks_help
            values, _, _ = found.make_parser(ctx).parse_args(args)
            for param in found.params:
                param.handle_parse_result(ctx, values, [])


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_come_before_the_options(program: Program, name: str) -> None:
    shown = program(name, "--help").out
    assert 0 < shown.index("\nExamples:\n") < shown.index("\nOptions:\n")
    for purpose, line in command_of(name).page.examples:
        assert f"  # {purpose}\n  $ {line}\n" in shown
    assert shown.endswith("  -h, --help  Show this message and exit.\n") or "\n  -h" in shown


@pytest.mark.parametrize("name", LONG)
def test_the_short_help_has_what_most_need(program: Program, name: str) -> None:
    short, whole = (program(name, flag).out for flag in ("--help", "--help-all"))
    assert program(name, "-h").out == short
    page, command = command_of(name).page, command_of(name)
    spellings = [{*p.opts, *p.secondary_opts} for p in command.params if p.opts[0][0] == "-"]
    for essential in page.essentials:
        assert sum(essential in names for names in spellings) == 1
        assert f" {essential}" in short
    n_options = whole.count("\n  -")
    assert f"--help-all Show all {n_options} options." in " ".join(short.split())
    assert short.count("\n  -") < 0.75 * n_options
    assert command.epilog is None or command.epilog[:40] not in short
    for names in spellings:
        assert any(f" {name}" in whole for name in names)


def test_a_command_with_few_options_shows_all(program: Program) -> None:
    shown = program("pull", "--help").out
    assert "--help-all" not in shown
    assert program("pull", "--help-all").out == shown


def test_help_all_wins_over_notes_and_a_broken_configuration(program: Program) -> None:
    program.write_config("this is not TOML")
    result = program("complete", "-ngl", "99", "--help-all")
    assert (result.code, result.err) == (0, "")
    assert "--dry-multiplier" in result.out


@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
def test_both_forms_on_a_terminal() -> None:
    code, short = on_terminal("complete", "--help")
    assert code == 0
    assert all(text in short for text in (b"Examples", b"Once upon a time", b"--help-all", b"-ctk"))
    assert b"--dry-multiplier" not in short
    code, whole = on_terminal("complete", "--help-all")
    assert code == 0
    assert all(text in whole for text in (b"\x1b[", b"Sampling", b"--dry-multiplier"))
    code, shown = on_terminal("--help")
    assert code == 0
    assert b"detokenize" in shown


@pytest.mark.skipif(os.name != "posix", reason="a limit for these machines")
def test_help_is_fast() -> None:
    """With the start of Python, in processor time: other processes want the cores, too."""
    from support.program import localkv_process

    seconds = []
    for _ in range(5):
        before = os.times()
        with localkv_process("complete", "--help") as process:
            process.communicate(timeout=30)
        after = os.times()
        spent = after.children_user + after.children_system
        seconds.append(spent - before.children_user - before.children_system)
    assert min(seconds) < 0.5
