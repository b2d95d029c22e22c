"""Runs the application and the engine until somebody ends them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import uvicorn

from localkv.errors import UsageError, printable
from localkv.server.access_log import AccessLog
from localkv.server.app import application
from localkv.server.connection import IDLE_SECONDS, Connection
from localkv.server.front import Front
from localkv.server.hosts import is_loopback
from localkv.server.settings import ServerSettings
from localkv.server.supervisor import Supervisor
from localkv.server.wire import Facts

OPEN_FILES = 4096
"""Connections and files that the process may have open, if the system allows that many."""
END_SECONDS = 2
"""How long answers have, once they are told that the engine is gone, to say so."""


@dataclass
class Ending:
    """How a server is ended: it begins to drain, and then somebody may be in a hurry."""

    begins: asyncio.Event = field(default_factory=asyncio.Event)
    hurries: asyncio.Event = field(default_factory=asyncio.Event)

    def signalled(self) -> None:
        """Ctrl-C or SIGTERM; the second one waits for nobody."""
        (self.hurries if self.begins.is_set() else self.begins).set()


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        UsageError: the address is taken, or is none of this machine's.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error)
        reason = reason.partition(" (while attempting")[0]  # which names the address once more
        raise UsageError(
            f"can't listen on {host}:{port}: {reason}", hint="choose another --port or --host"
        ) from None


def check_exposure(settings: ServerSettings, host: str, address: str) -> list[str]:
    """Refuse to let everybody in from other machines; warnings about what else they can see.

    Args:
        host: as the user named it.
        address: that it stands for.

    Raises:
        UsageError: there is no key, and nobody said that there need be none.
    """
    if is_loopback(address):
        return []
    if not settings.api_keys and not settings.is_insecure:
        raise UsageError(
            f"--host {host} lets other machines in, without a key",
            hint="set --api-key-file FILE, or --insecure if all who reach it may use it",
        )
    if settings.ssl_cert is None:
        return ["requests and keys of other machines are not encrypted (--ssl-cert-file)"]
    return []


def uvicorn_config(settings: ServerSettings, front: Front) -> uvicorn.Config:
    """uvicorn's settings, loaded.

    Raises:
        UsageError: the files for TLS can't be used.
    """
    # what clients send is none of the log's business, and errors are told elsewhere
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
    config = uvicorn.Config(
        application(front),
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        proxy_headers=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=END_SECONDS,
        ssl_keyfile=settings.ssl_key,
        ssl_certfile=settings.ssl_cert,
    )
    try:
        config.load()
    except (OSError, ValueError) as error:  # SSLError is an OSError
        files = " and ".join(
            printable(file) for file in (settings.ssl_cert, settings.ssl_key) if file
        )
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{files}: {reason}", hint="--ssl-cert-file and --ssl-key-file are files in PEM"
        ) from None
    return config


class _Uvicorn(uvicorn.Server):
    """Signals are the caller's."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


async def serve(
    settings: ServerSettings,
    *,
    say: Callable[[str], None],
    on_listening: Callable[[str], None],
    on_ready: Callable[[Facts], None],
    ending: Ending,
) -> None:
    """Serve until `ending` begins.

    Args:
        say: tells the user what happens, a line each.
        on_listening: is told the address.
        on_ready: is told once the model is loaded.

    Raises:
        LocalKVError: the address can't be had, or the engine can't be kept running.
    """
    _allow_open_files()
    _keep_turns_short()
    supervisor = Supervisor(settings.engine, say)
    log = None if settings.log_file is None else AccessLog(settings.log_file, say)
    front = Front(settings, supervisor, log)
    server = _Uvicorn(uvicorn_config(settings, front))
    with contextlib.ExitStack() as stack:
        sockets, addresses, warnings, port = [], [], [], settings.port
        for name in settings.hosts:
            sockets.append(stack.enter_context(listening(name, port)))
            host, port = sockets[-1].getsockname()[:2]
            warnings += check_exposure(settings, name, host)
            scheme = "http" if settings.ssl_cert is None else "https"
            addresses.append(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
        on_listening(" and ".join(addresses))
        for line in dict.fromkeys(warnings):
            say(f"warning: {line}")
        await _run(server, sockets, front, on_ready, ending)


async def _run(
    server: _Uvicorn,
    sockets: list[socket.socket],
    front: Front,
    on_ready: Callable[[Facts], None],
    ending: Ending,
) -> None:
    supervisor = front.supervisor
    serving = asyncio.create_task(server.serve(sockets=sockets))
    running = asyncio.create_task(supervisor.run(on_ready))
    loading = asyncio.create_task(front.load())
    stopping = asyncio.create_task(ending.begins.wait())
    try:
        await asyncio.wait({serving, running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done() and (error := running.exception()) is not None:
            raise error
        front.is_draining = True
        await _drained(server, front.settings.drain, ending.hurries)
    finally:
        await supervisor.stop()  # answers that are not complete say so
        server.should_exit = True
        server.force_exit = ending.hurries.is_set()
        with contextlib.suppress(Exception):
            await serving
        for task in (running, loading, stopping):
            task.cancel()
        if front.log is not None:
            front.log.close()


async def _drained(server: _Uvicorn, seconds: float, hurries: asyncio.Event) -> None:
    """Wait until all requests are answered, or nobody wants to wait any more."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while server.server_state.tasks and loop.time() < end and not hurries.is_set():
        await asyncio.sleep(0.02)


def _keep_turns_short() -> None:
    """Let no thread hold Python's lock for long, since the event loop needs it."""
    sys.setswitchinterval(0.001)
    gc.set_threshold(
        100_000, 50, 100
    )  # a body of 100,000 lists is no reason to look at all there is


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
