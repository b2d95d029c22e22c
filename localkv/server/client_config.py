"""What to paste into the settings of well-known clients, so that they use a server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass

MOST_OUTPUT = 8192
"""Most tokens of an answer that agents are told to ask for; they keep room for them."""


@dataclass(frozen=True)
class ServerAddress:
    """Where a server is, for clients.

    Attributes:
        url: without a path.
        model: what clients call it.
        n_ctx: tokens of a request.
        api_key: None if the server wants none.
    """

    url: str
    model: str
    n_ctx: int
    api_key: str | None = None

    @property
    def some_key(self) -> str:
        """A key for clients that insist on one."""
        return self.api_key or "none"

    @property
    def n_output(self) -> int:
        """Most tokens of an answer: a quarter of the context, up to `MOST_OUTPUT`."""
        return min(self.n_ctx // 4, MOST_OUTPUT)


@dataclass(frozen=True)
class Client:
    """A program that can use a server.

    Attributes:
        config: its settings, with a comment that says where they go.
        n_ctx: tokens of context that it needs; 0 if any context will do.
        n_prompt: tokens of its first request, with its own prompt and its tools; 0 for few.
    """

    config: Callable[[ServerAddress], str]
    n_ctx: int = 0
    n_prompt: int = 0


def _quoted(text: str) -> str:
    """A string of JSON, YAML or TOML: all of them read this one."""
    return json.dumps(text, ensure_ascii=False)


def _continue(server: ServerAddress) -> str:
    return f"""# ~/.continue/config.yaml
name: localkv
version: 0.0.1
schema: v1
models:
  - name: {_quoted(server.model)}
    provider: openai
    model: {_quoted(server.model)}
    apiBase: {_quoted(server.url + "/v1")}
    apiKey: {_quoted(server.some_key)}
    roles: [chat, edit, apply]
    capabilities: [tool_use]
    defaultCompletionOptions:
      contextLength: {server.n_ctx}
      maxTokens: {server.n_output}
"""


def _zed(server: ServerAddress) -> str:
    model = {
        "name": server.model,
        "display_name": server.model,
        "max_tokens": server.n_ctx,
        "max_output_tokens": server.n_output,
        "capabilities": {
            "tools": True,
            "images": False,
            "parallel_tool_calls": True,
            "prompt_cache_key": False,
        },
    }
    provider = {"api_url": f"{server.url}/v1", "available_models": [model]}
    settings = {"language_models": {"openai_compatible": {"localkv": provider}}}
    return (
        f"// ~/.config/zed/settings.json; LOCALKV_API_KEY={server.some_key} goes into Zed's "
        "environment\n" + json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    )


def _aider(server: ServerAddress) -> str:
    model, metadata = f"openai/{server.model}", "~/.aider.localkv.json"
    sizes = {
        "max_input_tokens": server.n_ctx,
        "max_output_tokens": server.n_output,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    words = [
        *("aider", "--model", model),
        *("--openai-api-base", f"{server.url}/v1", "--openai-api-key", server.some_key),
    ]
    text = shlex.quote(json.dumps({model: sizes}, ensure_ascii=False))
    return (
        f"# in a shell\nprintf '%s\\n' {text} > {metadata}\n"
        f"{shlex.join(words)} --model-metadata-file {metadata}\n"
    )


def _codex(server: ServerAddress) -> str:
    where = "# ~/.codex/config.toml"
    if server.api_key is not None:
        where += "; export LOCALKV_API_KEY=" + server.api_key
    key = "" if server.api_key is None else 'env_key = "LOCALKV_API_KEY"\n'
    return f"""{where}
model = {_quoted(server.model)}
model_provider = "localkv"
model_context_window = {server.n_ctx}
web_search = "disabled"

[model_providers.localkv]
name = "localkv"
base_url = {_quoted(server.url + "/v1")}
wire_api = "responses"
{key}"""


def _claude(server: ServerAddress) -> str:
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.some_key,
        "ANTHROPIC_MODEL": server.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": server.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": server.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": server.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.n_ctx),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.n_output),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join(["# in a shell", *lines, "claude", ""])


def _opencode(server: ServerAddress) -> str:
    model = {
        "name": server.model,
        "tool_call": True,
        "limit": {"context": server.n_ctx, "output": server.n_output},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "localkv",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.some_key},
        "models": {server.model: model},
    }
    settings = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"localkv": provider},
        "model": f"localkv/{server.model}",
        "small_model": f"localkv/{server.model}",
    }
    return (
        "// ~/.config/opencode/opencode.jsonc, or opencode.jsonc in a project\n"
        + json.dumps(settings, indent=2, ensure_ascii=False)
        + "\n"
    )


def _llm(server: ServerAddress) -> str:
    where = '# extra-openai-models.yaml in the folder of "$(llm logs path)"'
    if server.api_key is not None:
        where += f"; llm keys set localkv --value {server.api_key}"
    key = "" if server.api_key is None else "  api_key_name: localkv\n"
    return f"""{where}
- model_id: {_quoted("localkv/" + server.model)}
  model_name: {_quoted(server.model)}
  aliases: [localkv]
  api_base: {_quoted(server.url + "/v1")}
  supports_tools: true
  supports_schema: true
{key}"""


CLIENTS: dict[str, Client] = {
    "claude": Client(_claude, 65_536, 21_000),
    "codex": Client(_codex, 16_384, 6_500),
    "opencode": Client(_opencode, 16_384, 8_000),
    "aider": Client(_aider),
    "continue": Client(_continue),
    "zed": Client(_zed),
    "llm": Client(_llm),
}
"""The clients by name. SmolLM2's tokenizer counted the tokens, without a user's own files and
tools."""
