"""What a thousand ranks cost the store of their job: operations per second at rest and where something happens.

    python benchmarks/thousand_ranks.py [--ranks N]

Every rank is a process with the watch that a run has (`planner.executor.watch.failure`), forked from this one, with
connections of its own to a `TCPStore` in this process. It does nothing but sleep through steps of a second. Operations
are counted where a rank calls the store. The most in any second are printed, with the keys that they are about:
an operation may have several.

    at rest     all ranks compute
    waiting     all but one wait, as for a checkpoint on a slow disk
    killed      SIGKILL of one rank; all others lose contact with their neighbors
    terminated  SIGTERM of all ranks, which agree on a step to stop after
    hanging     all ranks wait, until one after the other has done so for as long as `--timeout` says
"""

import argparse
import gc
import mmap
import os
import platform
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from planner.device.machine import cpu_name
from planner.executor.watch import failure
from planner.executor.watch.activity import ANY
from planner.executor.watch.failure import FailureWatch, StoppedBySignal

STEP_S = 1.0
REST_S = 20.0
TIMEOUT_S = {"hanging": 15.0}
SAMPLE_S = 0.1


class CountingStore:
    """A connection to the store that counts its operations and their keys, in memory that this process shares."""

    def __init__(self, store: Any, counts: mmap.mmap, rank: int) -> None:
        self._store, self._counts, self._rank = store, counts, rank

    def clone(self) -> "CountingStore":
        """Return a second connection, counted in the same place."""
        return CountingStore(self._store.clone(), self._counts, self._rank)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return an operation of the store."""
        operation = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            operations, keys = struct.unpack_from("QQ", self._counts, 16 * self._rank)
            keys += len(arguments[0]) if isinstance(arguments[0], list) else 1
            struct.pack_into("QQ", self._counts, 16 * self._rank, operations + 1, keys)
            return operation(*arguments)

        return counted


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Operations of the ranks after the event."""

    operations_per_s: float
    """The most in any second."""
    keys_per_s: float
    seconds: float
    """Until all ranks had ended; of a scenario that does not end, how long it was watched."""
    codes: dict[int, int]
    errors: list[str]


