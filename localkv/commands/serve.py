"""`localkv serve`: a model for programs that speak HTTP."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import click
import uvloop

from localkv.commands.generation_options import (
    reasoning_preserve_option,
    sampling_options,
    sampling_params,
    template_options,
    template_text,
)
from localkv.commands.loading_options import (
    loading_arguments,
    loading_options,
    profile_arguments,
    speculation_arguments,
    speculation_options,
)
from localkv.commands.model_file import model_file, named_or_shipped
from localkv.commands.options import Panel, quiet_option, say_preset
from localkv.commands.output import note
from localkv.commands.parsing import Choice, Command, Whole, byte_size_of
from localkv.commands.process import INTERRUPTED
from localkv.config import DEFAULT_CACHE_DISK
from localkv.errors import UsageError, byte_size, counted, printable
from localkv.loader.answer_tags import EFFORTS
from localkv.server.client_config import CLIENTS, ServerAddress
from localkv.server.settings import REASONING, REASONING_FORMATS
from localkv.system.terminal_text import visible


def _run(*, port: int, alias: str | None, **values: Any) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit code."""
    from localkv.server.access import read_keys

    keys = read_keys(values["api_key"], values["api_key_file"])
    if (values["ssl_cert_file"] is None) != (values["ssl_key_file"] is None):
        raise UsageError("https needs both --ssl-cert-file and --ssl-key-file")
    if values["cache_tokens"] is not None and values["cache_size"] is not None:
        raise UsageError("--cache-tokens and --cache-size exclude each other")
    quiet = values["quiet"]
    say = _silence if quiet else note
    if unnamed := named_or_shipped(values):
        say(unnamed)
    path = model_file(values)
    params = sampling_params(values, escape=False)
    template, hosts = template_text(values), _listed(values["host"])
    if not hosts:
        raise UsageError("--host has no address", hint="as in --host 127.0.0.1")
    from localkv.chat.engine import EngineOptions
    from localkv.engine_process.texts import Facts
    from localkv.server.access import checked_origins
    from localkv.server.http_server import Ending, serve
    from localkv.server.settings import ServerSettings

    profile = profile_arguments(values, Path(path))
    if "kv_bits" not in profile and not quiet:
        say_preset(values)
    arguments = loading_arguments(values) | profile | speculation_arguments(values)
    arguments["n_parallel"] = values["parallel"]
    arguments["n_cache_tokens"] = values["cache_tokens"]
    arguments["n_cache_bytes"] = values["cache_size"]
    sizes = (values[name] for name in ("cache_tokens", "cache_size", "kv_budget"))
    if all(size is None for size in sizes):
        arguments["n_cache_tokens"] = "fit"
    arguments["step_ms"] = values["step_ms"]
    arguments |= _disk_arguments(values)
    names = _listed(alias) or (Path(path).stem,)
    if values["print_config"] is not None:
        return _print_config(values, hosts[0], port, names[0], path)
    settings = ServerSettings(
        EngineOptions(str(path), arguments, template),
        names[0],
        names[1:],
        checks_model=not values["any_model"],
        tags=_listed(values["tags"]),
        hosts=hosts,
        port=port,
        params=params,
        max_tokens=values["n_predict"] if values["n_predict"] >= 0 else None,
        reasoning=values["reasoning"],
        reasoning_format=values["reasoning_format"],
        reasoning_budget=values["reasoning_budget"],
        reasoning_effort=values["reasoning_effort"],
        preserve_reasoning=values["reasoning_preserve"],
        prefills=values["prefill_assistant"],
        queue=values["queue"],
        has_metrics=values["has_metrics"],
        has_slots=values["has_slots"],
        timeout=values["timeout"],
        api_keys=keys,
        cors=checked_origins(_listed(values["cors"])),
        has_page=values["ui"],
        allowed_hosts=_listed(values["allowed_hosts"]),
        is_insecure=values["insecure"],
        ssl_key=values["ssl_key_file"],
        ssl_cert=values["ssl_cert_file"],
        drain=values["drain"],
        log_file=values["log_file"],
        state_dir=_folder(values["state_dir"]),
        cache_per_key=values["cache_per_key"],
        spm_infill=values["spm_infill"],
        pooling=values["pooling"],
    )

    def ready(facts: Facts) -> None:
        for line in facts.warnings:
            note(f"warning: {line}")
        engine = facts.engine
        types = ", ".join(engine.kv_ladder) or f"{engine.type_k}/{engine.type_v}"
        say(
            f"{settings.model_name}: {counted(facts.n_parallel, 'request')} at a time, up to "
            f"{engine.n_ctx:,} tokens each; the cache holds {facts.cache_tokens:,} tokens in "
            f"{byte_size(facts.cache_bytes)} ({types}); loaded in "
            f"{engine.load_seconds:.1f} s, warmed up in {facts.warm_up_seconds:.1f} s"
        )

    async def main() -> int:
        ending, loop = Ending(), asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, ending.signalled)
        await serve(
            settings,
            say=say,
            on_listening=lambda address: say(f"listening on {address}; loading {path}"),
            on_ready=ready,
            ending=ending,
        )
        return INTERRUPTED if ending.hurries.is_set() else 0

    return uvloop.run(main())


