"""File-system lock that allows one job per folder. It is released when its process ends, even by a crash."""

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from planner.core.errors import UsageError

_WAIT_S = 5.0
"""Seconds to wait for a job on this machine, which may be about to end."""
_WAIT_OTHER_MACHINE_S = 60.0  # a machine that is lost keeps its locks until the network file system releases them
"""Seconds to wait for a job on another machine."""
_HELD = (errno.EAGAIN, errno.EACCES)


class FolderLock:
    """Lock that keeps other jobs from writing checkpoints into a folder.

    Raises:
        UsageError: Another job holds the lock.
        OSError: The lock file cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".lock"
        self._file = -1
        self.warning = ""
        begin = time.monotonic()
        while not self._acquire():
            holder = self._holder()
            is_here = holder.get("host") == socket.gethostname()
            if time.monotonic() - begin > (_WAIT_S if is_here else _WAIT_OTHER_MACHINE_S):
                who = f"process {holder.get('process', '?')} on {holder.get('host', 'another machine')}"
                raise UsageError(
                    f"another job writes checkpoints into {folder} ({who}, since {holder.get('since', '?')})",
                    hint="use a separate folder for each job, or end the other job; a dead job holds no lock",
                )
            time.sleep(0.2)

    def release(self) -> None:
        """Release the lock, so that other jobs may use the folder."""
        if self._file >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def _acquire(self) -> bool:
        """Try to take the lock. Return False if another job has it."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # A POSIX record lock: network file systems support such locks, and child processes do not inherit them.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if error.errno in _HELD:
                return False
            self.warning = (
                f"the file system of {self._path.parent} has no locks ({error.strerror}): "
                "two jobs that write there at once would not be detected"
            )
            return True
        if not self._path.exists() or os.fstat(file).st_ino != self._path.stat().st_ino:
            os.close(file)  # The previous holder has just released it.
            return False
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.ftruncate(file, 0)
        os.write(file, json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": since}).encode())
        self._file = file
        return True

    def _holder(self) -> dict[str, object]:
        try:
            holder = json.loads(self._path.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return holder if isinstance(holder, dict) else {}
