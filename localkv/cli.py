"""The command line: `localkv COMMAND ...`. What runs a model is imported to load one."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from localkv.commands.output import guard_streams
from localkv.commands.parsing import Group, version_option
from localkv.commands.process import (
    BROKEN_PIPE,
    INTERRUPTED,
    USAGE,
    end_unseen,
    prepare_streams,
    report,
    silence_stdout,
)
from localkv.system.bus_errors import end_cleanly
from localkv.system.limits import spare_threads

__all__ = ["cli", "main", "run"]

COMMANDS = {
    "chat": ("localkv.commands.chat", "Talk with a model."),
    "complete": ("localkv.commands.complete", "Continue a prompt, or answer it."),
    "serve": ("localkv.commands.serve", "Serve a model over HTTP."),
    "embed": ("localkv.commands.embed", "Turn texts into vectors."),
    "rerank": ("localkv.commands.rerank", "Order documents by how well they answer a query."),
    "perplexity": ("localkv.commands.perplexity", "Measure how well a cache type predicts a text."),
    "bench": ("localkv.commands.bench", "Measure how fast a model runs."),
    "plan": ("localkv.commands.plan", "Say what fits in memory."),
    "calibrate": ("localkv.commands.calibrate", "Measure which layers need which cache types."),
    "quantize": ("localkv.commands.quantize", "Write a model's weights in another type."),
    "imatrix": (
        "localkv.commands.imatrix",
        "Measure which columns of weights count, for quantize.",
    ),
    "show": ("localkv.commands.show", "Show what is in a model file."),
    "tokenize": ("localkv.commands.tokenize", "Turn text into token ids."),
    "detokenize": ("localkv.commands.tokenize", "Turn token ids into text."),
    "convert": ("localkv.commands.convert", "Make a GGUF file of a Hugging Face checkpoint."),
    "pull": ("localkv.commands.local_models", "Fetch a model from Hugging Face."),
    "list": ("localkv.commands.local_models:list_models", "List the models on this machine."),
    "rm": ("localkv.commands.local_models", "Delete a fetched model."),
    "doctor": ("localkv.commands.doctor", "Check that this machine can run models."),
}
"""Command -> the module that holds it under the same name, or MODULE:NAME, and its summary."""

cli = Group(
    "localkv",
    commands_at=COMMANDS,
    params=[version_option()],
    examples=[
        (
            "Continue a text, with the small model that ships",
            'localkv complete -p "Once upon a time"',
        ),
        ("Talk with a model from Hugging Face", "localkv chat -hf ORG/REPO:Q4_K_M"),
        ("Talk with one in a file", "localkv chat -m model.gguf"),
        ("Say whether it fits, with which caches and contexts", "localkv plan model.gguf"),
    ],
    help="Run language models from GGUF files, with the KV cache packed, in types chosen "
    "separately for K and for V.",
    epilog="Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted.",
)


def run(argv: Sequence[str]) -> int:
    """Run one command line; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace" if stream is sys.stderr else "replace")
    try:
        try:
            with cli.make_context("localkv", list(argv)) as ctx:
                code = cli.invoke(ctx)
        except click.exceptions.Exit as finished:
            code = finished.exit_code
        # flush after --help, too: at exit Python would report an error in its own words
        if sys.stdout is not None:
            sys.stdout.flush()
        return code or 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.message, err=True)
        return USAGE
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        silence_stdout()
        return BROKEN_PIPE
    except Exception as error:
        code = report(error)
        if isinstance(error, OSError):
            silence_stdout()
        return code


def main() -> NoReturn:
    """Run this process's command line, and end it."""
    prepare_streams()
    end_unseen()
    end_cleanly()
    spare_threads()
    if instruction := os.environ.get("_LOCALKV_COMPLETE"):
        from localkv.commands.completion import answer_shell

        sys.exit(answer_shell(cli, instruction))
    guard_streams()
    code = run(sys.argv[1:])
    gc.freeze()  # Python would look through all objects for garbage, while the memory is given back
    sys.exit(code)