def _disk_arguments(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM` that `--cache-disk` and `--cache-disk-size` stand for.

    Raises:
        UsageError: there is a size without a folder, or it is too small for anything.
    """
    folder, size = values["cache_disk"], values["cache_disk_size"]
    if folder is None:
        if size is not None:
            raise UsageError(
                "--cache-disk-size is the size of --cache-disk, and there is none",
                hint="add --cache-disk FOLDER",
            )
        return {}
    if size == 0:
        raise UsageError("--cache-disk-size 0 has no room for anything", hint="use a size")
    return {
        "cache_disk": str(Path(folder).expanduser().resolve()),
        "cache_disk_size": DEFAULT_CACHE_DISK if size is None else size,
    }


def _silence(text: str) -> None:
    """What `-q` leaves out."""


def _print_config(values: dict[str, Any], host: str, port: int, name: str, path: Any) -> int:
    """Print what a client has to know; returns the exit code.

    Raises:
        UsageError: the server's port would be any.
    """
    from localkv.config import Overrides
    from localkv.loader.gguf_file import open_gguf
    from localkv.loader.model_header import with_overrides
    from localkv.loader.weights import checked_spec
    from localkv.memory.fit import chosen_context

    if not port:
        raise UsageError("--print-config names the port to clients, which --port 0 leaves open")
    is_any = host in ("0.0.0.0", "::")
    scheme = "http" if values["ssl_cert_file"] is None else "https"
    shown = "127.0.0.1" if is_any else f"[{host}]" if ":" in host else host
    has_key = values["api_key"] is not None or values["api_key_file"] is not None
    config = checked_spec(with_overrides(open_gguf(path), Overrides.of(values)))
    n_ctx = chosen_context(values["n_ctx"], config)
    n_ctx = min(n_ctx, values["cache_tokens"] or n_ctx)
    server = ServerAddress(
        f"{scheme}://{shown}:{port}", visible(name), n_ctx, "YOUR_KEY" if has_key else None
    )
    client_name = values["print_config"]
    client = CLIENTS[client_name]
    if n_ctx < client.n_ctx:
        trained = config.n_ctx_train
        note(
            f"warning: {client_name}'s first request has about {client.n_prompt:,} tokens, and it "
            f"works from -c {client.n_ctx} on; this server takes {n_ctx:,}"
            + (f", and the model was trained for {trained:,}" if trained < client.n_ctx else "")
        )
    click.echo(client.config(server), nl=False)
    return 0


def _folder(path: str | None) -> str | None:
    """A folder that is there.

    Raises:
        UsageError: it is not.
    """
    if path is not None and not Path(path).is_dir():
        raise UsageError(f"--state-dir {printable(path)} is no folder", hint="make it first")
    return None if path is None else str(Path(path).resolve())


def _listed(names: str | None) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(name for part in (names or "").split(",") if (name := part.strip()))


_SERVER, _ACCESS = Panel("Server"), Panel("Access")
PARALLEL = 16

SERVER_OPTIONS: list[click.Parameter] = [
    _SERVER.option(
        "--print-config",
        type=Choice(CLIENTS),
        metavar="CLIENT",
        help="Print what to paste into the settings of a client, and serve nothing: "
        f"{', '.join(CLIENTS)}.",
    ),
    _SERVER.option(
        "--host",
        llama_env="HOST",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="The address to listen on, or several with commas between them.",
    ),
    _SERVER.option(
        "--port",
        llama_env="PORT",
        type=Whole(0, 65535),
        default=8080,
        help="The port to listen on; 0 takes a free one.",
    ),
    _SERVER.option(
        "-a --alias",
        llama_env="ALIAS",
        metavar="NAMES",
        help="What clients call the model, names with commas between them. [default: the file's "
        "name]",
    ),
    _SERVER.option(
        "--tags",
        llama_env="TAGS",
        metavar="NAMES",
        help="More that /v1/models says of the model: words with commas between them.",
    ),
    _SERVER.option(
        "-np --parallel",
        llama_env="N_PARALLEL",
        type=Whole(1),
        default=PARALLEL,
        help="Requests that run at the same time.",
    ),
    _SERVER.option(
        "--cache-tokens",
        type=Whole(1),
        help="Tokens that the cache holds of all requests together. [default: four contexts, or "
        "what free memory has room for]",
    ),
    _SERVER.option(
        "--cache-size",
        callback=byte_size_of,
        metavar="SIZE",
        help="The same in bytes, such as 4GiB: as many tokens as fit into them.",
    ),
    _SERVER.option(
        "--cache-disk",
        metavar="FOLDER",
        help="Keep evaluated tokens in files of this folder, too: what has no more room in the "
        "cache, and what is in it when the server ends. Servers with the same model and the same "
        "cache types go on with them. [default: none]",
    ),
    _SERVER.option(
        "--cache-disk-size",
        callback=byte_size_of,
        metavar="SIZE",
        help="Bytes of these files at most, such as 20GiB; those not used for the longest time go "
        f"first. [default: {byte_size(DEFAULT_CACHE_DISK)}]",
    ),
    _SERVER.option(
        "-n --predict n_predict",
        type=int,
        metavar="N",
        default=-1,
        help="Most tokens of an answer where a request says nothing; -1 sets no limit.",
    ),
    _SERVER.option(
        "--queue",
        type=Whole(0),
        default=256,
        help="Requests that wait at most; others get status 429.",
    ),
    _SERVER.option(
        "--timeout -to",
        llama_env="TIMEOUT",
        type=Whole(1),
        metavar="SECONDS",
        default=600,
        help="The longest that a request may take, waiting included.",
    ),
    _SERVER.option(
        "--drain",
        type=Whole(0),
        metavar="SECONDS",
        default=30,
        help="How long running requests may go on after SIGTERM or Ctrl-C; a second one waits for "
        "nobody.",
    ),
    _ACCESS.option(
        "--api-key",
        metavar="KEYS",
        help="Let in only who has one of these keys, with commas between them. Others on this "
        "machine can see command lines: --api-key-file and LOCALKV_API_KEY hide it.",
    ),
    _ACCESS.option("--api-key-file", metavar="FILE", help="A file with such keys, one a line."),
    _ACCESS.option(
        "--ssl-cert-file",
        llama_env="SSL_CERT_FILE",
        metavar="FILE",
        help="The certificate for https, in PEM.",
    ),
    _ACCESS.option(
        "--ssl-key-file", llama_env="SSL_KEY_FILE", metavar="FILE", help="Its private key, in PEM."
    ),
    _ACCESS.flag("--insecure", help="Let everybody in who reaches --host, without a key."),
    _ACCESS.option(
        "--allowed-hosts",
        metavar="NAMES",
        help="Names by which clients call this server, with commas between them. It always goes by "
        "its address, --host, localhost and this machine's name; others are refused unless there "
        "are keys.",
    ),
    _ACCESS.option(
        "--cors",
        metavar="ORIGINS",
        help="Origins whose pages may call this server, such as https://chat.example, with commas "
        "between them; localhost for this machine's at any port, * for all. "
        "[default: none]",
    ),
    _SERVER.option(
        "any_model --any-model/--check-model",
        type=bool,
        default=True,
        help="Take requests for any model as meant for this one, or refuse those that name "
        "another. [default: any]",
    ),
    _SERVER.option(
        "ui --ui/--no-ui --webui/--no-webui",
        llama_env="UI",
        type=bool,
        default=True,
        help="Serve a page for chats at /, or not. [default: ui]",
    ),
    _SERVER.option(
        "--step-ms",
        type=click.FloatRange(min=1),
        metavar="MS",
        help="Milliseconds that a step of all requests should take: prompts get what is left of "
        "it. [default: 100 on a CPU, 30 on a GPU]",
    ),
    *template_options(_SERVER),
    _SERVER.option(
        "-rea --reasoning",
        llama_env="REASONING",
        type=Choice(REASONING),
        default="auto",
        help="Whether the model reasons before it answers, where a request does not say so. auto: "
        "if its template has llama-server's variable for it, enable_thinking.",
    ),
    _SERVER.option(
        "--reasoning-format",
        llama_env="THINK",
        type=Choice(REASONING_FORMATS),
        default="auto",
        help="Where the reasoning is, if a request does not say so: none leaves it in the text, "
        "deepseek and auto put it into reasoning_content.",
    ),
    _SERVER.option(
        "--reasoning-budget",
        llama_env="THINK_BUDGET",
        type=Whole(-1),
        default=-1,
        help="Most tokens of reasoning, where a request does not say so; -1 sets no limit.",
    ),
    _SERVER.option(
        "--reasoning-effort",
        type=Choice(EFFORTS),
        help="How much the model reasons, where a request does not say so: none switches it off, "
        "the others are for templates that read reasoning_effort, as gpt-oss's.",
    ),
    reasoning_preserve_option(_SERVER),
    _SERVER.option(
        "--prefill-assistant/--no-prefill-assistant prefill_assistant",
        llama_env="PREFILL_ASSISTANT",
        type=bool,
        default=True,
        help="Go on with an assistant's message that is the last one, or answer it. [default: go "
        "on]",
    ),
    _SERVER.option(
        "--metrics/--no-metrics has_metrics",
        type=bool,
        default=True,
        help="Whether /metrics tells Prometheus what the server does. [default: metrics]",
    ),
    _SERVER.option(
        "--slots/--no-slots has_slots",
        type=bool,
        default=True,
        help="Whether /slots tells what runs.  [default: slots]",
    ),
    _SERVER.option(
        "--log-file",
        llama_env="LOG_FILE",
        metavar="FILE",
        help="A file for a line of JSON about each request, - for stderr: path, status, "
        "milliseconds, tokens; never texts or keys. [default: none]",
    ),
    _SERVER.option(
        "--state-dir --slot-save-path",
        metavar="FOLDER",
        help="Where /slots/ID?action=save and restore keep their files. [default: none]",
    ),
    _SERVER.flag(
        "--spm-infill",
        help="Where a middle is filled in (/infill, suffix), put the suffix before the prefix, as "
        "some models want it.",
    ),
    _SERVER.option(
        "--pooling",
        llama_env="POOLING",
        type=Choice(("none", "mean", "cls", "last"), case_sensitive=False),
        metavar="NAME",
        help="From tokens to an embedding: their mean, the first one (cls), the last one, or none, "
        "with which /embedding gives every token's. [default: what the model was trained for, or "
        "mean]",
    ),
    quiet_option("Say nothing on stderr but warnings and errors."),
    _ACCESS.flag(
        "--cache-per-key",
        help="Requests share evaluated tokens only with requests of the same key: nobody learns "
        "by the time of an answer what others asked.",
    ),
]


serve = Command(
    "serve",
    examples=[
        ("Serve a model in a file", "localkv serve -m model.gguf"),
        (
            "Let others in who have a key",
            "localkv serve -m model.gguf --host 0.0.0.0 --api-key-file keys.txt",
        ),
        (
            "More sessions in the same memory: K in 8 bits, V in 4",
            "localkv serve -m model.gguf -c 32768 -ctk q8_0 -ctv q4_0",
        ),
    ],
    essentials="--host --port --api-key-file -np --cache-tokens -m -hf -c -ctk -ctv --preset -t",
    params=[*SERVER_OPTIONS, *loading_options(), *sampling_options(), *speculation_options()],
    callback=_run,
    help="Serve a model over HTTP, to programs that speak OpenAI's API.",
    epilog="Every option can also be set as LOCALKV_<NAME> (LOCALKV_CTX_SIZE), where llama.cpp has "
    "a variable for it as LLAMA_ARG_<NAME>, or in the [serve] table of config.toml.",
)
