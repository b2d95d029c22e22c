"""`localkv serve`: a model for programs that speak HTTP."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import click

from localkv.cli.command import Command
from localkv.cli.loading_options import loading_arguments, loading_options
from localkv.cli.messages import note
from localkv.cli.model_file import model_file, named_or_shipped
from localkv.cli.option_types import Whole
from localkv.cli.options import option
from localkv.cli.preset_choice import say_preset
from localkv.cli.profile_options import profile_arguments
from localkv.cli.sampling_options import sampling_options, sampling_params
from localkv.errors import byte_size, counted

PANEL = "Server"
PARALLEL = 16

_OPTIONS: list[click.Parameter] = [
    option(
        "--host",
        panel=PANEL,
        llama_env="HOST",
        metavar="ADDRESS",
        default="127.0.0.1",
        show_default=True,
        help="The address to listen on.",
    ),
    option(
        "--port",
        panel=PANEL,
        llama_env="PORT",
        type=Whole(0, 65535),
        metavar="N",
        default=8080,
        show_default=True,
        help="The port to listen on; 0 takes a free one.",
    ),
    option(
        "-a",
        "--alias",
        panel=PANEL,
        llama_env="ALIAS",
        metavar="NAMES",
        help="What clients call the model, names with commas between them. [default: the file's "
        "name]",
    ),
    option(
        "-np",
        "--parallel",
        panel=PANEL,
        llama_env="N_PARALLEL",
        type=Whole(1),
        metavar="N",
        default=PARALLEL,
        show_default=True,
        help="Requests that run at the same time.",
    ),
    option(
        "--cache-tokens",
        panel=PANEL,
        type=Whole(1),
        metavar="N",
        help="Tokens that the cache holds of all requests together. [default: four contexts]",
    ),
    option(
        "-n",
        "--predict",
        "n_predict",
        panel=PANEL,
        type=int,
        metavar="N",
        default=-1,
        show_default=True,
        help="Most tokens of an answer where a request says nothing; -1 sets no limit.",
    ),
    option(
        "--queue",
        panel=PANEL,
        type=Whole(0),
        metavar="N",
        default=256,
        show_default=True,
        help="Requests that wait at most; others get status 429.",
    ),
]


_SLOTS = option(
    "--slots/--no-slots",
    "has_slots",
    panel=PANEL,
    type=bool,
    default=True,
    help="Whether /slots tells what runs.  [default: slots]",
)


def _run(*, host: str, port: int, alias: str | None, **values: Any) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit code."""
    if unnamed := named_or_shipped(values):
        note(unnamed)
    path = model_file(values)
    params = sampling_params(values, escape=False)
    from localkv.chat.engine import EngineOptions
    from localkv.server.http_server import serve
    from localkv.server.settings import ServerSettings
    from localkv.server.wire import Facts

    profile = profile_arguments(values, Path(path))
    if "kv_bits" not in profile:
        say_preset(values)
    arguments = loading_arguments(values) | profile
    arguments["n_parallel"] = values["parallel"]
    arguments["n_cache_tokens"] = values["cache_tokens"]
    names = [name.strip() for name in (alias or Path(path).stem).split(",") if name.strip()]
    settings = ServerSettings(
        EngineOptions(str(path), arguments),
        names[0],
        tuple(names[1:]),
        host=host,
        port=port,
        params=params,
        max_tokens=values["n_predict"] if values["n_predict"] >= 0 else None,
        queue=values["queue"],
        has_slots=values["has_slots"],
    )

    def ready(facts: Facts) -> None:
        for line in facts.warnings:
            note(f"warning: {line}")
        engine = facts.engine
        note(
            f"{settings.model_name}: {counted(facts.n_parallel, 'request')} at a time, up to "
            f"{engine.n_ctx:,} tokens each; the cache holds {facts.cache_tokens:,} tokens in "
            f"{byte_size(facts.cache_bytes)} ({engine.type_k}/{engine.type_v})"
        )

    async def main() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, stop.set)
        await serve(
            settings,
            say=note,
            on_listening=lambda address: note(f"listening on {address}; loading {path}"),
            on_ready=ready,
            stop=stop,
        )

    asyncio.run(main())
    return 0


serve = Command(
    "serve",
    examples=[
        ("Serve a model in a file", "localkv serve -m model.gguf"),
        (
            "More sessions in the same memory: K in 8 bits, V in 4",
            "localkv serve -m model.gguf -c 32768 -ctk q8_0 -ctv q4_0",
        ),
    ],
    essentials="--host --port -np --cache-tokens -m -hf -c -ctk -ctv --preset -t",
    params=[*_OPTIONS, _SLOTS, *loading_options(), *sampling_options()],
    callback=_run,
    help="Serve a model over HTTP, to programs that speak OpenAI's API.",
    epilog="Every option can also be set as LOCALKV_<NAME> (LOCALKV_CTX_SIZE), where llama.cpp has "
    "a variable for it as LLAMA_ARG_<NAME>, or in the [serve] table of config.toml.",
)
