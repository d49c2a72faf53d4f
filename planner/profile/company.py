"""Processes that run the model while its layers are timed, as the other stages of a plan do on the same machine.

Cores of one machine share caches and the way to memory: beside one busy neighbour the layers of a Transformer took 7 %
longer than by themselves, those of an AmoebaNet 2 % (docs/measurements/verify.md).
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from planner.core.errors import MeasurementError, UsageError

_LOOK_S = 1.0
"""How often a process that waits looks whether it still has somebody to wait for."""


class Company:
    """Who else runs while layers are timed: nobody."""

    def begin(self) -> None:
        """Called when timing begins."""

    def goes_on(self) -> bool:
        """Whether timing goes on for the sake of another process, whatever was measured."""
        return False


class _Guest(Company):
    """Times its layers for as long as there is the process that it runs beside."""

    def __init__(self, host: Connection, host_pid: int) -> None:
        self._host, self._host_pid = host, host_pid
        self._is_known = False

    def goes_on(self) -> bool:
        if not self._is_known:
            self._host.send_bytes(b"timing")
            self._is_known = True
        self._leave_if_alone()
        return True

    def wait(self) -> None:
        """Until it is told to begin. The way to the host has no end as long as this process itself has both."""
        while not self._host.poll(_LOOK_S):
            self._leave_if_alone()
        self._host.recv_bytes()

    def _leave_if_alone(self) -> None:
        if os.getppid() != self._host_pid:
            raise SystemExit


@contextmanager
def neighbours(number: int, profile: Callable[[Company], Any]) -> Iterator[Company]:
    """So many processes, each of which profiles the same model without end, from `begin` until the context ends.

    They are forked at once, for after a backward of its parent autograd does not run in a fork.

    Args:
        number: How many.
        profile: Profiles the model, in the company that it is given.

    Raises:
        UsageError: The system cannot fork.
    """
    if not number:
        yield Company()
        return
    if "fork" not in multiprocessing.get_all_start_methods():
        raise UsageError(f"`--beside {number}` needs a system that forks processes, such as Linux")
    host = _Host([_Neighbour(profile) for _ in range(number)])
    try:
        yield host
    finally:
        host.end()


class _Neighbour:
    """Another process, and the way to it."""

    def __init__(self, profile: Callable[[Company], Any]) -> None:
        fork = multiprocessing.get_context("fork")
        self.way, there = fork.Pipe()
        self.process = fork.Process(target=_run, args=(there, os.getpid(), profile), daemon=True)
        self.process.start()
        there.close()

    def ended(self) -> MeasurementError:
        """What to say when it did."""
        return MeasurementError(
            f"a process that was to run the model beside this one ended (exit code {self.process.exitcode})",
            hint="profile first of all in a process of its own, for behind a backward of this one it could not run, "
            "and mind that it takes as much memory as the profile itself",
        )


class _Host(Company):
    """The process that is not timed in vain."""

    def __init__(self, guests: Sequence[_Neighbour]) -> None:
        self._guests = guests

    def begin(self) -> None:
        """Has the others begin, and waits until each times its layers.

        Raises:
            MeasurementError: One of them ended.
        """
        for guest in self._guests:
            guest.way.send_bytes(b"begin")
        for guest in self._guests:
            try:
                guest.way.recv_bytes()
            except EOFError:
                guest.process.join()
                raise guest.ended() from None

    def goes_on(self) -> bool:
        """Not for the others' sake, who must still be there: what is timed alone is not what was asked for.

        Raises:
            MeasurementError: One of them ended.
        """
        for guest in self._guests:
            if not guest.process.is_alive():
                raise guest.ended()
        return False

    def end(self) -> None:
        """Ends the others."""
        for guest in self._guests:
            guest.process.kill()
            guest.process.join()
            guest.way.close()


def _run(host: Connection, host_pid: int, profile: Callable[[Company], Any]) -> None:
    """Waits until it is told to begin; what it says is nobody's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        sys.stdout = sys.stderr = nowhere
        guest = _Guest(host, host_pid)
        guest.wait()
        profile(guest)
