"""Machine code that the package carries: a ZIP file for each level of CPUs.

`kernels/cpu/build_kernels.py` writes the files when the package is built. A kernel is found by a
hash of its sources, parameters and level, so code of other sources is never found. What compiled it
doesn't matter: an object file needs nothing of its compiler.
"""

from __future__ import annotations

import functools
import io
import logging
import platform
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from localkv.kernels.cpu.jit.kernel_folder import write_kernel
from localkv.simd.cpu_features import CPU_LEVEL

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parents[1] / "compiled"


def archive_path(level: str = CPU_LEVEL) -> Path:
    """Where the kernels of a level are, for this system and architecture."""
    return FOLDER / f"{sys.platform}-{platform.machine().lower()}-{level}.zip"


@functools.cache
def _archive() -> zipfile.ZipFile | None:
    path = archive_path()
    try:
        return zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, zipfile.BadZipFile) as error:
        logger.warning("the kernels that the package carries can't be read: %s: %s", path, error)
        return None


@functools.cache
def carried_names() -> frozenset[str]:
    """The names of all kernels that the package carries for this CPU's level."""
    archive = _archive()
    return frozenset() if archive is None else frozenset(archive.namelist())


def carried(name: str) -> bytes | None:
    """A packed kernel; None if the package has none of this name, or it is damaged."""
    archive = _archive()
    if archive is None or name not in carried_names():
        return None
    try:
        return archive.read(name)
    except Exception as error:  # zlib and zipfile have many ways to say that data is damaged
        logger.warning("a kernel that the package carries is damaged: %s: %s", name, error)
        return None


def write_archive(path: Path, kernels: Mapping[str, bytes]) -> None:
    """Write packed kernels by name, at once.

    Raises:
        OSError: the file can't be written; the one that was there stays.
    """
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(kernels):
            info = zipfile.ZipInfo(name)  # without a time, so that equal kernels make equal files
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, kernels[name])
    path.parent.mkdir(exist_ok=True)
    write_kernel(path, file.getvalue())
    path.chmod(0o644)
