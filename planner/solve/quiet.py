"""Solvers that print: what a library writes to standard output is no answer."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_STDOUT = 1


@contextmanager
def without_output() -> Iterator[None]:
    """Drop what the block writes to file descriptor 1: HiGHS 1.16 prints a banner whatever its options say."""
    try:
        kept = os.dup(_STDOUT)
    except OSError:  # it is closed
        yield
        return
    if sys.stdout is not None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _STDOUT)
    os.close(nowhere)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C's `printf` holds back
        os.dup2(kept, _STDOUT)
        os.close(kept)
