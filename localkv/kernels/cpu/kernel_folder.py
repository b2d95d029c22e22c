"""The folder of compiled kernels in the user's cache; nothing heavy is imported to find it."""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from pathlib import Path

import platformdirs

logger = logging.getLogger(__name__)


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
            reason = "" if is_ours_alone(folder) else "others may write to it"
    except OSError as error:
        reason = f"it can't be written: {error}"
    if reason:
        logger.warning("kernels are compiled at every start: %s is not used, %s", folder, reason)
        return None
    return folder


def is_ours_alone(folder: Path) -> bool:
    """Whether a folder is this user's and no other may write to it; so on Windows by default."""
    if os.name != "posix":
        return True
    info = folder.stat()
    return info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
