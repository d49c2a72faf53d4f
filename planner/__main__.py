"""Entry point of `gpipe-plan` and of `python -m planner`; it imports little, so that Ctrl-C is handled early."""

import fcntl
import gc
import io
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_MOMENT_S = 0.01


def main() -> NoReturn:
    """Run the console script; Ctrl-C ends it with one line and exit code 130, also while modules are imported."""
    signal.signal(signal.SIGINT, _leave)
    sys.unraisablehook = _once_more
    _keep_output_for_results()
    from planner.cli.main import run  # noqa: PLC0415 - takes time, in which people press Ctrl-C, too

    try:
        # From here on there may be something to put in order first.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run(sys.argv[1:])
        signal.signal(signal.SIGINT, _leave)
    except KeyboardInterrupt:
        _leave()
    if "torch" not in sys.modules:
        # All that is left goes with the process: the collector need not look at each of it once more. Beside torch it
        # has to: triton, which comes with some releases, complains at the end of what it finds left.
        gc.freeze()
    sys.exit(code)


def _keep_output_for_results() -> None:
    """Move standard output to another descriptor, so that output of libraries goes to standard error.

    It is not moved back: the C library writes the rest of its buffer only when the process ends.
    """
    if sys.stdout is not sys.__stdout__ or not isinstance(sys.stdout, io.TextIOWrapper):
        return  # closed, or put in place by a program that calls this one
    results = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)  # never 2, which may be closed
    elsewhere = os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else 2
    os.dup2(elsewhere, 1)
    before = sys.stdout
    sys.stdout = io.TextIOWrapper(
        os.fdopen(results, "wb"),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )


def _once_more(unraisable: "UnraisableHookArgs") -> None:
    # Python drops what is raised while an object is torn down, which torch's often are. Ctrl-C there comes once more,
    # a moment later: now it would be raised in here, and dropped, too.
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(_MOMENT_S, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


def _leave(*_: Any) -> NoReturn:
    # An exception would come out of whatever module is half imported, as anything.
    if sys.stderr is not None:
        os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
