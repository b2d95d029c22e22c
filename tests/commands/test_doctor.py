"""`localkv doctor`: the table, JSON, exit codes, and the user's settings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localkv.doctor import checks
from localkv.doctor.checks import Check, Finding
from support.paths import ROOT
from support.program import Program, loaded_by, on_terminal


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says what the checks of the machine find."""

    def find(*findings: Finding) -> None:
        found = [Check(finding.name, lambda f=finding: f) for finding in findings]
        monkeypatch.setattr(checks, "machine_checks", lambda: found)

    for name in ("CUDA_VISIBLE_DEVICES", "HF_TOKEN", "HTTPS_PROXY", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    find(Finding("CPU", "ok", "fast"))
    return find


def test_the_table(program: Program, machine: Callable[..., None]) -> None:
    machine(
        Finding("CPU", "ok", "fast", "not shown"),
        Finding("GPU", "info", "none"),
        Finding("a cache", "warning", "can't\nbe written", "try another"),
    )
    result = program("doctor")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[:4] == [
        "CPU            ok       fast",
        "GPU            -        none",
        "a cache        warning  can't be written",
        "                        hint: try another",
    ]
    assert result.out.endswith("\nmodels can be run on this machine\n")
    assert "\x1b" not in result.out


def test_what_is_broken_is_exit_1(program: Program, machine: Callable[..., None]) -> None:
    machine(Finding("torch", "broken", "missing", "pip install torch"), Finding("CPU", "ok", "x"))
    result = program("doctor")
    assert result.code == 1
    assert result.out.endswith("\nbroken: torch\n")


def test_json(program: Program, machine: Callable[..., None]) -> None:
    machine(Finding("torch", "broken", "missing", "pip install torch", {"a": 1}))
    result = program("doctor", "--json")
    assert result.code == 1
    report = json.loads(result.out)
    assert set(report) == {"version", "ok", "checks"}
    assert report["ok"] is False
    assert report["checks"][0] == {
        "name": "torch",
        "status": "broken",
        "summary": "missing",
        "hint": "pip install torch",
        "facts": {"a": 1},
    }
    assert [c["name"] for c in report["checks"]] == ["torch", "variables", "configuration"]


def settings(program: Program) -> dict[str, dict]:
    """The checks of settings, by name, and the exit code as "code"."""
    result = program("doctor", "--json")
    found = {check["name"]: check for check in json.loads(result.out)["checks"]}
    return {**found, "code": result.code}


@pytest.mark.usefixtures("machine")
def test_variables(program: Program) -> None:
    program.setenv(
        LOCALKV_CTX_SIZE="512", LLAMA_ARG_THREADS="2", HF_TOKEN="hf_secret", CUDA_VISIBLE_DEVICES=""
    )
    found = settings(program)
    assert found["code"] == 0
    in_effect = found["variables"]["facts"]["in_effect"]
    assert in_effect["LOCALKV_CTX_SIZE"] == "512"
    assert in_effect["LLAMA_ARG_THREADS"] == "2"
    assert in_effect["HF_TOKEN"] == "(set)"
    assert "CUDA_VISIBLE_DEVICES" not in in_effect
    assert "hf_secret" not in json.dumps(found)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("variables", "code", "summary"),
    [
        ({"LOCALKV_CTX_SIZE": "many"}, 1, "LOCALKV_CTX_SIZE=many (chat): "),
        ({"LLAMA_ARG_CACHE_TYPE_K": "q9"}, 1, "LLAMA_ARG_CACHE_TYPE_K=q9 (chat): "),
        ({"LOCALKV_MODLE": "x"}, 0, "LOCALKV_MODLE is no variable of localkv's; did you mean "),
    ],
)
def test_variables_that_are_wrong(
    program: Program, variables: dict[str, str], code: int, summary: str
) -> None:
    program.setenv(**variables)
    found = settings(program)
    assert found["code"] == code
    assert found["variables"]["summary"].startswith(summary)
    assert found["variables"]["hint"]


@pytest.mark.usefixtures("machine")
def test_the_configuration_file(program: Program) -> None:
    assert settings(program)["configuration"]["status"] == "info"
    program.write_config('[chat]\nthreads = 2\n[complete]\nctx-size = 64\nmodel = "x.gguf"\n')
    check = settings(program)["configuration"]
    assert check["status"] == "ok"
    assert check["summary"] == f"{program.config}: [chat] threads, [complete] model, n_ctx"


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[chat\n", "Expected ']'"),
        ("[chatt]\n", "[chatt] is not a command; did you mean chat?"),
        ("[perplexity]\nctx-size = 'big'\n", "[perplexity] ctx-size: a string, expected"),
    ],
)
def test_a_configuration_that_is_wrong(program: Program, text: str, error: str) -> None:
    program.write_config(text)
    found = settings(program)
    assert found["code"] == 1
    assert error in found["configuration"]["summary"]


@pytest.mark.slow
def test_this_machine_is_well_and_stays_light() -> None:
    assert set(loaded_by("doctor")) <= {"huggingface_hub"}


@pytest.mark.slow
def test_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, shown = on_terminal("doctor")
    assert code == 0
    assert b"\x1b[32mok" in shown


def test_warming_compiles_all_that_a_model_takes(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = ("-ctk", "q6_0", "-ctv", "q5_1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    model = str(ROOT / "models" / "tales-4M-Q8_0.gguf")

    def run(*arguments: str) -> tuple[str, str]:
        command = [sys.executable, "-m", "localkv", *arguments, "-m", model, *types]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    said = "tales-4M-Q8_0.gguf starts without compiling, with K q6_0 and V q5_1\n"
    out, err = run("doctor", "--warm")
    assert out == said
    assert re.fullmatch(r"compiling \d+ kernels, once for this machine\n", err)
    assert run("doctor", "--warm") == (said, "")
    assert "compiling" not in run("complete", "-p", "x", "-n", "2")[1]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--warm"], "-m/--model is missing"),
        (["--warm", "--json"], "--warm and --json exclude each other"),
        (["-ctk", "q8_0"], "--cache-type-k has no effect: without --warm no model is loaded"),
        (["--warm", "-m", "missing.gguf"], "missing.gguf"),
    ],
)
def test_what_cannot_be_warmed(program: Program, arguments: list[str], problem: str) -> None:
    result = program("doctor", *arguments)
    assert result.code != 0
    assert problem in result.err


def test_warming_reads_variables(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALKV_MODEL", str(ROOT / "models" / "tales-4M-Q8_0.gguf"))
    monkeypatch.setenv("LOCALKV_CACHE_TYPE_K", "q8_0")
    result = program("doctor", "--warm")
    assert result.out.endswith("with K q8_0 and V f16\n")
    monkeypatch.setenv("LOCALKV_CACHE_TYPE_K", "q9")
    assert "q9" in program("doctor", "--warm").err
