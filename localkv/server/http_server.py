"""Runs the application and the engine until somebody ends them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import uvicorn

from localkv.errors import UsageError
from localkv.server.app import application
from localkv.server.front import Front
from localkv.server.settings import ServerSettings
from localkv.server.supervisor import Supervisor
from localkv.server.wire import Facts


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        UsageError: the address is taken, or is none of this machine's.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"can't listen on {host}:{port}: {reason}", hint="choose another --port or --host"
        ) from None


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
    stop: asyncio.Event,
) -> None:
    """Serve until `stop` is set.

    Args:
        say: tells the user what happens, a line each.
        on_listening: is told the address.
        on_ready: is told once the model is loaded.

    Raises:
        LocalKVError: the address can't be had, or the engine can't be kept running.
    """
    sock = listening(settings.host, settings.port)
    supervisor = Supervisor(settings.engine, say)
    front = Front(settings, supervisor)
    config = uvicorn.Config(
        application(front),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=30,
    )
    server = _Uvicorn(config)
    host, port = sock.getsockname()[:2]
    on_listening(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    running = asyncio.create_task(supervisor.run(on_ready))
    loading = asyncio.create_task(front.load())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done() and (error := running.exception()) is not None:
            raise error
    finally:
        server.should_exit = True
        with contextlib.suppress(Exception):
            await serving
        await supervisor.stop()
        for task in (running, loading, stopping):
            task.cancel()
        sock.close()
