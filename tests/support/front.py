"""A server's front in the test's process, without an engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any

import uvicorn

from localkv.chat.engine import EngineOptions
from localkv.server.front import Front
from localkv.server.http_server import listening, uvicorn_config
from localkv.server.models import Models
from localkv.server.settings import ModelSettings, ServerSettings


def models_of(**settings: Any) -> Models:
    """A server's one model, whose engine is not started.

    Args:
        settings: of the server, or of the model.
    """
    names = {field.name for field in fields(ServerSettings)}
    of_server = {name: value for name, value in settings.items() if name in names}
    of_model = {name: value for name, value in settings.items() if name not in names}
    model = ModelSettings(EngineOptions("none.gguf"), "tales", **of_model)
    return Models(ServerSettings((model,), **of_server))


def front_of(**settings: Any) -> Front:
    """The front of such a model."""
    return models_of(**settings).first.front


@contextlib.asynccontextmanager
async def served(models: Models, app: Any = None) -> AsyncIterator[int]:
    """The port at which their application, or another one, answers."""
    config = uvicorn_config(models)
    if app is not None:
        config.loaded_app = app
    config.timeout_graceful_shutdown = 0
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    sock = listening("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:
        await asyncio.sleep(0.001)
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await serving


async def said(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """All that a server answers to bytes until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
