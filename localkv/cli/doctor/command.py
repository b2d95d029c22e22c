"""`localkv doctor`: whether this machine has everything that localkv needs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from localkv.cli.options import json_option
from localkv.cli.output.messages import one_line
from localkv.cli.output.terminal import OwnText
from localkv.cli.parsing.command import Command

if TYPE_CHECKING:
    from localkv.doctor.finding import Finding

_WORDS = {"ok": "ok", "info": "-", "warning": "warning", "broken": "broken"}
_COLOURS = {"ok": "green", "info": None, "warning": "yellow", "broken": "red"}


def _run(*, as_json: bool) -> int:
    from localkv import __version__
    from localkv.cli.doctor.settings import setting_checks
    from localkv.doctor.all_checks import machine_checks
    from localkv.doctor.finding import examine

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


doctor = Command(
    "doctor",
    examples=[
        ("All checks, a line each", "localkv doctor"),
    ],
    reads_config=False,
    params=[json_option()],
    callback=_run,
    help="Check that this machine can run models: Python, torch, CPU, memory, GPU and the C "
    "compiler that Triton needs, caches, settings.\n\nExits with 1 if models can't be run or every "
    "command would stop. Slowness and missing extras are only warnings.",
)
