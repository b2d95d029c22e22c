"""`localkv chat`: a conversation on the whole terminal. The model is loaded in a child process."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from localkv.cache.profile import read_kv_scales, require_scales
from localkv.commands.generation_options import (
    chat_arguments,
    chat_options,
    length_options,
    sampling_options,
    sampling_params,
    system_options,
    system_text,
    template_options,
    template_text,
)
from localkv.commands.loading_options import (
    asked_types,
    loading_arguments,
    loading_options,
    profile_arguments,
    speculation_arguments,
    speculation_options,
)
from localkv.commands.model_file import model_file, named_or_shipped
from localkv.commands.options import Panel, escape_option, model_options, say_preset
from localkv.commands.output import is_terminal, note
from localkv.commands.parsing import Choice, Command
from localkv.commands.texts import unescape
from localkv.errors import UsageError, counted, printable
from localkv.system.processor import usable_cores
from localkv.system.threads import default_threads

if TYPE_CHECKING:
    from localkv.chat.engine import EngineOptions

_CHAT = Panel("Chat")


_CHAT_OPTIONS: list[click.Parameter] = [
    *system_options(_CHAT, "conversation"),
    escape_option(_CHAT, "-sys, --prefill, -r and --dry-sequence-breaker"),
    *template_options(_CHAT),
    *chat_options(_CHAT),
    _CHAT.option(
        "--server",
        metavar="URL",
        help="Talk with the model of a server that speaks OpenAI's API, such as localkv serve, "
        "instead of one that is loaded here. #NAME at its end chooses one of several models.",
    ),
    _CHAT.option(
        "--api-key", llama_env="API_KEY", metavar="KEY", help="The key that the server wants."
    ),
    _CHAT.option(
        "--audit",
        type=Choice(["auto"]),
        metavar="auto",
        help="Find out what the packed cache has changed in each answer, as /audit does, "
        "while nobody presses a key.",
    ),
    _CHAT.flag(
        "--continue",
        help="Go on with the newest session, its settings, and its context if that was larger.",
    ),
    _CHAT.flag(
        "--keep-state",
        help="Keep what the model has evaluated of each session in a file beside the sessions, and "
        "go on from there when it is opened again.",
    ),
    _CHAT.flag(
        "--exact",
        help="Read each answer again as part of the next prompt, so that on a CPU no answer "
        "depends on the content of the cache. Otherwise it stays there as it was written.",
    ),
    _CHAT.option(
        "--sessions",
        metavar="FILE",
        help="Where sessions are kept. [default: chats.sqlite3 in the platform's data folder]",
    ),
    _CHAT.flag(
        "--repair",
        help="Make a new file of sessions from everything that can be read in a damaged one, which "
        "is kept.",
    ),
]


def chat_threads() -> int:
    """One for each physical core, as everywhere, but one CPU is left for the screen."""
    return max(1, min(default_threads(), usable_cores() - 1))


def _run(
    *,
    escape: bool,
    sessions: str | None,
    repair: bool,
    server: str | None,
    audit: str | None,
    api_key: str | None,
    n_predict: int,
    stop: tuple[str, ...],
    ignore_eos: bool,
    **values: Any,
) -> int:
    """Run the chat; returns the exit code."""
    if repair:
        return _repair(sessions)
    if not (is_terminal(sys.stdin) and is_terminal(sys.stdout)):
        raise UsageError(
            "chat needs a terminal", hint="localkv complete --chat answers one prompt in a pipe"
        )
    if not is_terminal(sys.stderr):
        raise UsageError(
            "chat draws on stderr, which is no terminal", hint="leave out what redirects it (2>)"
        )
    if server and audit:
        raise UsageError(
            "--audit needs the model's cache, which a server keeps",
            hint="load the model here, without --server",
        )
    if server:
        _check_server_alone()
    params = sampling_params(values, escape=escape)
    template_options = chat_arguments(values, escape=escape)
    system_prompt, template = system_text(values, escape=escape), template_text(values)
    budget, effort = values["reasoning_budget"], template_options["reasoning_effort"]
    if effort == "none":
        budget = 0
    elif effort is not None:
        template_options["template_kwargs"].setdefault("reasoning_effort", effort)
    if values["kv_profile"] is None:
        require_scales(asked_types(values), values["kv_scales"] is not None)
    if values["kv_scales"] is not None:
        read_kv_scales(values["kv_scales"])
    model = server or _local_model(values)
    from localkv.chat.engine import EngineOptions
    from localkv.chat.session import ChatSession
    from localkv.chat.store import Store, default_path
    from localkv.engine_process.client import EngineProcess
    from localkv.tui.app import ChatApp
    from localkv.tui.chat_screen import ChatScreen

    profile = {} if server else profile_arguments(values, Path(model))
    if "kv_bits" not in profile:
        say_preset(values)
    arguments = loading_arguments(values) | profile | speculation_arguments(values)
    if arguments["n_threads"] is None and arguments["cpus"] is None:
        arguments["n_threads"] = chat_threads()
    arguments["exact"] = values["exact"]
    from localkv.chat.engine import ChatEngine
    from localkv.chat.model_choice import Models
    from localkv.chat.server_engine import ServerEngine, is_url
    from localkv.chat.store import KeptStates

    def engine(options: EngineOptions) -> ChatEngine:
        if is_url(options.model):
            return ServerEngine(options.model, api_key)
        return EngineProcess(options)

    with closing(Store(sessions or default_path())) as store:
        session = ChatSession(
            store,
            model=model,
            params=params,
            system_prompt=system_prompt or "",
            max_tokens=n_predict if n_predict >= 0 else None,
            stop=tuple(map(unescape, stop)) if escape else stop,
            ignore_eos=ignore_eos,
            think=values["think"],
            reasoning_budget=budget,
            prefill=template_options["prefill"],
            template_kwargs=template_options["template_kwargs"],
            tools=template_options["tools"],
        )
        if values["continue"] and (found := store.sessions()):
            session = session.resumed(found[0].id)
        thinking = {} if values["think"] is None else {"enable_thinking": values["think"]}
        options = EngineOptions(
            model,
            arguments,
            template,
            variables={**template_options["template_kwargs"], **thinking},
            uses=[name for name in ("tools", "reasoning_budget") if values[name] is not None],
        )
        states = KeptStates(Path(sessions or default_path())) if values["keep_state"] else None
        grown, models = None, Models(api_key)
        if not server:
            grown = models.with_context(options, session.cache, names_types=_names_types())
        app = ChatApp(
            ChatScreen(
                session,
                grown or options,
                engine,
                models,
                states=states,
                audits=audit is not None,
                otherwise=options if grown else None,
                opening_note=_context_in_words(grown) if grown else "",
            )
        )
        app.run()
    return app.return_code or 0


def _check_server_alone() -> None:
    """Refuse a model together with a server, which has its own.

    Raises:
        UsageError: names the option.
    """
    ctx = click.get_current_context()
    for param in model_options():
        if ctx.get_parameter_source(param.name or "") == ParameterSource.COMMANDLINE:
            raise UsageError(
                f"--server has a model of its own, so {param.opts[0]} has no effect",
                hint="leave one of them out",
            )


def _names_types() -> bool:
    """Whether the user chooses types of the cache, by whatever option."""
    ctx = click.get_current_context()
    names = (f"cache_type_{side}{group}" for group in ("", "_swa") for side in "kv")
    options = (*names, "preset", "kv_profile")
    return any(ctx.get_parameter_source(name) != ParameterSource.DEFAULT for name in options)


def _context_in_words(options: EngineOptions) -> str:
    """The context that a session is opened with again."""
    arguments = options.arguments
    types = [arguments.get(f"cache_type_{side}") for side in "kv"]
    named = f" (K {types[0]}, V {types[1]})" if all(types) else ""
    n_ctx = f"{arguments['n_ctx']:,}"
    return f"The context of this session holds {n_ctx} tokens{named}, as before; -c chooses another"


def _local_model(values: dict[str, Any]) -> str:
    """The file of the model; errors are reported, and a missing one is fetched, before the screen
    opens."""
    if unnamed := named_or_shipped(values):
        note(unnamed)
    model = str(model_file(values))
    if not Path(model).is_file():
        from localkv.loader.gguf_file import open_gguf

        open_gguf(model)
    return model


def _repair(sessions: str | None) -> int:
    """Report the sessions that were saved; returns the exit code."""
    from localkv.chat.database import default_path
    from localkv.chat.repair import repair

    path = Path(sessions or default_path())
    done = repair(path)
    saved = f"{counted(done.n_sessions, 'session')} with {counted(done.n_messages, 'message')}"
    if done.kept is None:
        click.echo(f"{printable(path)} is sound, nothing was changed: {saved}")
        return 0
    click.echo(f"{printable(path)} was damaged, and is kept as {printable(done.kept)}")
    click.echo(f"saved: {saved}")
    click.echo(f"lost: {counted(done.n_lost, 'message')} that are known of")
    click.echo(f"replaced: {counted(done.n_changed, 'value')} that made no sense")
    return 0


chat = Command(
    "chat",
    examples=[
        ("Talk with a model in a file", "localkv chat -m model.gguf"),
        (
            "Or with one from Hugging Face, which is fetched once",
            "localkv chat -hf ORG/REPO:Q4_K_M",
        ),
        (
            "A longer context in the same memory: K in 8 bits, V in 4",
            "localkv chat -m model.gguf -c 32768 -ctk q8_0 -ctv q4_0",
        ),
        ("Go on with the last conversation", "localkv chat -m model.gguf --continue"),
    ],
    essentials="-sys --think --continue -m -hf -c -ctk -ctv --preset -t -n --temp -s",
    params=[
        *_CHAT_OPTIONS,
        *loading_options(default_threads="one per core, but a CPU is left free"),
        *length_options(),
        *sampling_options(),
        *speculation_options(),
    ],
    callback=_run,
    help="Talk with a model, on the whole terminal.\n\n"
    "Sessions are kept and can be resumed. F1 shows all keys, / lists commands.",
    epilog="Every option can also be set as LOCALKV_<NAME> (LOCALKV_CTX_SIZE), where llama.cpp has "
    "a variable for it as LLAMA_ARG_<NAME>, or in the [chat] table of config.toml.",
)
