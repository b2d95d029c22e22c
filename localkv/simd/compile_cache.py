"""Whether Numba can keep compiled code: beside the package, or in the user's cache folder.

Numba itself refuses to compile a function that is to be cached where it finds no folder to write.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import platformdirs


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _can_cache() -> bool:
    beside = Path(__file__).parents[1] / "kernels" / "__pycache__"
    if _is_writable(beside) or _is_writable(Path(platformdirs.user_cache_dir("numba"))):
        return True
    logging.getLogger("localkv").warning(
        "compiled kernels can't be kept: neither %s nor the user's cache folder can be written",
        beside,
    )
    return False


CAN_CACHE = _can_cache()
