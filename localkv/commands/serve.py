"""`localkv serve`: a model for programs that speak HTTP."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import uvloop
from click.core import ParameterSource

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
from localkv.commands.parsing import (
    FILE,
    Argument,
    Choice,
    Command,
    Whole,
    byte_size_of,
    read_toml,
    table_values,
    values_with,
)
from localkv.commands.process import INTERRUPTED
from localkv.config import DEFAULT_CACHE_DISK
from localkv.errors import LocalKVError, UsageError, byte_size, counted, printable
from localkv.loader.answer_tags import EFFORTS
from localkv.server.client_config import CLIENTS, ServerAddress
from localkv.server.settings import REASONING, REASONING_FORMATS, ModelSettings, ServerSettings
from localkv.system.terminal_text import visible


def _run(**values: Any) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit code."""
    ctx, tables = click.get_current_context(), dict[str, dict[str, Any]]()
    if values["file"] and values["models_preset"]:
        raise UsageError("two files of models: give FILE or --models-preset FILE")
    if file := values["file"] or values["models_preset"]:
        common, tables = _tables(Path(file), ctx)
        ctx, values = values_with(ctx, common)
    with ctx.scope(cleanup=False):
        return _serve(values, tables)


def _serve(values: dict[str, Any], tables: dict[str, dict[str, Any]]) -> int:
    """Serve models that options name, and those that have tables."""
    from localkv.server.access import read_keys

    keys = read_keys(values["api_key"], values["api_key_file"])
    if (values["ssl_cert_file"] is None) != (values["ssl_key_file"] is None):
        raise UsageError("https needs both --ssl-cert-file and --ssl-key-file")
    hosts = _listed(values["host"])
    if not hosts:
        raise UsageError("--host has no address", hint="as in --host 127.0.0.1")
    say = _silence if values["quiet"] else note
    models = _models(values, tables, say)
    if values["print_config"] is not None:
        return _print_config(values, hosts[0], models[0])
    from localkv.engine_process.texts import Facts
    from localkv.server.access import checked_origins
    from localkv.server.http_server import Ending, serve

    settings = ServerSettings(
        models,
        checks_model=not values["any_model"],
        models_memory=values["models_memory"],
        models_max=values["models_max"],
        autoloads=values["models_autoload"],
        hosts=hosts,
        port=values["port"],
        has_metrics=values["has_metrics"],
        api_keys=keys,
        cors=checked_origins(_listed(values["cors"])),
        has_page=values["ui"],
        allowed_hosts=_listed(values["allowed_hosts"]),
        is_insecure=values["insecure"],
        ssl_key=values["ssl_key_file"],
        ssl_cert=values["ssl_cert_file"],
        drain=values["drain"],
        log_file=values["log_file"],
    )

    def ready(model: ModelSettings, facts: Facts) -> None:
        for line in facts.warnings:
            note(f"warning: {line}")
        engine = facts.engine
        types = ", ".join(engine.kv_ladder) or f"{engine.type_k}/{engine.type_v}"
        say(
            f"{visible(model.model_name)}: {counted(facts.n_parallel, 'request')} at a time, up to "
            f"{engine.n_ctx:,} tokens each; the cache holds {facts.cache_tokens:,} tokens in "
            f"{byte_size(facts.cache_bytes)} ({types}); loaded in "
            f"{engine.load_seconds:.1f} s, warmed up in {facts.warm_up_seconds:.1f} s"
        )

    loading = str(models[0].engine.model) if len(models) == 1 else counted(len(models), "model")
    what = f"loading {loading}" if len(models) == 1 else loading

    async def main() -> int:
        ending, loop = Ending(), asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, ending.signalled)
        await serve(
            settings,
            say=say,
            on_listening=lambda address: say(f"listening on {address}; {what}"),
            on_ready=ready,
            ending=ending,
        )
        return INTERRUPTED if ending.hurries.is_set() else 0

    return uvloop.run(main())


def _disk_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
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


