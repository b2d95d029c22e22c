"""Commands of llama.cpp, ollama and llm that have another name here, or none, and what to use."""

from __future__ import annotations

_TALK = "localkv chat talks with a model, localkv complete -p TEXT continues a text once"
_SERVES = "localkv serve serves a model over HTTP until Ctrl-C"
_LOADED = (
    "a model is loaded for as long as a command runs; localkv list shows those on this machine"
)
_FILES = "models are GGUF files: localkv pull fetches one, -m FILE takes any other"

FOREIGN_COMMANDS = {
    **dict.fromkeys(("run", "cli", "prompt", "generate", "completion"), _TALK),
    **dict.fromkeys(("server", "start", "stop"), _SERVES),
    **dict.fromkeys(("ps", "status"), _LOADED),
    **dict.fromkeys(("create", "cp", "push", "convert", "quantize"), _FILES),
    **dict.fromkeys(("ls", "models"), "localkv list shows the models on this machine"),
    **dict.fromkeys(("download", "get", "install"), "localkv pull ORG/REPO fetches a model"),
    **dict.fromkeys(("remove", "delete", "uninstall"), "localkv rm deletes a fetched model"),
    **dict.fromkeys(("info", "inspect"), "localkv show FILE shows what is in a model file"),
    **dict.fromkeys(("ppl", "eval"), "localkv perplexity measures how well a text is predicted"),
    "help": "localkv --help, and localkv COMMAND --help",
    "version": "localkv --version",
}
"""Command -> the hint for who types it."""
