"""A model file mapped into memory, which must stay as it is for as long as it is used."""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from localkv.errors import ModelFileError, printable
from localkv.system.bus_errors import watch


class IncompleteFileError(ModelFileError):
    """A file ends before the data that it announces."""


@dataclass(frozen=True, eq=False)
class MappedFile:
    """The bytes of a file that was opened.

    Attributes:
        path: where it was found.
        data: its bytes.
        device, inode: which file it was.
        modified: when it had been written to last, in nanoseconds.
    """

    path: Path
    data: mmap.mmap
    device: int
    inode: int
    modified: int

    def check_unchanged(self) -> None:
        """Refuse a file that was shortened or written to since it was opened.

        Another file that took its place under the same name, or that it was removed, does no harm:
        the mapping keeps the opened file.

        Raises:
            ModelFileError: it was.
        """
        changed = self.data.size() != len(self.data)
        if not changed:
            try:
                now = os.stat(self.path)
            except OSError:
                return
            same = (now.st_dev, now.st_ino) == (self.device, self.inode)
            changed = same and now.st_mtime_ns != self.modified
        if changed:
            raise self._changed()

    def check_is_same(self, now: os.stat_result) -> None:
        """Refuse to read from a file that is not the one that was opened, as it was then.

        Raises:
            ModelFileError: it is another, or was written to.
        """
        found = (now.st_dev, now.st_ino, now.st_mtime_ns, now.st_size)
        if found != (self.device, self.inode, self.modified, len(self.data)):
            raise self._changed()

    def _changed(self) -> ModelFileError:
        return ModelFileError(
            f"{printable(self.path)}: the file was changed while it was in use",
            hint="start again; a new file that is renamed to the old name does no harm",
        )


def map_file(path: Path) -> MappedFile:
    """Open a file and map all of it.

    Raises:
        ModelFileError: it can't be read, is empty, or is no regular file.
    """
    name = printable(path)
    try:
        # Before opening: a named pipe would block.
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise ModelFileError(f"{name}: is a directory, not a model file")
        if not stat.S_ISREG(mode):
            raise ModelFileError(f"{name}: not a regular file")
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            if info.st_size == 0:
                raise IncompleteFileError(f"{name}: the file is empty")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(f"{name}: no such file") from None
    except OSError as error:
        raise ModelFileError(f"{name}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the path
        raise ModelFileError(f"{name}: cannot be read: {error}") from None
    watch(data, name)
    return MappedFile(path, data, info.st_dev, info.st_ino, info.st_mtime_ns)