def _models(
    values: dict[str, Any], tables: dict[str, dict[str, Any]], say: Callable[[str], None]
) -> tuple[ModelSettings, ...]:
    """All models that the server is to offer, in the order in which they are named.

    Raises:
        UsageError: two have the same name, or options contradict each other.
        LocalKVError: one can't be had.
    """
    ctx = click.get_current_context()
    found = _found(values)
    named = [*values["model"]]
    if not (tables or found or len(named) > 1):
        values["model"] = named[0] if named else None
        if unnamed := named_or_shipped(values):
            say(unnamed)
        path = model_file(values)
        return (_settings(values, path, _listed(values["alias"]) or (path.stem,), is_only=True),)
    if values["alias"] is not None:
        raise UsageError("-a names one model, and there are several", hint=_TABLE_HINT)
    if values["hf_repo"] is not None:
        raise UsageError(
            "-hf names one model, and there are several",
            hint="-m hf.co/ORG/REPO:QUANT names one of them",
        )
    if ctx.get_parameter_source("any_model") != ParameterSource.DEFAULT and values["any_model"]:
        raise UsageError("--any-model is for one model, and there are several")
    models = list[ModelSettings]()
    for name, table in tables.items():
        inner, own = values_with(ctx, table)
        with inner.scope(cleanup=False):
            path = _named_in(name, own, table, found)
            found = {other: at for other, at in found.items() if at.resolve() != path.resolve()}
            aliases = _listed(own["alias"])
            models.append(_settings(own, path, (name, *aliases)))
    for model in named:
        path = model_file({**values, "model": model})
        models.append(_settings(values, path, (_short(model, path),)))
    for name, path in found.items():
        models.append(_settings(values, path, (name,)))
    seen = set[str]()
    for one in models:
        for name in one.names:
            if name in seen:
                raise UsageError(f"two models are called {printable(name)}", hint=_TABLE_HINT)
            seen.add(name)
    return tuple(models)


_TABLE_HINT = "a file of models gives each a name: localkv serve models.toml"


def _short(named: str, path: Path) -> str:
    """What a model is called that was named with `-m`: as its file, or by its name on the hub."""
    return path.stem if Path(named).exists() else named.removeprefix("hf.co/")


def _found(values: Mapping[str, Any]) -> dict[str, Path]:
    """The models of `--models-dir` and `--models-cache` by their names.

    Raises:
        UsageError: the folder is none, or there is no model.
    """
    found = dict[str, Path]()
    if (folder := values["models_dir"]) is not None:
        from localkv.loader.local_models import models_below

        if not Path(folder).is_dir():
            raise UsageError(f"--models-dir {printable(folder)} is no folder")
        found = models_below(Path(folder))
        if not found:
            raise UsageError(f"--models-dir {printable(folder)} has no model, no file .gguf")
    if values["models_cache"]:
        from localkv.loader.hub.cache import cached_models

        cached = {one.name: one.path for one in cached_models() if not one.model.is_sidecar}
        if not cached:
            raise UsageError("Hugging Face's cache has no model", hint="localkv pull fetches one")
        found |= cached
    return found


def _named_in(
    name: str, own: dict[str, Any], table: Mapping[str, Any], found: Mapping[str, Path]
) -> Path:
    """The file of a model that has a table in a file of models.

    Args:
        own: the values of its options.
        table: those that the table sets itself.
        found: other models that are known, by their names.
    """
    names = ("model", "hf_repo", "hf_file")
    own |= {one: table.get(one) for one in names}
    if own["model"] is None and own["hf_repo"] is None:
        if name in found:
            return found[name]
        own["model"] = name
    elif isinstance(own["model"], list):
        own["model"] = own["model"][0]
    try:
        return model_file(own)
    except LocalKVError as error:
        raise type(error)(f"[models.{printable(name)}]: {error.message}", error.hint) from None


_NOT_ABOVE = ("model", "hf_repo", "hf_file", "alias", "models_preset", "print_config")
"""Options that don't stand above the tables of a file of models."""


