"""The program `localkv`, also `python -m localkv`.

Ctrl-C shows no traceback from here on. Until the command line is imported, and again once the
command is done, it ends the process as it ends any program: by the signal. What can be done without
is not imported before that is so.
"""

import os
import sys
from _signal import SIG_DFL, SIGINT, default_int_handler, getsignal, signal  # type: ignore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import NoReturn


def main() -> "NoReturn":
    """Run the command line of this process."""
    sys.excepthook = _show_uncaught
    interruptible = getsignal(SIGINT) is default_int_handler  # not so under nohup
    if interruptible:
        signal(SIGINT, SIG_DFL)
    import localkv.system.this_process  # noqa: F401  # some systems let it count from now only
    from localkv.cli import main as run_command_line
    from localkv.commands.process import INTERRUPTED, interrupt

    try:
        if interruptible:
            signal(SIGINT, interrupt)
        run_command_line()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        if interruptible:
            signal(SIGINT, SIG_DFL)


def _show_uncaught(
    kind: type[BaseException], error: BaseException, traceback: "TracebackType | None"
) -> None:
    """A second Ctrl-C may come while the first is dealt with; Python then ends by the signal.

    And there may be too little memory to import the code that reports it.
    """
    if issubclass(kind, MemoryError):
        os.write(2, b"error: out of memory\n")
    elif not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)


if __name__ == "__main__":
    main()
