"""llama-server's `POST /slots/ID?action=save|restore|erase`: a text with its rows, in a file."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localkv.errors import LocalKVError
from localkv.server import limits
from localkv.server.failures import RequestError, as_request_error, unsupported
from localkv.server.front import Front
from localkv.server.json_answer import json_response
from localkv.server.json_body import received
from localkv.server.wire import SlotAction

ACTIONS = ("save", "restore", "erase")
FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class StateBody(msgspec.Struct):
    """The body of a request to save or restore."""

    filename: limits.Name = ""


async def slot_action(front: Front, request: Request) -> Response:
    """POST /slots/ID: save the text that a slot had last to a file, take one back, or forget it."""
    folder, facts = front.settings.state_dir, front.facts
    if folder is None:
        raise unsupported("saving slots", "start the server with --slot-save-path FOLDER")
    if front.settings.cache_per_key:
        raise unsupported("saving slots with --cache-per-key", "leave one of them out")
    action = request.query_params.get("action", "")
    if action not in ACTIONS:
        raise RequestError(400, "Invalid action", f"use {', '.join(ACTIONS)}")
    text = request.path_params["id"]
    place = int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else -1
    if not 0 <= place < facts.n_parallel:
        raise RequestError(400, "Invalid slot ID", f"slots are 0 to {facts.n_parallel - 1}")
    name = "" if action == "erase" else (await received(front, request, StateBody)).filename
    path = "" if action == "erase" else str(_path(folder, name, is_there=action == "restore"))
    try:
        async with asyncio.timeout(front.settings.timeout):
            done = await front.supervisor.client.act(SlotAction(0, action, place, path))
    except TimeoutError:
        seconds = front.settings.timeout
        raise RequestError(504, f"the request took more than {seconds:g} s") from None
    except LocalKVError as error:
        raise _without_folder(as_request_error(error), folder) from None
    answers: dict[str, dict[str, Any]] = {
        "save": {"n_saved": done.n_tokens, "n_written": done.n_bytes},
        "restore": {"n_restored": done.n_tokens, "n_read": done.n_bytes},
        "erase": {"n_erased": done.n_tokens},
    }
    answer = {"id_slot": place, **answers[action]}
    if name:
        answer |= {"filename": name, "timings": {f"{action}_ms": done.ms}}
    return json_response(answer)


def _path(folder: str, name: str, *, is_there: bool) -> Path:
    """A file of the folder for states.

    Raises:
        RequestError: the name is none, or a link, which may lead elsewhere.
    """
    if not FILE_NAME.fullmatch(name) or not name.strip("."):
        raise RequestError(400, "Invalid filename", "up to 128 letters, digits, dots, _ and -")
    path = Path(folder) / name
    if path.is_symlink() or (is_there and not path.is_file()):
        raise RequestError(400, f"there is no state {name!r}")
    return path


def _without_folder(error: RequestError, folder: str) -> RequestError:
    """Copy an error, without the server's paths in its message."""
    message = error.message.replace(folder.rstrip(os.sep) + os.sep, "")
    return RequestError(error.status, message, error.hint, headers=error.headers)
