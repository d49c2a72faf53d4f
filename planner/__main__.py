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

_INTERRUPT_DELAY_S = 0.01


def main() -> NoReturn:
    """Run the console script; Ctrl-C ends it with one line and exit code 130, also while modules are imported."""
    signal.signal(signal.SIGINT, _exit_interrupted)
    sys.unraisablehook = _repeat_lost_interrupt
    _keep_output_for_results()
    from planner.cli.main import run  # noqa: PLC0415 - takes time, in which users may press Ctrl-C

    try:
        # Commands clean up after an exception, for example temporary files.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run(sys.argv[1:])
        signal.signal(signal.SIGINT, _exit_interrupted)
    except KeyboardInterrupt:
        _exit_interrupted()
    if "torch" not in sys.modules:
        # A last garbage collection would take a tenth of the time of `--help`. With torch it is needed: triton prints
        # warnings about objects that still exist at exit.
        gc.freeze()
    sys.exit(code)


def _keep_output_for_results() -> None:
    """Move standard output to another descriptor, so that output of libraries goes to standard error.

    It is not moved back: the C library writes the rest of its buffer only when the process ends.
    """
    if sys.stdout is not sys.__stdout__ or not isinstance(sys.stdout, io.TextIOWrapper):
        return  # stdout is closed, or was replaced by a calling program
    results = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)  # never 2, which may be closed
    os.dup2(os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else 2, 1)
    before = sys.stdout
    sys.stdout = io.TextIOWrapper(
        os.fdopen(results, "wb"),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )


def _repeat_lost_interrupt(unraisable: "UnraisableHookArgs") -> None:
    # Python ignores exceptions in destructors, which torch calls often. If this was a Ctrl-C, its signal is sent again.
    # This happens later, because Python would ignore an exception in this function, too.
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(_INTERRUPT_DELAY_S, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


def _exit_interrupted(*_: Any) -> NoReturn:
    # An exception could be caught, or replaced by another one, in a module that is being imported.
    if sys.stderr is not None:
        os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
