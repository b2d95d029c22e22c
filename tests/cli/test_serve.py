"""`localkv serve` without a server: what it prints, and what it refuses."""

from __future__ import annotations

import json
import tomllib

import pytest
import yaml

from localkv.cli.serve import options as serve_options
from localkv.server.client_config import CLIENTS
from support.paths import MODELS
from support.program import Program

MODEL = str(MODELS / "tales-4M-Q8_0.gguf")


def test_the_clients_are_those_that_there_are():
    assert tuple(CLIENTS) == serve_options.CLIENTS


@pytest.mark.parametrize("client", CLIENTS)
def test_a_clients_settings_name_the_server(program: Program, client: str):
    done = program(
        "serve", "-m", MODEL, "-a", 'my "model"', "--port", "9999", "--print-config", client
    )
    assert done.code == 0
    text = done.out
    assert "http://127.0.0.1:9999" in text
    if client == "codex":
        assert tomllib.loads(text)["model"] == 'my "model"'
    elif client == "continue":
        (model,) = yaml.safe_load(text)["models"]
        assert model["model"] == 'my "model"'
    elif client == "zed":
        found = json.loads(text.partition("\n")[2])["language_models"]["openai_compatible"]
        assert found["localkv"]["available_models"][0]["max_tokens"] == 2048
