"""Ranks of a job as processes, without a launcher that ends all ranks if one fails."""

import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Self

from tests.support.ports import free_port
from tests.support.ranks import ForkedProcess
from tests.support.training import Case, write_balance

__all__ = ["Ended", "Job", "wait_for", "write_script"]

_LONGEST_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Exit codes and output of a job."""

    codes: tuple[int, ...]
    """Exit codes by rank."""
    out: str
    err: str
    seconds: float
    """From the first process's end to that of the last."""

    @property
    def errors(self) -> list[str]:
        """Our own messages."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


class Job:
    """Processes of a job; any that is left at the end of the block is killed.

    Args:
        count: Number of ranks.
        arguments: Script and arguments.
        folder: Working folder, to which output is written.
        environment: Added to the environment of the tests.
    """

    def __init__(self, count: int, arguments: Sequence[str], folder: Path, **environment: str) -> None:
        port = free_port()
        common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environment}
        self._folder, self._name = folder, f"job-{port}"
        self.processes = []
        for rank in range(count):
            out, err, index = self._log(rank, "out"), self._log(rank, "err"), str(rank)
            env = {**common, "RANK": index, "LOCAL_RANK": index}
            self.processes.append(ForkedProcess(arguments, folder, out=out, err=err, **env))

    def __enter__(self) -> Self:
        """Return the job, which already runs."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the processes that are left."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def send(self, number: signal.Signals, rank: int) -> None:
        """Send a signal to one rank."""
        self.processes[rank].send_signal(number)

    def wait_for(self, what: str | Callable[[], bool]) -> None:
        """Wait until a rank has printed a text, or a condition holds."""
        try:
            wait_for(what if callable(what) else lambda: re.search(what, self._read("out") + self._read("err")))
        except TimeoutError:
            raise AssertionError((what, self._read("out"), self._read("err"))) from None

    def ended(self) -> Ended:
        """Wait until all ranks have ended."""
        self.wait_for(lambda: any(process.poll() is not None for process in self.processes))
        begin = time.monotonic()
        for process in self.processes:
            process.wait(_LONGEST_S)
        seconds = time.monotonic() - begin
        codes = tuple(process.returncode for process in self.processes)
        return Ended(codes=codes, out=self._read("out"), err=self._read("err"), seconds=seconds)

    # Private methods

    def _log(self, rank: int, kind: str) -> Path:
        return self._folder / f"{self._name}-{rank}.{kind}"

    def _read(self, kind: str) -> str:
        return "".join(self._log(rank, kind).read_text() for rank in range(len(self.processes)))


def wait_for(what: Callable[[], object]) -> None:
    """Wait until a condition holds; raise `TimeoutError` if it does not."""
    end = time.monotonic() + _LONGEST_S
    while not what():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.05)


def write_script(case: Case, folder: Path) -> None:
    """Write `balance.yaml` and `train.py` of `case`, as `emit` does."""
    folder.mkdir(parents=True, exist_ok=True)
    template = resources.files("planner.emit").joinpath("train_template.py.txt").read_text(encoding="utf-8")
    write_balance(case, folder / "balance.yaml")
    (folder / "train.py").write_text(template.format_map(_Anything()))


class _Anything(dict[str, object]):
    def __missing__(self, key: str) -> str:
        return key
