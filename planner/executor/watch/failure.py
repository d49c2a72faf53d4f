"""End all ranks soon after one fails, with one message that names the stage, its activity, and what to do.

Every rank has a watch, a thread that runs alongside the training. At regular intervals (beats), the watch writes the
rank's activity to the launcher's store (`liveness`). A rank that stops writing counts as dead. Ranks may wait for each
other for too long. The cause is then the rank at the end of the chain of waits: it waits for no other rank.

The rank that finds a failure first claims it in the store and prints it. Other ranks exit without a message as soon as
their watch reads the claim, even if they hang in a transfer.

The watch also catches SIGTERM and SIGINT. If checkpoints are saved, the ranks agree on a step after which all stop and
save. Python would run a signal handler only after a hanging transfer, so the thread reads signals from a pipe.

Keys of the store:

    failure     rank that claimed the failure
    quit        activity of a rank that left the script with exit code 0
    signal      signal that a rank other than the first one got
    stopping    set by the first rank to make the other ranks check `stop` after every step
    ready       number of ranks that check `stop` after every step
    stop        step after which all ranks stop, and the signal
    news        set with each of `failure`, `quit`, `signal` and `stopping`: the only key that is read with every beat
    written     bytes of checkpoints that all ranks have written
"""

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import torch.distributed as dist

from planner.core.errors import ExitCode, PlannerError, TrainingError
from planner.core.values.printable import printable_lines
from planner.executor.watch import explain
from planner.executor.watch.activity import ANY, STORE, RankActivity
from planner.executor.watch.handlers import SignalHandlers
from planner.executor.watch.liveness import Heartbeats
from planner.executor.watch.store import is_store_host, job_store, rank_and_world_size