def _tables(path: Path, ctx: click.Context) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A file of models: the values of options for the server and for all models, and for each
    model by its name.

    Raises:
        UsageError: the file can't be read, or a key or a value is no option's.
    """
    content, shown = read_toml(path), printable(path)
    if content is None:
        raise UsageError(
            f"{shown}: no such file", hint="-m FILE names a model, and a word a file of models"
        )
    models = content.pop("models", None)
    if not isinstance(models, dict) or not models:
        raise UsageError(f"{shown} has no table [models.NAME]")
    common = table_values(ctx.command, ctx, content, f"{shown}:")
    for name in _NOT_ABOVE:
        if name in common:
            raise UsageError(
                f"{shown}: {_as_key(name)} stands above all tables",
                hint="it belongs to one model, in a table [models.NAME]",
            )
    tables = {}
    for name, table in models.items():
        where = f"{shown}: [models.{printable(name)}]"
        if not isinstance(table, dict):
            raise UsageError(f"{where} is no table")
        own = tables[name] = table_values(ctx.command, ctx, table, where)
        for key in own:
            if key in _OF_SERVER:
                raise UsageError(
                    f"{where} {_as_key(key)}: it is the server's, and no model's",
                    hint="put it above all tables",
                )
    return common, tables


def _as_key(name: str) -> str:
    """A parameter as a file names it."""
    return {"hf_repo": "hf-repo", "hf_file": "hf-file"}.get(name, name.replace("_", "-"))


def _settings(
    values: Mapping[str, Any], path: Path, names: tuple[str, ...], *, is_only: bool = False
) -> ModelSettings:
    """One model, with the options that count for it.

    Args:
        path: its file.
        names: what clients call it.
        is_only: there is no other model.

    Raises:
        UsageError: options contradict each other.
    """
    if values["cache_tokens"] is not None and values["cache_size"] is not None:
        raise UsageError("--cache-tokens and --cache-size exclude each other")
    params = sampling_params(values, escape=False)
    template = template_text(values)
    from localkv.chat.engine import EngineOptions

    profile = profile_arguments(values, path)
    if "kv_bits" not in profile and not values["quiet"]:
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
    idle = values["sleep_idle_seconds"]
    return ModelSettings(
        EngineOptions(str(path), arguments, template),
        names[0],
        names[1:],
        tags=_listed(values["tags"]),
        params=params,
        max_tokens=values["n_predict"] if values["n_predict"] >= 0 else None,
        reasoning=values["reasoning"],
        reasoning_format=values["reasoning_format"],
        reasoning_budget=values["reasoning_budget"],
        reasoning_effort=values["reasoning_effort"],
        preserve_reasoning=values["reasoning_preserve"],
        prefills=values["prefill_assistant"],
        queue=values["queue"],
        timeout=values["timeout"],
        has_slots=values["has_slots"],
        state_dir=_folder(values["state_dir"], None if is_only else names[0]),
        cache_per_key=values["cache_per_key"],
        spm_infill=values["spm_infill"],
        pooling=values["pooling"],
        loads_at_start=is_only or values["load_on_startup"],
        idle_seconds=None if idle < 0 else float(idle),
    )


def _silence(text: str) -> None:
    """What `-q` leaves out."""


def _print_config(values: dict[str, Any], host: str, model: ModelSettings) -> int:
    """Print what a client has to know of a model; returns the exit code.

    Raises:
        UsageError: the server's port would be any.
    """
    from localkv.config import Overrides
    from localkv.loader.gguf_file import open_gguf
    from localkv.loader.model_header import with_overrides
    from localkv.loader.weights import checked_spec
    from localkv.memory.fit import chosen_context

    port, arguments = values["port"], model.engine.arguments
    if not port:
        raise UsageError("--print-config names the port to clients, which --port 0 leaves open")
    is_any = host in ("0.0.0.0", "::")
    scheme = "http" if values["ssl_cert_file"] is None else "https"
    shown = "127.0.0.1" if is_any else f"[{host}]" if ":" in host else host
    has_key = values["api_key"] is not None or values["api_key_file"] is not None
    config = checked_spec(with_overrides(open_gguf(model.engine.model), Overrides.of(arguments)))
    n_ctx = chosen_context(arguments["n_ctx"], config)
    if (n_tokens := arguments["n_cache_tokens"]) != "fit":
        n_ctx = min(n_ctx, n_tokens or n_ctx)
    server = ServerAddress(
        f"{scheme}://{shown}:{port}",
        visible(model.model_name),
        n_ctx,
        "YOUR_KEY" if has_key else None,
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


def _folder(path: str | None, model: str | None) -> str | None:
    """The folder of a model's states: the one that is named, or one in it if there are several
    models, which is made.

    Raises:
        UsageError: it is not there, or can't be made.
    """
    if path is None:
        return None
    if not Path(path).is_dir():
        raise UsageError(f"--state-dir {printable(path)} is no folder", hint="make it first")
    folder = Path(path).resolve()
    if model is not None:
        folder /= re.sub(r"[^A-Za-z0-9._-]", "_", model).lstrip(".") or "_"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--state-dir {printable(path)}: {error.strerror}") from None
    return str(folder)


def _listed(names: str | None) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(name for part in (names or "").split(",") if (name := part.strip()))


_SERVER, _ACCESS = Panel("Server"), Panel("Access")
PARALLEL = 16
_SEVERAL = Panel("Several models")

_OF_SERVER = frozenset(
    {
        *("print_config", "host", "port", "drain", "api_key", "api_key_file", "ssl_cert_file"),
        *("ssl_key_file", "insecure", "allowed_hosts", "cors", "any_model", "ui", "has_metrics"),
        *("log_file", "quiet", "models_dir", "models_cache", "models_preset", "models_memory"),
        *("models_max", "models_autoload"),
    }
)
"""Options of the server as a whole, which no model has for itself."""

MODELS_OPTIONS: list[click.Parameter] = [
    _SEVERAL.option(
        "--models-dir",
        llama_env="MODELS_DIR",
        metavar="FOLDER",
        help="Serve all models in a folder, and in folders in it.",
    ),
    _SEVERAL.flag("--models-cache", help="Serve all models in Hugging Face's cache."),
    _SEVERAL.option(
        "--models-preset",
        llama_env="MODELS_PRESET",
        metavar="FILE",
        help="A file of models, in TOML, as FILE: options for all, and a table [models.NAME] for "
        "each.",
    ),
    _SEVERAL.option(
        "--models-memory",
        callback=byte_size_of,
        metavar="SIZE",
        help="The memory that all loaded models may take together, as localkv plan counts it, such "
        "as 12GiB. [default: what is free at the start]",
    ),
    _SEVERAL.option(
        "--models-max",
        llama_env="MODELS_MAX",
        type=Whole(0),
        default=0,
        help="Most models that are loaded at the same time; 0 for as many as memory has room for.",
    ),
    _SEVERAL.option(
        "--models-autoload/--no-models-autoload",
        llama_env="MODELS_AUTOLOAD",
        type=bool,
        default=True,
        help="Load a model when a request names it, or only when POST /models/load does. "
        "[default: autoload]",
    ),
    _SEVERAL.flag(
        "--load-on-startup", help="Load a model at the start, as the only model is always."
    ),
    _SEVERAL.option(
        "--sleep-idle-seconds",
        type=Whole(-1),
        metavar="SECONDS",
        default=-1,
        help="Unload a model after this time without a request, and load it with the next "
        "request; -1 for never.",
    ),
]

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
        help="Words about the model that /v1/models shows, with commas between them.",
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
        help="Tokens of all requests together that the cache holds. [default: four contexts, "
        "or what free memory has room for]",
    ),
    _SERVER.option(
        "--cache-size",
        callback=byte_size_of,
        metavar="SIZE",
        help="Bytes of the cache instead of tokens, such as 4GiB.",
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
    _ACCESS.option("--api-key-file", metavar="FILE", help="A file with keys, one a line."),
    _ACCESS.option(
        "--ssl-cert-file",
        llama_env="SSL_CERT_FILE",
        metavar="FILE",
        help="The certificate for https, in PEM.",
    ),
    _ACCESS.option(
        "--ssl-key-file",
        llama_env="SSL_KEY_FILE",
        metavar="FILE",
        help="The certificate's private key, in PEM.",
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


def _several(option: click.Parameter) -> click.Parameter:
    """An option of commands that load one model; of several, `-m` names each."""
    if option.name == "model":
        option.multiple, option.default = True, ()
        assert isinstance(option, click.Option)
        option.help = f"{option.help} Give it several times to serve several models."
    return option


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
    params=[
        Argument(
            ["file"],
            required=False,
            type=FILE,
            metavar="[FILE]",
            help="A file of models, in TOML. A word that ends in .gguf counts as -m.",
        ),
        *SERVER_OPTIONS,
        *MODELS_OPTIONS,
        *map(_several, loading_options()),
        *sampling_options(),
        *speculation_options(),
    ],
    callback=_run,
    help="Serve models over HTTP, to programs that speak OpenAI's API.",
    epilog="Every option can also be set as LOCALKV_<NAME> (LOCALKV_CTX_SIZE), where llama.cpp has "
    "a variable for it as LLAMA_ARG_<NAME>, or in the [serve] table of config.toml.",
)
