"""`localkv doctor`: whether this machine has everything that localkv needs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click
from click.core import ParameterSource

from localkv.commands.loading_options import loading_options, unoffered_values
from localkv.commands.model import all_warnings, load_llm
from localkv.commands.model_file import check_model_is_named
from localkv.commands.options import Panel, json_option, refuse
from localkv.commands.output import OwnText, did_you_mean, one_line, warn
from localkv.commands.parsing import Command, config_defaults, config_path
from localkv.doctor.checks import Check, Finding
from localkv.errors import LocalKVError, UsageError

_WORDS = {"ok": "ok", "info": "-", "warning": "warning", "broken": "broken"}
_COLOURS = {"ok": "green", "info": None, "warning": "yellow", "broken": "red"}


_WARM = Panel("With --warm")
_USED = ("model", "hf_repo", "hf_file", "offline", "cache_type_k", "cache_type_v", "preset")
"""Options of models and caches, as other commands have them."""


def _run(*, as_json: bool, warm: bool, **values: Any) -> int:
    if warm:
        if as_json:
            raise UsageError("--warm and --json exclude each other")
        return _warm({**unoffered_values(_USED), **values, **_from_variables()})
    refuse(_USED, "without --warm no model is loaded", "add --warm")
    from localkv import __version__
    from localkv.doctor.checks import examine, machine_checks

    ctx = click.get_current_context()
    group = ctx.parent.command if ctx.parent is not None else None
    assert isinstance(group, click.Group)
    names = group.list_commands(ctx)
    commands = {name: command for name in names if (command := group.get_command(ctx, name))}
    findings = examine([*machine_checks(), *setting_checks(commands)])
    is_ok = all(finding.status != "broken" for finding in findings)
    if as_json:
        checks = [asdict(finding) for finding in findings]
        click.echo(json.dumps({"version": __version__, "ok": is_ok, "checks": checks}))
    else:
        for line in _lines(findings):
            click.echo(OwnText(line))
    return 0 if is_ok else 1


def _model_options() -> list[click.Option]:
    return [
        param
        for param in loading_options()
        if param.name in _USED and isinstance(param, click.Option)
    ]


def _options_here() -> list[click.Option]:
    """Options that read no variables: these may be wrong, which the checks say."""
    options = _model_options()
    for option in options:
        option.envvar = None
    return options


def _from_variables() -> dict[str, Any]:
    """Values of options that only variables give."""
    ctx = click.get_current_context()
    found = dict[str, Any]()
    for option in _model_options():
        name = option.name or ""
        given = ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE
        if not given and (value := option.value_from_envvar(ctx)) is not None:
            found[name] = option.type_cast_value(ctx, value)
    return found


def _warm(values: dict[str, Any]) -> int:
    """Load a model, and complete a few words, so that no later start compiles anything."""
    check_model_is_named(values)
    llm = load_llm(values)
    for line in all_warnings(llm):
        warn(line)
    llm.complete("Once upon a time", max_tokens=4)
    name, types = llm.gguf.path.name, f"K {llm.cache.type_k} and V {llm.cache.type_v}"
    click.echo(OwnText(f"{one_line(name)} starts without compiling, with {types}"))
    return 0


def _lines(findings: Sequence[Finding]) -> list[str]:
    """A line for each finding, a hint under it, and the result."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        word = _coloured(_WORDS[finding.status].ljust(7), _COLOURS[finding.status])
        lines.append(f"{finding.name.ljust(width)}  {word}  {one_line(finding.summary)}")
        if finding.hint and finding.status != "ok":
            lines.append(f"{' ' * (width + 11)}hint: {one_line(finding.hint)}")
    broken = [finding.name for finding in findings if finding.status == "broken"]
    result = f"broken: {', '.join(broken)}" if broken else "models can be run on this machine"
    return [*lines, "", _coloured(result, "red" if broken else "green")]


def _coloured(text: str, colour: str | None) -> str:
    """Coloured on a terminal; click takes the colour off anywhere else."""
    return click.style(text, fg=colour) if colour and not os.environ.get("NO_COLOR") else text


_OWN = ("LOCALKV_CONFIG", "LOCALKV_CPU", "LOCALKV_DEBUG")
"""Variables of ours that are no option's."""