_FEW_RANKS = 64
"""Largest number of ranks at which all ranks always check `stop` after every step, so that they can stop at once."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StoppedBySignal(SystemExit):
    """Exit of the script because of a signal, on every rank after the same step."""


class FailureWatch:
    """Watch of one rank: a thread that reports failures of this rank and of other ranks.

    Use it as a `with` block, from before the model is built until the end of the script. A rank that waits for another
    rank for more than `timeout_s` seconds reports that the job hangs.
    """

    def __init__(self, timeout_s: float) -> None:
        self.activity = RankActivity()
        self.saves_on_stop = False
        """True if the script saves a checkpoint after a signal to stop; if False, this watch ends the process."""
        self._rank, self._world = rank_and_world_size()
        self._timeout_s = timeout_s
        self._signal = 0
        self._signalled = 0.0
        self._signal_elsewhere = 0
        """Number of the signal, such as SIGTERM, that another rank got. Only the first rank knows it."""
        self._is_small = self._world <= _FEW_RANKS
        self._has_announced_stop = False
        """True once this rank has announced the stop. The first rank sets the key `stopping`, others set `signal`."""
        self._is_stopping = False
        """True once this rank has read the store's key `stopping`. It then checks `stop` after every step."""
        self._quit: dict[str, Any] | None = None
        self._stop: tuple[int, int] | None = None
        self._over = threading.Event()
        self._ending = threading.Event()
        self._store: Any = _store_of_all() if self._world > 1 and _is_launched() else None
        self._liveness = Heartbeats(self._store, self._rank, self._world)
        """Heartbeats object of the main thread. The watch's thread has another one, with a separate connection."""
        self._wake = socket.socketpair()
        self._handlers: SignalHandlers | None = None
        self._process = os.getpid()
        self._has_left = False
        self._written_bytes = self._written_by_all_bytes = 0
        """Bytes of checkpoints that this rank has reported, and the sum over all ranks when it was last read."""
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Install the signal handlers, and start the watch's thread."""
        # Only the main thread may set handlers; in another thread (a notebook's worker) signals are not handled.
        if threading.current_thread() is threading.main_thread():
            self._wake[1].setblocking(False)
            self._handlers = SignalHandlers(_SIGNALS, self._on_signal, self._wake[1].fileno())
        if self._store is not None:
            # The thread needs a separate connection, because the main thread's waits would delay the beats.
            self._liveness.write(self.activity)
            self._thread = threading.Thread(target=self._run, args=[self._store.clone()], name="watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Stop watching. If an error left the block, report the error and end the process."""
        if os.getpid() != self._process:
            return  # a forked child process leaves the block; it is not a rank
        try:
            if isinstance(error, SystemExit) and not isinstance(error, StoppedBySignal):
                self._report_exit(error)
            elif error is not None and not isinstance(error, SystemExit):
                self._end(error)
        finally:
            self._stop_watching()

    def stop_signal(self, steps: int, *, steps_ahead: int = 1) -> int:
        """Return the signal that ends the run after `steps` completed steps; 0 if the run continues.

        Every rank must call this method after every step. The first rank announces the step after which all ranks stop,
        early enough for other ranks to read it before they finish that step.

        Args:
            steps: Number of completed steps.
            steps_ahead: Number of steps from the announcement to the stop. It must be 1 plus the largest number of
                steps by which another rank may be ahead of the first rank.
        """
        if self._store is None:
            return self._signal
        if self._rank == 0:
            # Announce only once, and only when every rank checks `stop`. A second signal ends the job at once.
            number = self._signal or self._signal_elsewhere
            if self._stop is None and number and (self._is_small or self._store.add("ready", 0) == self._world - 1):
                self._stop = (steps + steps_ahead, number)
                what = f"{signal.Signals(number).name}: stopping after {self._stop[0]} steps, with a checkpoint"
                print(f"{what}; a second signal stops at once, without a checkpoint", flush=True)
                self._store.set("stop", json.dumps(self._stop))
        elif (self._is_small or self._is_stopping) and self._stop is None and self._store.check(["stop"]):
            self._stop = tuple(json.loads(self._store.get("stop")))
        return self._stop[1] if self._stop is not None and steps >= self._stop[0] else 0

    # Private methods: the main thread

    def _stop_watching(self) -> None:
        self._over.set()
        if self._store is not None:
            self._wake[1].send(b"\0")  # not the number of a signal; it ends the thread's wait for signals
            if self._thread is not None:
                self._thread.join()
            self._note_leaving()
        if self._handlers is not None:
            self._handlers.restore()
        for end in self._wake:
            end.close()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._thread is None or not self._thread.is_alive():  # a running thread reads the signal from the pipe
            self._note_signal(number)
        if self._store is None and not self.saves_on_stop:
            sys.exit(128 + number)

    def _note_signal(self, number: int) -> None:
        # The terminal sends a signal to all processes, and the launcher forwards it: two within a second count as one.
        if self._signal and time.monotonic() - self._signalled > 1.0:
            self._end_at_once(number)
        self._signal = self._signal or number
        self._signalled = time.monotonic()

    def _end_at_once(self, number: int) -> NoReturn:
        if self._claim_failure():
            name = signal.Signals(number).name
            who = self.activity.name or "this rank"
            stopped = f"stopped at once by a second {name}: {who} was {self.activity.where}"
            line = printable_lines(f"{stopped}; steps since the last checkpoint are lost")
            print(line, file=sys.stderr, flush=True)
        self._leave(128 + number)

    def _report_exit(self, error: SystemExit) -> None:
        if self._store is None:
            return
        if error.code in {0, None}:  # no error if all ranks exit; a rank that still waits reads the key `quit`
            self._store.set("quit", json.dumps(self.activity.summary()))
            self._store.set("news", "")
            self._note_leaving()
            # If a rank still waits for this one, it reports a failure, and this process must fail, too.
            with suppress(dist.DistError):
                self._liveness.wait_until_ranks_exit(self._liveness.silent_s + 4 * self._liveness.beat_s)
                if self._store.check(["failure"]):
                    self._leave_quietly(ExitCode.ERROR)
            return
        self._ending.set()
        code = error.code if isinstance(error.code, int) else 1
        if self._claim_failure():  # claim first, because finding the lines of the user's code takes time
            print_error(explain.error_for_exception(error, self.activity))
            self._leave(code)
        self._leave_quietly(code)

    def _end(self, error: BaseException) -> NoReturn:
        self._ending.set()  # before the analysis, which takes seconds: the thread must not report the same failure
        message: PlannerError | None
        if isinstance(error, PlannerError):
            message = error
        elif self._store is not None and explain.is_failed_transfer(error):
            # A transfer also fails if the other rank has died, which must be reported instead.
            message = self._lost_contact_error()
        else:
            message = explain.error_for_exception(error, self.activity)
        code = message.exit_code if message is not None else ExitCode.ERROR
        self._report_and_exit(
            message, code, quietly=128 + self._signal if message is None and self._signal else ExitCode.ERROR
        )

    def _lost_contact_error(self) -> PlannerError | None:
        silent = self._silent_ranks(self._liveness)
        if silent:
            return self._gone(silent, self._liveness)
        if silent is None or self._signal:
            return None
        with suppress(dist.DistError):
            # A rank that exits without an error closes its connections, too.
            if self._store.check(["quit"]):
                return explain.error_after_exit(json.loads(self._store.get("quit")), self.activity)
        waits_for = self.activity.waits_for
        name = self.activity.names.get(ANY if waits_for is None else waits_for, "another stage")
        return TrainingError(
            f"{self.activity.name} lost contact with {name} {self.activity.where}",
            hint="all processes are still running, so check the network between them",
        )

    def _gone(self, silent: Sequence[int], liveness: Heartbeats) -> PlannerError:
        named = silent[: explain.MOST_NAMED]
        activities = liveness.activities(named)
        # A rank that ended soon after its start may not have written its name.
        names = [self.activity.rank_names.get(rank) or explain.name_of_rank(rank, activities) for rank in named]
        waited = "was" if self.activity.waits_for is None else "waited"
        who, give = explain.join_with_count(names, len(silent), " and "), "gives" if len(silent) == 1 else "give"
        return TrainingError(
            f"{who} {give} no sign of life while {self.activity.name or f'rank {self._rank}'} {waited} "
            f"{self.activity.where}",
            hint="its process was killed or is stopped, or its machine is lost: see the system's log (out of memory?), "
            "then start again with `--resume auto`; `torchrun --max-restarts 3` does so automatically",
        )

    # Private methods: both threads

    def _silent_ranks(self, liveness: Heartbeats) -> list[int] | None:
        try:
            return liveness.wait_for_silent_ranks()
        except dist.DistError:
            return [0]  # the first rank, which held the store

    def _report_and_exit(
        self, error: PlannerError | None, code: int = ExitCode.ERROR, *, quietly: int = ExitCode.ERROR
    ) -> NoReturn:
        """Report an error unless another rank reports it. Exit with `code` after a report, otherwise with `quietly`."""
        self._ending.set()
        if error is not None and self._claim_failure():
            print_error(error)
            self._leave(code)
        self._leave_quietly(quietly)

    def _claim_failure(self) -> bool:
        if self._store is None:
            return True
        rank = str(self._rank)
        # Without a store the ranks cannot agree; two reports are better than none.
        with suppress(dist.DistError):
            # The store sets the key only once, and returns the rank that set it.
            if self._store.compare_set("failure", "", rank) != rank.encode():
                return False
            self._store.set("news", "")
        return True

    def _leave_quietly(self, code: int) -> NoReturn:
        # Exit after the reporting rank, so that the launcher names that rank as the root cause.
        time.sleep(2 * self._liveness.beat_s)
        self._leave(code)

    def _leave(self, code: int) -> NoReturn:
        if self._store is None:
            sys.exit(code)
        self._note_leaving()
        if is_store_host():  # other ranks must be able to read the store until they leave
            with suppress(dist.DistError):
                self._liveness.wait_until_ranks_exit(3 * self._liveness.beat_s)
        # The interpreter's normal exit would wait for transfers and files that other ranks never finish.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _note_leaving(self) -> None:
        if self._has_left:
            return
        self._has_left = True
        with suppress(dist.DistError):  # without torchrun, the first rank holds the store, and may have left before
            self._liveness.announce_exit()

    # Private methods: the thread

    def _run(self, store: Any) -> None:
        liveness = Heartbeats(store, self._rank, self._world)
        self._record_signals_for(liveness.until_next_beat_s())
        try:
            while not self._over.is_set():
                liveness.write(self.activity)
                if not self._ending.is_set():
                    self._look(store, liveness)
                self._record_signals_for(liveness.until_next_beat_s())
        except dist.DistError:  # the process that holds the store has ended; the main thread's next transfer fails
            if self._signal:
                self._leave(128 + self._signal)

    def _record_signals_for(self, seconds: float) -> None:
        """Wait for `seconds`, and record each SIGTERM or SIGINT that arrives."""
        # A signal does not end the wait: if a launcher sends it to all ranks, they would use the store at once.
        end = time.monotonic() + seconds
        while not self._over.is_set() and select.select([self._wake[0]], [], [], max(0.0, end - time.monotonic()))[0]:
            for number in self._wake[0].recv(16):
                if number in _SIGNALS:
                    self._note_signal(number)

    def _look(self, store: Any, liveness: Heartbeats) -> None:
        if store.check(["news"]):
            self._read_news(store)
        if (self._signal or self._signal_elsewhere) and self.saves_on_stop and not self._has_announced_stop:
            self._announce_stop(store, liveness)
        self._share_written_bytes(store, liveness)
        # A long computation is not a failure, so only a rank that waits may report one.
        waited_s = self.activity.idle_s if self.activity.waits_for is not None else 0.0
        if waited_s > self._timeout_s:
            self._report_and_exit(self._hanging(liveness))
        if waited_s > liveness.silent_s and self._quit is not None:
            self._report_and_exit(explain.error_after_exit(self._quit, self.activity))
        # If a rank has died, the launcher also sends a signal to all ranks. Then the death must be reported.
        if self._signal or (waited_s > liveness.silent_s and self.activity.waits_for == STORE):
            silent = liveness.silent_ranks()
            if silent:
                self._report_and_exit(self._gone(silent, liveness))
        if self._signal:
            longest_s = liveness.silent_s + 2 * liveness.beat_s
            if not self.saves_on_stop and time.monotonic() - self._signalled > longest_s:
                self._leave(128 + self._signal)

    def _announce_stop(self, store: Any, liveness: Heartbeats) -> None:
        # A scheduler may send the signal to only one rank.
        if self._rank == 0:
            store.set("stopping", "")
        elif not self._is_stopping:
            if time.monotonic() - self._signalled < liveness.beat_s / 2:
                return  # the first rank has probably got the signal, too, and will announce the stop
            store.set("signal", str(self._signal))
        self._has_announced_stop = True
        store.set("news", "")

    def _read_news(self, store: Any) -> None:
        if store.check(["failure"]):
            self._leave_quietly(ExitCode.ERROR)
        if self._quit is None and store.check(["quit"]):
            self._quit = json.loads(store.get("quit"))
        if self._rank == 0:
            if not self._signal_elsewhere and store.check(["signal"]):
                self._signal_elsewhere = int(store.get("signal"))
        elif not self._is_stopping and store.check(["stopping"]):
            self._is_stopping = True  # before the first rank reads `ready`
            store.add("ready", 1)

    def _share_written_bytes(self, store: Any, liveness: Heartbeats) -> None:
        """Add the bytes of checkpoints that this rank has written to the sum over all ranks."""
        written = self.activity.written_bytes - self._written_bytes
        late_s = min(liveness.silent_s, self._timeout_s / 2)
        if not written and (self.activity.waits_for is None or self.activity.idle_s < late_s):
            return
        self._written_bytes += written
        by_all = store.add("written", written)
        if by_all != self._written_by_all_bytes:  # other ranks make progress, so a wait for them is not a hang yet
            self._written_by_all_bytes = by_all
            self.activity.restart_clock()

    def _hanging(self, liveness: Heartbeats) -> PlannerError | None:
        silent = self._silent_ranks(liveness)
        if silent is None:
            return None
        if silent:
            return self._gone(silent, liveness)
        return explain.error_of_hang(liveness.activities(), self._timeout_s)


def _is_launched() -> bool:
    return "RANK" in os.environ or dist.is_initialized()


def _store_of_all() -> Any:
    try:
        return job_store(timedelta(minutes=5))
    except PlannerError as error:  # no watch is running yet
        print_error(error)
        sys.exit(error.exit_code)


def print_error(error: PlannerError) -> None:
    """Print an error and its hint to standard error."""
    hint = f"\n\n{printable_lines(f'hint: {error.hint}')}" if error.hint else ""
    print(f"{printable_lines(f'error: {error}')}{hint}", file=sys.stderr, flush=True)