class Simulation:
    """All ranks of a job, and an event."""

    def __init__(self, scenario: str, ranks: int, folder: Path) -> None:
        self._scenario, self._ranks = scenario, ranks
        self._counts = mmap.mmap(-1, 17 * ranks)
        self._has_happened = mmap.mmap(-1, 1)
        self._errors = folder / f"{scenario}.err"
        # In a process of its own: a fork of a process with the server's threads could find their locks held.
        self._server, self._port = _serve()
        self._begun = time.monotonic()
        self._processes = [self._forked(rank) for rank in range(ranks)]

    def run(self) -> Measured:
        """Start all ranks, trigger the event, and count."""
        while self._counts[16 * self._ranks :].count(1) < self._ranks:
            time.sleep(SAMPLE_S)
        time.sleep(20.0 if self._scenario == "waiting" else 5.0)
        samples, begin = [self._counted()], time.monotonic()
        codes: dict[int, int] = {}
        self._happen()
        lasts_s = REST_S if self._scenario in {"at rest", "waiting"} else 120.0
        while time.monotonic() - begin < lasts_s and len(codes) < self._ranks:
            time.sleep(SAMPLE_S)
            samples.append(self._counted())
            codes.update(self._ended())
        seconds = time.monotonic() - begin
        for process in [*self._processes, self._server]:
            if process not in codes:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        errors = [line for line in self._errors.read_text().splitlines() if line.startswith("error: ")]
        return Measured(
            operations_per_s=_most_per_s(samples, 0),
            keys_per_s=_most_per_s(samples, 1),
            seconds=seconds,
            codes=dict(Counter(codes.values())),
            errors=errors,
        )

    # Private methods

    def _happen(self) -> None:
        if self._scenario == "killed":
            os.kill(self._processes[self._ranks // 2], signal.SIGKILL)
            self._has_happened[0] = 1
        if self._scenario == "terminated":
            for process in self._processes:
                os.kill(process, signal.SIGTERM)
        if self._scenario == "hanging":
            self._has_happened[0] = 1

    def _counted(self) -> tuple[float, int, int]:
        words = struct.unpack_from(f"{2 * self._ranks}Q", self._counts)
        return time.monotonic(), sum(words[::2]), sum(words[1::2])

    def _ended(self) -> dict[int, int]:
        ended: dict[int, int] = {}
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return ended
            ended[process] = os.waitstatus_to_exitcode(status)

    def _forked(self, rank: int) -> int:
        process = os.fork()
        if process == 0:
            code = 1
            try:
                code = self._be(rank)
            except StoppedBySignal as stopped:
                code = int(str(stopped.code))
            finally:
                sys.stderr.flush()
                os._exit(code)
        return process

    def _be(self, rank: int) -> int:
        output = os.open(self._errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(self._ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", self._port, is_master=False, wait_for_workers=False, timeout=timedelta(minutes=5)
        )
        failure._store_of_all = lambda: CountingStore(store, self._counts, rank)
        with FailureWatch(TIMEOUT_S.get(self._scenario, 300.0)) as watch:
            watch.saves_on_stop = True
            self._counts[16 * self._ranks + rank] = 1
            self._train(watch, rank)
        return 0

    def _train(self, watch: FailureWatch, rank: int) -> NoReturn:
        watch.activity.begin("between steps")
        if self._scenario == "waiting" and rank:
            watch.activity.begin("a checkpoint", waits_for=ANY)
        while True:
            step = int((time.monotonic() - self._begun) / STEP_S) + 1
            time.sleep(max(0.0, self._begun + step * STEP_S - time.monotonic()))
            if self._has_happened[0] and self._scenario == "killed":
                raise RuntimeError("Connection closed by peer")
            if self._has_happened[0] and self._scenario == "hanging" and watch.activity.waits_for is None and rank:
                watch.activity.begin("forward of micro-batch 0", waits_for=ANY)
            signalled = watch.stop_signal(step)
            if signalled:
                raise StoppedBySignal(128 + signalled)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--only", nargs="*", default=["at rest", "waiting", "killed", "terminated", "hanging"])
    given = parser.parse_args()
    print(
        f"`python benchmarks/thousand_ranks.py --ranks {given.ranks}` on {cpu_name()} ({os.cpu_count()} cores), torch "
        f"{torch.__version__}, Python {platform.python_version()}; load average {os.getloadavg()[0]:.1f}.\n"
    )
    print("| scenario | operations/s | keys/s | seconds | exit codes | messages |")
    print("|---|---|---|---|---|---|")
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        for scenario in given.only:
            measured = Simulation(scenario, given.ranks, Path(folder)).run()
            codes = ", ".join(f"{count} x {code}" for code, count in sorted(measured.codes.items()))
            print(
                f"| {scenario} | {measured.operations_per_s:.0f} | {measured.keys_per_s:.0f} | {measured.seconds:.1f} "
                f"| {codes} | {' / '.join(measured.errors)} |",
                flush=True,
            )


def _serve() -> tuple[int, int]:
    """Return the process that holds the store, and its port."""
    reads, writes = os.pipe()
    process = os.fork()
    if process == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        os.write(writes, str(server.port).encode())
        signal.pause()
        os._exit(0)
    return process, int(os.read(reads, 16))


def _most_per_s(samples: list[tuple[float, int, int]], what: int) -> float:
    """Return the most operations (0) or keys (1) in any second."""
    most = 0.0
    for begin in samples:
        end = next((sample for sample in samples if sample[0] >= begin[0] + 1.0), samples[-1])
        seconds = max(1.0, end[0] - begin[0])
        most = max(most, (end[1 + what] - begin[1 + what]) / seconds)
    return most


if __name__ == "__main__":
    main()