_OTHERS = (
    "CC",
    "CUDA_VISIBLE_DEVICES",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
    "HTTPS_PROXY",
    "NO_COLOR",
    "NUMBA_CPU_FEATURES",
    "NUMBA_CPU_NAME",
    "NUMBA_DISABLE_JIT",
    "NUMBA_NUM_THREADS",
    "OMP_NUM_THREADS",
    "PYTHONPATH",
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
    "TRITON_INTERPRET",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
)
"""Variables of other programs that change how localkv works."""

_SECRET = ("HF_TOKEN", "HTTPS_PROXY")


def setting_checks(commands: Mapping[str, click.Command]) -> list[Check]:
    """The checks, for these commands and their options."""
    return [
        Check("variables", lambda: _check_variables(commands)),
        Check("configuration", lambda: _check_configuration(commands)),
    ]


def _check_variables(commands: Mapping[str, click.Command]) -> Finding:
    known = {name for _, option in _options(commands) for name in _variables(option)}
    ours = sorted(
        name
        for name, value in os.environ.items()
        if value and (name in known or name.startswith("LOCALKV_"))
    )
    others = [name for name in _OTHERS if os.environ.get(name)]
    shown = {name: "(set)" if name in _SECRET else os.environ[name] for name in [*ours, *others]}
    facts = {"in_effect": shown}
    summary = ", ".join(f"{name}={one_line(value)}" for name, value in shown.items()) or "none"
    if wrong := _wrong_values(commands):
        return Finding("variables", "broken", wrong[0], "correct or unset it", facts)
    unknown = [name for name in ours if name not in known and name not in _OWN]
    if unknown:
        nearest = did_you_mean(unknown[0], [*known, *_OWN])
        message = f"{unknown[0]} is no variable of localkv's{nearest}"
        return Finding("variables", "warning", message, f"in effect: {summary}", facts)
    return Finding("variables", "ok" if shown else "info", summary, None, facts)


def _options(commands: Mapping[str, click.Command]) -> Iterator[tuple[str, click.Option]]:
    """Every option of every command, with the command's name."""
    for name, command in commands.items():
        for param in command.params:
            if isinstance(param, click.Option):
                yield name, param


def _variables(option: click.Option) -> list[str]:
    names = option.envvar or []
    return [names] if isinstance(names, str) else list(names)


def _wrong_values(commands: Mapping[str, click.Command]) -> list[str]:
    """A line for each variable with a value that its option does not take."""
    lines = []
    for name, option in _options(commands):
        ctx = click.Context(commands[name], info_name=name)
        value = option.value_from_envvar(ctx)
        if value is None:
            continue
        variable = next(n for n in _variables(option) if os.environ.get(n))
        try:
            option.type_cast_value(ctx, value)
        except click.BadParameter as error:
            given = one_line(os.environ[variable])
            lines.append(f"{variable}={given} ({name}): {error.message.rstrip('.')}")
    return lines


def _check_configuration(commands: Mapping[str, click.Command]) -> Finding:
    path = config_path()
    facts: dict[str, Any] = {"path": str(path), "exists": path.exists()}
    tables = {}
    try:
        for name, command in commands.items():
            ctx = click.Context(command, info_name=name)
            if found := config_defaults(command, ctx, list(commands)):
                tables[name] = sorted(found)
    except LocalKVError as error:
        hint = error.hint or "correct it; until then commands stop with this error"
        return Finding("configuration", "broken", error.message, hint, facts)
    facts["options"] = tables
    if not path.exists():
        return Finding("configuration", "info", f"none, {path}", None, facts)
    shown = ", ".join(f"[{name}] {', '.join(options)}" for name, options in tables.items())
    return Finding("configuration", "ok", f"{path}: {shown or 'empty'}", None, facts)


doctor = Command(
    "doctor",
    examples=[
        ("All checks, a line each", "localkv doctor"),
        ("Compile a model's kernels", "localkv doctor --warm -m model.gguf -ctk q6_0 -ctv q5_1"),
    ],
    reads_config=False,
    params=[
        json_option(),
        _WARM.flag(
            "--warm",
            help="Load a model and compile what it takes with the types of its cache, so that "
            "later starts compile nothing; in place of the checks.",
        ),
        *_options_here(),
    ],
    callback=_run,
    help="Check that this machine can run models: Python, torch, CPU, memory, GPU and the C "
    "compiler that Triton needs, caches, settings.\n\nExits with 1 if models can't be run or every "
    "command would stop. Slowness and missing extras are only warnings.",
)
