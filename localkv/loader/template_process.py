"""Rendering a chat template in a process of its own, in which time and memory are limited.

A process is started for the first template and kept for the next ones, so that a turn of a chat
waits for no start. One that ran out of time or memory, or was interrupted, is ended and replaced.
"""

from __future__ import annotations

import atexit
import json
import marshal
import os
import selectors
import signal
import subprocess
import time
from contextlib import suppress
from typing import Any

from localkv.errors import ChatTemplateError, LocalKVError, UsageError, byte_size
from localkv.loader.template_child import LENGTH, MAX_MEMORY, READY
from localkv.system.python_child import child_command, start_child

RENDER_SECONDS = 5.0
"""How long a template may take; those of real models take milliseconds."""

START_SECONDS = 60.0
"""How long the process may take to start, on a machine that does much else."""

MAX_SOURCE = 1 << 20
"""Characters of a template. Those of real models have up to some 20,000."""

MAX_PROMPT, MAX_GROWTH = 1 << 20, 8
"""The most characters of a prompt, and the number added for each byte of the conversation."""

_HINT = "use another template (--chat-template-file)"


def rendered_apart(
    source: str, bos_token: str, eos_token: str, variables: dict[str, Any]
) -> list[tuple[str, bool]]:
    """The prompt in pieces, each with whether the template wrote it itself.

    Args:
        source: the Jinja program.
        bos_token, eos_token: texts of these tokens.
        variables: JSON values, `messages` among them.

    Raises:
        ChatTemplateError: the template is malformed or too long, fails or refuses the conversation,
            or takes too much time or memory.
        UsageError: the conversation is nested too deeply.
        LocalKVError: no process can be started.
    """
    if len(source) > MAX_SOURCE:
        raise ChatTemplateError(
            f"the chat template has {len(source):,} characters; at most {MAX_SOURCE:,} are allowed",
            hint=_HINT,
        )
    try:
        n_bytes = len(marshal.dumps(variables))
        request = {
            "template": (source, bos_token, eos_token),
            "variables": variables,
            "max_chars": MAX_PROMPT + MAX_GROWTH * n_bytes,
        }
        message = marshal.dumps(request)
    except ValueError:
        raise UsageError("the conversation is nested too deeply for a template") from None
    process = _taken()
    try:
        answer = _answer(process, message)
    except _EndedError:
        if not process.has_answered:
            raise
        process = _Process()  # the other may have ended while it waited
        answer = _answer(process, message)
    if "out_of_memory" in answer:
        process.end()
        raise ChatTemplateError(
            f"the chat template takes more than {byte_size(MAX_MEMORY)} of memory", hint=_HINT
        )
    _give_back(process)
    if "error" in answer:
        raise ChatTemplateError(answer["error"])
    return [(text, is_markup) for text, is_markup in answer["segments"]]


def _answer(process: _Process, message: bytes) -> dict[str, Any]:
    try:
        return process.answer(message)
    except BaseException:  # Ctrl-C, too: a later message would be the answer to this
        process.end()
        raise


def start_ahead() -> None:
    """Start the process now, so that the first template need not wait for it."""
    if not _idle:
        _give_back(_Process())


class _EndedError(ChatTemplateError):
    """The process ended over a template."""


class _Process:
    """A process that renders, one template at a time.

    Attributes:
        has_answered: it has rendered a template before.
    """

    def __init__(self) -> None:
        try:
            command = child_command("localkv.loader.template_child")
            self._child = start_child(command, stderr=subprocess.DEVNULL)
        except OSError as error:
            raise LocalKVError(
                f"the process that renders chat templates can't be started: {error.strerror}",
                hint="the limits on processes and memory (ulimit) may be too low",
            ) from error
        self._is_ready = self.has_answered = False

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    def answer(self, message: bytes) -> dict[str, Any]:
        """The child's answer.

        Raises:
            ChatTemplateError: it takes too long, or ends over it.
        """
        assert self._child.stdin is not None
        if not self._is_ready:
            if self._read(len(READY), START_SECONDS) != READY:
                raise LocalKVError("the process that renders chat templates does not start")
            self._is_ready = True
        try:
            self._child.stdin.write(LENGTH.pack(len(message)) + message)
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        deadline = time.monotonic() + RENDER_SECONDS
        (length,) = LENGTH.unpack(self._read(LENGTH.size, RENDER_SECONDS))
        answer: dict[str, Any] = json.loads(self._read(length, deadline - time.monotonic()))
        self.has_answered = True
        return answer

    def _read(self, n_bytes: int, seconds: float) -> bytes:
        """`n_bytes` of the child's output, if they come in time."""
        assert self._child.stdout is not None
        deadline = time.monotonic() + seconds
        data = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            while len(data) < n_bytes:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ChatTemplateError(
                        f"the chat template takes more than {RENDER_SECONDS:g} s", hint=_HINT
                    )
                more = os.read(self._child.stdout.fileno(), min(n_bytes - len(data), 1 << 20))
                if not more:
                    raise self._ended()
                data += more
        return bytes(data)

    def _ended(self) -> _EndedError:
        self.end()
        code = self._child.returncode
        how = f"exit code {code}"
        if code < 0:
            with suppress(ValueError):
                how = signal.Signals(-code).name
        return _EndedError(
            f"the chat template ended the process that renders it ({how})", hint=_HINT
        )

    def end(self) -> None:
        """End it at once."""
        self._child.kill()
        self._child.wait()
        self._close_pipes()

    def forget(self) -> None:
        """Leave it to the process that this one was forked from."""
        self._child.returncode = 0
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()


_idle: list[_Process] = []
"""A process that waits for the next template, if any."""


def _taken() -> _Process:
    """A process that is nobody else's: threads that render at the same time have one each."""
    while True:
        try:
            process = _idle.pop()
        except IndexError:
            return _Process()
        if process.is_alive:
            return process
        process.end()


def _give_back(process: _Process) -> None:
    if _idle:
        process.end()
    else:
        _idle.append(process)


def _end_idle() -> None:
    while _idle:
        _idle.pop().end()


def _forget_idle() -> None:
    while _idle:
        _idle.pop().forget()


atexit.register(_end_idle)
os.register_at_fork(after_in_child=_forget_idle)
