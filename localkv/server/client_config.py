"""What to paste into the settings of well-known clients, so that they use a server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerAddress:
    """Where a server is, for clients.

    Attributes:
        url: without a path.
        model: what clients call it.
        n_ctx: tokens of a request.
        api_key: "none" if the server wants none, as many clients insist on one.
    """

    url: str
    model: str
    n_ctx: int
    api_key: str = "none"


def _continue(server: ServerAddress) -> str:
    return f"""# ~/.continue/config.yaml
name: localkv
version: 0.0.1
schema: v1
models:
  - name: {json.dumps(server.model)}
    provider: openai
    model: {json.dumps(server.model)}
    apiBase: {json.dumps(server.url + "/v1")}
    apiKey: {json.dumps(server.api_key)}
    roles: [chat, edit, apply]
    defaultCompletionOptions:
      contextLength: {server.n_ctx}
"""


def _zed(server: ServerAddress) -> str:
    model = {
        "name": server.model,
        "display_name": server.model,
        "max_tokens": server.n_ctx,
        "capabilities": {"tools": True, "images": False},
    }
    provider = {"api_url": f"{server.url}/v1", "available_models": [model]}
    settings = {"language_models": {"openai_compatible": {"localkv": provider}}}
    return (
        "// ~/.config/zed/settings.json; the key goes into LOCALKV_API_KEY\n"
        + json.dumps(settings, indent=2)
        + "\n"
    )


def _aider(server: ServerAddress) -> str:
    words = [
        *("aider", "--model", f"openai/{server.model}"),
        *("--openai-api-base", f"{server.url}/v1", "--openai-api-key", server.api_key),
    ]
    return shlex.join(words) + "\n"


def _codex(server: ServerAddress) -> str:
    return f"""# ~/.codex/config.toml; the key goes into LOCALKV_API_KEY
model = {json.dumps(server.model)}
model_provider = "localkv"
model_context_window = {server.n_ctx}

[model_providers.localkv]
name = "localkv"
base_url = {json.dumps(server.url + "/v1")}
env_key = "LOCALKV_API_KEY"
wire_api = "responses"
"""


def _claude(server: ServerAddress) -> str:
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.api_key,
        "ANTHROPIC_MODEL": server.model,
        "ANTHROPIC_SMALL_FAST_MODEL": server.model,
    }
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join([*lines, "claude", ""])


CLIENTS: dict[str, Callable[[ServerAddress], str]] = {
    "continue": _continue,
    "zed": _zed,
    "aider": _aider,
    "codex": _codex,
    "claude": _claude,
}
"""By the name of the client."""
