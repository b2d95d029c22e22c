"""Refusals of the system: memory, threads, other processes. In words for the user.

Libraries report them in many ways, and some end the process, so every limit that is known in
advance is checked in advance.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator

from localkv.errors import LocalKVError, byte_size

LEAST_ADDRESS_SPACE = 400 << 20
"""Bytes that a process must still be able to map to load libraries, compile kernels and run a small
model. With less, LLVM may end the process while it compiles; 450 MB in all were enough, 400 were
not."""

FEW_PROCESSES = 1024
"""A limit on processes and threads below this is one that someone set."""

_NO_MEMORY = (
    "failed to map segment",
    "cannot allocate memory",
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "unable to mmap",
)
_NO_THREAD = ("can't start new thread", "thread creation failed", "pthread_create")


def address_space() -> tuple[int, int] | None:
    """The bytes that this process may map in all, and those that are left; None without a limit."""
    if sys.platform == "win32":
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return limit, limit
    return limit, max(0, limit - taken)


def before_model() -> None:
    """What every command does before it loads libraries to run a model.

    Raises:
        LocalKVError: a limit leaves so little memory that one of them would end the process.
    """
    # torch's threads, which spin while they wait, starve each other as soon as another process
    # wants a core
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    space = address_space()
    if space is not None and space[1] < LEAST_ADDRESS_SPACE:
        raise LocalKVError(
            f"this process may map {byte_size(space[0])} of memory (ulimit -v), of which "
            f"{byte_size(space[1])} are left; running a model takes at least "
            f"{byte_size(LEAST_ADDRESS_SPACE)}",
            hint="raise the limit: ulimit -v unlimited",
        )


def spare_threads() -> None:
    """Keep NumPy's library from starting threads where few are allowed.

    It starts one per core when it is loaded, and ends the process if it can't; nothing here is
    computed with it. To be called before NumPy is imported.
    """
    if sys.platform == "win32":
        return
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit != resource.RLIM_INFINITY and limit < FEW_PROCESSES:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def exhausted(error: BaseException) -> LocalKVError | None:
    """The error for the user, if another error comes from a refusal of the system."""
    for cause in _causes(error):
        text = str(cause).lower()
        if isinstance(cause, LocalKVError):
            return None
        if getattr(cause, "errno", None) == errno.EAGAIN or any(map(text.__contains__, _NO_THREAD)):
            return LocalKVError(
                "the system allows no further threads or processes",
                hint="end others, or raise the limit (ulimit -u); -t 1 needs the fewest",
            )
        if (
            isinstance(cause, MemoryError)
            or getattr(cause, "errno", None) == errno.ENOMEM
            or any(map(text.__contains__, _NO_MEMORY))
        ):
            return _out_of_memory()
    if address_space() is not None and isinstance(error, ImportError | SystemError):
        return _out_of_memory()  # Python and libraries forget why an import failed
    return None


def _out_of_memory() -> LocalKVError:
    smaller = "use a smaller context (-c), batch (-ub) or model"
    space = address_space()
    if space is None:
        return LocalKVError("out of memory", hint=smaller)
    return LocalKVError(
        f"out of memory: this process may map {byte_size(space[0])} (ulimit -v)",
        hint=f"raise the limit, or {smaller}",
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__
