"""The folder of compiled kernels in the user's cache; nothing heavy is imported to find it."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import platformdirs

logger = logging.getLogger(__name__)

DAY = 86400
KEPT_DAYS = 90
"""How long a kernel is kept that no process takes: another version's, CPU's or model's."""
MOST_BYTES = 1 << 26
"""A kernel has some 100 KiB."""
MOST_KEPT = 1 << 30
"""Bytes of all of them."""
LOOKED = "looked"
"""A file whose time says when unused kernels were last looked for."""


def cache_folder() -> Path:
    return Path(platformdirs.user_cache_dir("localkv")) / "kernels"


@functools.cache
def usable_folder() -> Path | None:
    """The folder of compiled kernels, or None (said once) if it can't be used.

    What lies there is run. So nobody else may write to it.
    """
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            reason = "" if is_ours_alone(folder.stat()) else "others may write to it"
    except OSError as error:
        reason = f"it can't be written: {error}"
    if reason:
        logger.warning("kernels are compiled at every start: %s is not used, %s", folder, reason)
        return None
    return folder


def is_ours_alone(info: os.stat_result) -> bool:
    """Whether a file or folder is this user's and no other may write to it; so on Windows by
    default."""
    if os.name != "posix":
        return True
    return info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _opened(path: str, flags: int) -> int:
    # of a pipe, opening alone would wait for somebody to write to it
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_kernel(path: Path) -> bytes:
    """The bytes of a file that can be one of ours.

    Raises:
        OSError: there is none, it can't be read, or it is of another kind, owner or size.
    """
    with open(path, "rb", opener=_opened) as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_size > MOST_BYTES or not is_ours_alone(info):
            raise OSError(f"{path} is no file that only we could write")
        return file.read()


def write_kernel(path: Path, data: bytes) -> None:
    """Put a file in place of whatever is there, at once.

    Raises:
        OSError: it can't be written; nothing is left over.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def mark_used(path: Path) -> None:
    """Let the time of a file say when it was last taken, to a day."""
    with suppress(OSError):  # another process removed it, or it can only be read
        if path.stat().st_mtime < time.time() - DAY:
            os.utime(path)


def remove_unused(folder: Path, most_bytes: int = MOST_KEPT) -> None:
    """Remove kernels that were not taken for KEPT_DAYS, and what interrupted processes left.

    Then it removes the ones that were not taken for the longest time, until the rest has
    `most_bytes` at most.

    It looks at every file, so it does nothing within a day of the last time. A process that is
    about to take one of them compiles it again, as if it had never been there.
    """
    now, looked = time.time(), folder / LOOKED
    with suppress(OSError):
        if abs(now - looked.stat().st_mtime) < DAY:
            return
    with suppress(OSError):
        looked.write_bytes(b"")
    kept, n_bytes = list[tuple[float, int, str]](), 0
    with os.scandir(folder) as entries:
        for entry in entries:
            days = 1 if entry.name.endswith(".tmp") else KEPT_DAYS
            if days == KEPT_DAYS and not entry.name.startswith("localkv_"):
                continue
            with suppress(OSError):  # another process was faster, or holds it open on Windows
                info = entry.stat(follow_symlinks=False)
                if info.st_mtime < now - days * DAY:
                    os.unlink(entry.path)
                else:
                    kept.append((info.st_mtime, info.st_size, entry.path))
                    n_bytes += info.st_size
    for _, size, path in sorted(kept):
        if n_bytes <= most_bytes:
            return
        with suppress(OSError):
            os.unlink(path)
        n_bytes -= size
