"""Starts `localkv serve` with the options that llama-server would have been started with.

llama.cpp's own tests of its server start it for each test; this stands in for it. The model is
that of SHIM_MODEL, and the tokens of SHIM_NEVER are never drawn: texts are as long as with a model
that does not end them. Servers for embeddings and reranking have the models of SHIM_EMBEDDING
and SHIM_RERANKING.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

SAME = {
    "--port": "--port",
    "--host": "--host",
    "--temp": "--temp",
    "--seed": "--seed",
    "--alias": "-a",
    "--threads": "-t",
    "--batch-size": "-b",
    "--ubatch-size": "-ub",
    "-ctk": "-ctk",
    "-ctv": "-ctv",
    "--n-predict": "-n",
    "--api-key": "--api-key",
    "--chat-template": "--chat-template",
    "--chat-template-file": "--chat-template-file",
    "--reasoning": "--reasoning",
    "--reasoning-format": "--reasoning-format",
    "--tags": "--tags",
    "--slot-save-path": "--slot-save-path",
    "--cors-origins": "--cors",
    "--model-draft": "-md",
    "--spec-draft-n-max": "--spec-draft-n-max",
    "--spec-draft-n-min": "--spec-draft-n-min",
    "--pooling": "--pooling",
}
"""Options that have a value, and what they are called here."""
FLAGS = {"--slots": "--slots", "--no-slots": "--no-slots", "--no-ui": "--no-ui"}
WITHOUT_EFFECT = {
    "--offline",
    "--cont-batching",
    "--jinja",
    "--no-jinja",
    "--verbose",
    "--no-cache-idle-slots",
    "--swa-full",
    "--backend_sampling",
    "--embedding",
    "--reranking",
}
"""What is always so here, or makes no difference."""
VALUES_WITHOUT_EFFECT = {
    "--hf-repo",
    "--hf-file",
    "--model-url",
    "--n-gpu-layers",
    "--cache-ram",
    "-fa",
}
CONTEXT, PARALLEL, UNIFIED = "--ctx-size", "--parallel", "--kv-unified"
METRICS, SPECULATION = "--metrics", "--spec-type"
DRAFTERS = {"draft-simple": "draft"}
"""llama-server's names of what guesses tokens."""
LLAMA_SLOTS = 4


def translated(arguments: Sequence[str], model: str, never: Sequence[str] = ()) -> list[str]:
    """The arguments of `localkv serve`.

    llama-server shares its context among slots unless it is told not to; here each request may use
    all of `-c`, and the cache has a size of its own.

    Args:
        arguments: of llama-server.
        model: the file to serve.
        never: tokens that are not drawn.

    Raises:
        ValueError: there is nothing like an option.
    """
    rest, found = list(arguments), list[str]()
    n_ctx, n_slots, is_shared, is_measured = 0, LLAMA_SLOTS, False, False
    while rest:
        name = rest.pop(0)
        if name in SAME:
            found += [SAME[name], rest.pop(0)]
        elif name in FLAGS:
            found.append(FLAGS[name])
        elif name == CONTEXT:
            n_ctx = int(rest.pop(0))
        elif name == PARALLEL:
            n_slots = int(rest.pop(0))
        elif name == UNIFIED:
            is_shared = True
        elif name == METRICS:
            is_measured = True
        elif name == SPECULATION and rest[0] in DRAFTERS:
            found += ["--spec", DRAFTERS[rest.pop(0)]]
        elif name in VALUES_WITHOUT_EFFECT:
            rest.pop(0)
        elif name not in WITHOUT_EFFECT:
            raise ValueError(f"localkv serve has nothing like {name}")
    if n_ctx:
        found += ["-c", str(n_ctx if is_shared else n_ctx // n_slots)]
        found += ["--cache-tokens", str(n_ctx)]
    if not is_measured:
        found.append("--no-metrics")
    found += [argument for token in never for argument in ("-l", f"{token}-inf")]
    return ["serve", "-m", model, "-np", str(n_slots), *found]


def main() -> None:
    """Become the server."""
    try:
        never = os.environ.get("SHIM_NEVER", "").split()
        model = os.environ["SHIM_MODEL"]
        for kind in ("embedding", "reranking"):
            if f"--{kind}" in sys.argv:
                model, never = os.environ[f"SHIM_{kind.upper()}"], []
        arguments = translated(sys.argv[1:], model, never)
    except ValueError as error:
        sys.exit(f"shim: {error}")
    os.execv(sys.executable, [sys.executable, "-m", "localkv", *arguments])


if __name__ == "__main__":
    main()
