"""Signal handlers of a process that trains. Its child processes do not keep them.

A forked process inherits Python's handlers and the wake-up file descriptor. `multiprocessing.Pool` ends its workers
with SIGTERM. Without a reset, the worker would write this signal to the descriptor, and the parent would read it.
"""

import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType

_Handler = Callable[[int, FrameType | None], None]


class SignalHandlers:
    """Installed handler of several signals. Their numbers are also written to the file descriptor `wakeup_fd`."""

    def __init__(self, numbers: Sequence[signal.Signals], handler: _Handler, wakeup_fd: int) -> None:
        self._woken_before = signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
        self._handled_before = {number: signal.signal(number, handler) for number in numbers}
        _installed.append(self)

    def restore(self) -> None:
        """Install the handlers and the wake-up file descriptor that this object has replaced."""
        _installed.remove(self)
        for number, handler in self._handled_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._woken_before)


_installed: list[SignalHandlers] = []


def _reset_in_child() -> None:
    while _installed:
        _installed[-1].restore()
    signal.set_wakeup_fd(-1)  # the previous descriptor also belongs to the parent


os.register_at_fork(after_in_child=_reset_in_child)
