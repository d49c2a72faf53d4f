"""Signal handlers of a process that trains, which its child processes do not keep.

A forked process inherits Python's handlers and the descriptor that wakes the watch. Without a reset, a SIGTERM to a
child, with which `multiprocessing.Pool` ends its workers, would be written to the descriptor and read by the parent.
"""

import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType

_Handler = Callable[[int, FrameType | None], None]


class SignalHandlers:
    """Handler for several signals, and a non-blocking descriptor to which their numbers are written."""

    def __init__(self, numbers: Sequence[signal.Signals], handler: _Handler, wakeup_fd: int) -> None:
        self._woken_before = signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
        self._handled_before = {number: signal.signal(number, handler) for number in numbers}
        _installed.append(self)

    def restore(self) -> None:
        """Install the previous handlers and the previous descriptor."""
        _installed.remove(self)
        for number, handler in self._handled_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._woken_before)


_installed: list[SignalHandlers] = []


def _reset_in_child() -> None:
    while _installed:
        _installed[-1].restore()
    signal.set_wakeup_fd(-1)  # the descriptor from before is the parent's, too


os.register_at_fork(after_in_child=_reset_in_child)
