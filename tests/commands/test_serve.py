"""`localkv serve` without a server: what it prints, and what it refuses."""

from __future__ import annotations

import json
import shlex
import subprocess
import tomllib

import pytest
import yaml

from localkv.server.client_config import CLIENTS
from support.paths import MODELS
from support.program import Program

MODEL = str(MODELS / "tales-4M-Q8_0.gguf")


def test_quiet_leaves_out_all_but_warnings(program: Program, monkeypatch) -> None:
    async def serve(settings, *, say, on_listening, **others) -> None:
        say("something")
        on_listening("http://127.0.0.1:1")

    monkeypatch.setattr("localkv.server.http_server.serve", serve)
    assert "listening on http://127.0.0.1:1" in program("serve").err
    assert program("serve", "-q", "--preset", "speed").err == ""


def _variables(text: str) -> dict[str, str]:
    """The variables of a shell that has read a text, whose last line starts a program."""
    script = text.removesuffix("claude\n") + "\nenv -0"
    done = subprocess.run(["sh", "-c", script], env={}, capture_output=True, check=True, text=True)
    return dict(line.split("=", 1) for line in done.stdout.split("\0") if "=" in line)


def _claude(text: str) -> tuple[str, str, int]:
    found = _variables(text)
    models = {value for name, value in found.items() if name.endswith("_MODEL")}
    assert len(models) == 1
    n_ctx = int(found["CLAUDE_CODE_MAX_CONTEXT_TOKENS"])
    assert int(found["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) < n_ctx
    return found["ANTHROPIC_BASE_URL"] + "/v1", models.pop(), n_ctx


def _codex(text: str) -> tuple[str, str, int]:
    found = tomllib.loads(text)
    provider = found["model_providers"][found["model_provider"]]
    assert provider["wire_api"] == "responses"
    assert "env_key" not in provider
    return provider["base_url"], found["model"], found["model_context_window"]


def _opencode(text: str) -> tuple[str, str, int]:
    found = json.loads(text.partition("\n")[2])
    name, _, model = found["model"].partition("/")
    limit = found["provider"][name]["models"][model]["limit"]
    assert limit["output"] < limit["context"]
    return found["provider"][name]["options"]["baseURL"], model, limit["context"]


def _aider(text: str) -> tuple[str, str, int]:
    _, write, start = text.splitlines()
    (metadata,) = json.loads(shlex.split(write)[2]).items()
    words = shlex.split(start)
    options = dict(zip(words[1::2], words[2::2], strict=True))
    assert options["--model"] == metadata[0]
    assert write.endswith(options["--model-metadata-file"])
    n_ctx = metadata[1]["max_input_tokens"]
    return options["--openai-api-base"], options["--model"].removeprefix("openai/"), n_ctx


def _continue(text: str) -> tuple[str, str, int]:
    (model,) = yaml.safe_load(text)["models"]
    return model["apiBase"], model["model"], model["defaultCompletionOptions"]["contextLength"]


def _zed(text: str) -> tuple[str, str, int]:
    found = json.loads(text.partition("\n")[2])["language_models"]["openai_compatible"]["localkv"]
    (model,) = found["available_models"]
    return found["api_url"], model["name"], model["max_tokens"]


def _llm(text: str) -> tuple[str, str, int]:
    (model,) = yaml.safe_load(text)
    assert model["supports_tools"]
    assert "api_key_name" not in model
    return model["api_base"], model["model_name"], 2048


READ = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
    "aider": _aider,
    "continue": _continue,
    "zed": _zed,
    "llm": _llm,
}
"""How each client reads its settings: the server's URL, the model and its context."""


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", ["tales", 'my "model"', "it's a \U0001f98a"])
def test_a_clients_settings_name_the_server(program: Program, client: str, name: str):
    options = ("-m", MODEL, "-a", name, "--port", "9999")
    done = program("serve", *options, "--print-config", client)
    assert done.code == 0
    assert READ[client](done.out) == ("http://127.0.0.1:9999/v1", name, 2048)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_clients_settings_say_where_the_key_goes(program: Program, client: str):
    done = program("serve", "-m", MODEL, "--api-key", "secret", "--print-config", client)
    assert "YOUR_KEY" in done.out
    assert "secret" not in done.out


@pytest.mark.parametrize("client", [name for name, client in CLIENTS.items() if client.n_ctx])
def test_a_context_that_is_too_small_for_a_client_is_said(program: Program, client: str):
    needs = CLIENTS[client].n_ctx
    small = program("serve", "-m", MODEL, "--print-config", client)
    assert f"-c {needs}" in small.err
    enough = program("serve", "-m", MODEL, "-c", str(needs), "--print-config", client)
    assert "warning" not in enough.err
    assert READ[client](enough.out)[2] == needs
    less = ("-c", str(needs), "--cache-tokens", "1024")
    done = program("serve", "-m", MODEL, *less, "--print-config", client)
    assert READ[client](done.out)[2] == 1024


def test_a_port_that_is_not_known_is_no_setting(program: Program):
    done = program("serve", "-m", MODEL, "--port", "0", "--print-config", "claude")
    assert done.code == 2
    assert "--port 0" in done.err
