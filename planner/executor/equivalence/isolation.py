"""Run functions in forked processes, with one thread each and a time limit.

Changes of parameters, module-level variables and random generators do not affect the parent process. A forked process
prints nothing, except errors and tracebacks after `--debug`.
"""

import contextlib
import gc
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.core.errors import ModelError, PlannerError
from planner.device.machine import keep_freed_memory

_GRACE_S = 5


# The first use of fake tensors imports much of torch, which takes seconds. Import it here, not in every forked process.
with FakeTensorMode():
    torch.empty(0)


# Less than `planner.device.machine.LARGE_BYTES`, the largest size that glibc accepts, so that activations and pieces of
# a comparison are returned as well. With 4 MiB, glibc 2.36 left 180 MB of holes between aligned blocks.
_RETURNED_BYTES = 2**18
"""Size of the smallest freed blocks of memory that are returned to the system."""


def return_freed_blocks_to_system() -> None:
    """Make this process return large blocks of freed memory to the system, which saves memory but takes time."""
    keep_freed_memory(below_bytes=_RETURNED_BYTES)


class ChildError(Exception):
    """Error for a child process that ended without a result.

    Args:
        message: Error that the process raised, in one line, or the signal that ended the process.
        hint: Advice for the user; may be empty.
        is_user_error: True if the process raised a `ModelError`, whose message says what is wrong with the model.
        is_unexpected_error: True if the process raised an error other than a `PlannerError` or lack of memory.
    """

    def __init__(
        self, message: str, *, hint: str = "", is_user_error: bool = False, is_unexpected_error: bool = False
    ) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint
        self.is_user_error, self.is_unexpected_error = is_user_error, is_unexpected_error

    def as_model_error(self) -> ModelError:
        """Return a `ModelError` with the same message and hint."""
        return ModelError(self.message, hint=self.hint)


class ChildProcess:
    """Forked process that runs `work(connection)` for at most `limit_s` seconds, and sends the result to its parent.

    Before `work` returns, it may exchange messages over the connection.
    """

    def __init__(self, work: Callable[[Connection], Any], *, limit_s: float) -> None:
        self.connection, theirs = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning about threads: the child does not use this process's threads
            self._pid = os.fork()
        if self._pid == 0:
            run_and_exit(work, theirs, limit_s)
        theirs.close()
        self._limit_s = limit_s
        self._is_over = False
        self.is_done = False
        """True if the result of the process has been received."""

    def result(self, progress: Callable[[str], None] = lambda _text: None) -> Any:
        """Wait for the result of the process and return it. Until then, call `progress` with each progress message.

        Raises:
            ChildError: The process raised an error, or ended without a result.
        """
        try:
            kind, value = self.connection.recv()
            while kind == "progress":
                progress(value)
                kind, value = self.connection.recv()
        except (EOFError, OSError):
            raise ChildError(self._ended_by()) from None
        self.is_done = True
        if kind == "error":
            raise ChildError(**value)
        return value

    def end(self) -> None:
        """End the process. It does not exit by itself after it has sent its result."""
        if self._is_over:
            return
        self._is_over = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self.connection.close()

    def _ended_by(self) -> str:
        self._is_over = True
        self.connection.close()
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                if number == signal.SIGALRM:
                    return f"it did not finish within {self._limit_s:.0f} s"
                how = signal.Signals(number).name if number else f"exit code {os.waitstatus_to_exitcode(status)}"
                return f"its process was ended by {how}"
            time.sleep(0.01)
        return "its process closed the connection"


def run_in_child(work: Callable[[], Any], *, limit_s: float) -> Any:
    """Return the result of `work()`, run in a forked process for at most `limit_s` seconds.

    Raises:
        ChildError: The process raised an error, or ended without a result.
    """
    child = ChildProcess(lambda _connection: work(), limit_s=limit_s)
    try:
        return child.result()
    finally:
        child.end()


def _child_error_arguments(error: BaseException) -> dict[str, Any]:
    if isinstance(error, ChildError):
        return vars(error)
    first = str(error).partition("\n")[0].partition(" Hint: ")[0]
    if isinstance(error, PlannerError):
        return {"message": first, "hint": error.hint, "is_user_error": isinstance(error, ModelError)}
    is_unexpected_error = not isinstance(error, MemoryError) and "allocate memory" not in first
    return {"message": f"{type(error).__name__}: {first}", "is_unexpected_error": is_unexpected_error}


def run_and_exit(work: Callable[[Connection], Any], connection: Connection, limit_s: float) -> NoReturn:
    """Run `work(connection)` in this process, send its result or error to the parent process, and exit.

    Args:
        work: Function to run.
        connection: Connection to the parent process.
        limit_s: Seconds after which this process is ended.
    """
    code, is_debug = 1, "--debug" in sys.argv
    try:
        for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(max(1, round(limit_s)))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1) if is_debug else (0, 1, 2):
            os.dup2(nowhere, stream)
        gc.freeze()  # a garbage collection of inherited objects would copy all of their memory
        # Threads do not survive a fork, so a pool of threads would wait for its threads forever.
        torch.set_num_threads(1)
        keep_freed_memory()
        connection.send(("result", work(connection)))
        # Other processes may still read messages of this one, so wait until the parent ends it.
        connection.poll(None)
        code = 0
    except BaseException as error:  # any error of the user's code is reported
        with contextlib.suppress(OSError):
            if is_debug:
                os.write(2, traceback.format_exc().encode())
            connection.send(("error", _child_error_arguments(error)))
    finally:
        os._exit(code)
