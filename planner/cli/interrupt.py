"""Let Ctrl-C end a search with the best result found so far."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stopped_by_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after the first Ctrl-C. The second Ctrl-C interrupts as usual."""
    is_stopped = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_stopped
        is_stopped = True
        signal.signal(signal.SIGINT, before)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: is_stopped
        return
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: is_stopped
    finally:
        signal.signal(signal.SIGINT, before)
