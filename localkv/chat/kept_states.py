"""`KeptStates`: what sessions' models have evaluated, in a file each, for the next time."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


class KeptStates:
    """States of sessions (docs/states.md), beside the file of the sessions.

    Args:
        sessions: the file of the sessions.
    """

    def __init__(self, sessions: Path) -> None:
        self.folder = sessions.with_name(f"{sessions.name}.states")

    def path(self, session_id: int) -> Path:
        """Where a session's state is, or is to be."""
        return self.folder / f"{session_id}.safetensors"

    def prepared(self, session_id: int) -> Path:
        """The same, in a folder that is there and that only the user may read.

        Raises:
            OSError: it can't be made.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.path(session_id)

    def found(self, session_id: int | None) -> Path | None:
        """Where a session's state is, if there is one."""
        path = None if session_id is None else self.path(session_id)
        return path if path is not None and path.is_file() else None

    def forget(self, session_id: int) -> None:
        """A session was deleted."""
        with suppress(OSError):
            self.path(session_id).unlink(missing_ok=True)
