"""When one rank fails, all ranks end soon, and one message says which stage it was, where, and what to do.

Every rank has a watch, a thread beside the training. Twice a second it tells the others, through the store of the
launcher, where its rank is; so silence means a dead process, and of ranks that wait for each other the one that does
not wait is what holds up the rest. Whoever finds the failure first claims it and prints it; the others leave quietly
as soon as their watch sees the claim, even where they hang in a transfer that will never end.

The watch also catches SIGTERM and SIGINT: with checkpoints the ranks agree on a step to stop after, so that all save
the same one. Python would run a handler only after a hanging transfer; the thread reads the signal from a pipe.
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
from planner.executor.watch.explain import explained, hang, is_lost_contact, left_alone, name_of_rank
from planner.executor.watch.handlers import SignalHandlers
from planner.executor.watch.position import ANY, Position
from planner.executor.watch.store import holds_store, job_store, rank_here

_BEAT_S = 0.5
_SILENT_S = 3.0
"""A process that is alive tells where it is six times in that time."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(SystemExit):
    """Ends the script on every rank after the same step, as a signal told it to."""


class Watch:
    """One rank's watch, from before the model is built until the end of the script.

    A rank that has waited for another for `timeout_s` takes the job for hanging.
    """

    def __init__(self, timeout_s: float) -> None:
        self.position = Position()
        self.saves_on_stop = False
        """Whether a signal to stop is left to `stops_after`."""
        self._rank, self._world = rank_here()
        self._timeout_s = timeout_s
        self._signal = 0
        self._signalled = 0.0
        self._asked = 0
        """On the first rank: the signal that another one got. On the others: the one that the first was told."""
        self._stop: tuple[int, int] | None = None
        self._over = threading.Event()
        self._ending = threading.Event()
        self._store: Any = _store_of_all() if self._world > 1 and _is_launched() else None
        self._wake = socket.socketpair()
        self._handlers: SignalHandlers | None = None
        self._process = os.getpid()
        self._beats = 0
        self._written_bytes = self._written_by_all_bytes = 0
        """Bytes of checkpoints that this rank has reported, and that all ranks had at the last look."""
        self._seen: dict[int, tuple[int, float]] = {}
        """By rank, its last beat and when that was first seen."""
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        """Begins to watch."""
        # Only the main thread may set handlers; elsewhere (in a notebook's worker, say) signals stay the program's.
        if threading.current_thread() is threading.main_thread():
            self._wake[1].setblocking(False)
            self._handlers = SignalHandlers(_SIGNALS, self._on_signal, self._wake[1].fileno())
        if self._store is not None:
            # A connection of its own: one that waits in the main thread would hold up the beats.
            self._thread_store = self._store.clone()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Ends the process where the block failed."""
        if os.getpid() != self._process:
            return  # a forked child process leaves the block: it is no rank
        try:
            if isinstance(error, SystemExit) and not isinstance(error, Stopped):
                self._end_by_exit(error)
            elif error is not None and not isinstance(error, SystemExit):
                self._end(error)
        finally:
            self._stop_watching()

    def stops_after(self, steps: int, *, ahead: int = 1) -> int:
        """The signal that ends the run now that `steps` steps are done, or 0; every rank must ask after every step.

        The first rank decides, one step ahead: no rank can end a step that the first one has not begun, so all find
        the decision at the end of the same step. Where another rank may be further, it is `ahead` by as many, and one.
        """
        if self._store is None:
            return self._signal
        if self._rank == 0:
            # Decided once: a second signal ends all at once, and moves no step.
            if self._stop is None and (self._signal or self._asked):
                number = self._signal or self._asked
                self._stop = (steps + ahead, number)
                what = f"{signal.Signals(number).name}: stopping after {self._stop[0]} steps, with a checkpoint"
                print(f"{what}; a second one stops at once, without", flush=True)
                self._store.set("stop", json.dumps(self._stop))
        else:
            # `torchrun` sends it to all; a scheduler may send it to one process, which then asks the first.
            if self._signal and not self._asked:
                self._asked = self._signal
                self._store.set("asked", str(self._signal))
            if self._stop is None and self._store.check(["stop"]):
                self._stop = tuple(json.loads(self._store.get("stop")))
        return self._stop[1] if self._stop is not None and steps >= self._stop[0] else 0

    # Private methods: the main thread

    def _stop_watching(self) -> None:
        self._over.set()
        if self._store is not None:
            self._wake[1].send(b"\0")  # no signal, but it ends the thread's waiting for one
            self._thread.join()
            with suppress(dist.DistError):  # without torchrun the first rank held the store, and may have left before
                self._store.set(f"left/{self._rank}", "1")
        if self._handlers is not None:
            self._handlers.restore()
        for end in self._wake:
            end.close()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._store is None or not self._thread.is_alive():  # else the thread notes it, from the pipe
            self._note_signal(number)
        if self._store is None and not self.saves_on_stop:
            sys.exit(128 + number)

    def _note_signal(self, number: int) -> None:
        # The launcher passes on what the terminal sends to all: the same signal twice within a second is one.
        if self._signal and time.monotonic() - self._signalled > 1.0:
            self._end_at_once(number)
        self._signal = self._signal or number
        self._signalled = time.monotonic()

    def _end_at_once(self, number: int) -> NoReturn:
        if self._claimed():
            name = signal.Signals(number).name
            who = self.position.name or "this rank"
            stopped = f"stopped at once by a second {name}: {who} was {self.position.where}"
            line = printable_lines(f"{stopped}; what was done since the last checkpoint is lost")
            print(line, file=sys.stderr, flush=True)
        self._leave(128 + number)

    def _end_by_exit(self, error: SystemExit) -> None:
        """Tells the other ranks, which might wait for this one, that the script has left the block by itself."""
        if self._store is None:
            return
        if error.code in {0, None}:  # in order, if all do; whoever waits now finds this
            self._store.set("quit", json.dumps(self.position.summary()))
            self._store.set(f"left/{self._rank}", "1")
            # If one still waits then, it tells so, and this process, too, ends as one that failed.
            self._wait_for_others(_SILENT_S + 4 * _BEAT_S)
            return
        self._ending.set()
        code = error.code if isinstance(error.code, int) else 1
        if self._claimed():  # at once: looking up the user's lines takes time
            print_error(explained(error, self.position))
            self._leave(code)
        self._leave_quietly(code)

    def _end(self, error: BaseException) -> NoReturn:
        self._ending.set()  # before it is looked into, which takes seconds: the thread must not find the same meanwhile
        message: PlannerError | None
        if isinstance(error, PlannerError):
            message = error
        elif self._store is not None and is_lost_contact(error):
            # A transfer fails on the neighbours of a rank that died, too; what they say of it must not hide that.
            message = self._lost_contact()
        else:
            message = explained(error, self.position)
        code = message.exit_code if message is not None else ExitCode.ERROR
        self._tell(message, code, quietly=128 + self._signal if message is None and self._signal else ExitCode.ERROR)

    def _lost_contact(self) -> PlannerError | None:
        """Why a transfer failed; None where another rank tells it."""
        silent = self._silent(self._store)
        if silent:
            return self._gone(silent)
        if silent is None or self._signal:
            return None
        with suppress(dist.DistError):
            # A rank that left in good order closes its connections, too.
            if self._store.check(["quit"]):
                return left_alone(json.loads(self._store.get("quit")), self.position)
        waits_for = self.position.waits_for
        name = self.position.names.get(ANY if waits_for is None else waits_for, "another stage")
        return TrainingError(
            f"{self.position.name} lost contact with {name} {self.position.where}",
            hint="all processes still run, so look at the network between them",
        )

    def _gone(self, silent: Sequence[int]) -> PlannerError:
        positions = self._positions(self._store)
        # One that went soon after its start may not have told its name.
        names = {rank: self.position.rank_names.get(rank) or name_of_rank(rank, positions) for rank in silent}
        who = " and ".join(names.values())
        waited = "was" if self.position.waits_for is None else "waited"
        return TrainingError(
            f"{who} {'gives' if len(silent) == 1 else 'give'} no sign of life while "
            f"{self.position.name or f'rank {self._rank}'} {waited} {self.position.where}",
            hint="its process was killed or is stopped, or its machine is lost: see the system's log (out of memory?), "
            "then start again with `--resume auto`; `torchrun --max-restarts 3` does so by itself",
        )

    # Private methods: both threads

    def _silent(self, store: Any) -> list[int] | None:
        """Ranks that give no sign of life and did not leave in order; None where a failure is already told."""
        try:
            # A clock per machine would not do: what counts is whether a beat changes while this rank looks on.
            before = self._positions(store)
            end = time.monotonic() + _SILENT_S
            while time.monotonic() < end:
                if store.check(["failure"]):
                    return None
                time.sleep(_BEAT_S / 2)
                now = self._positions(store)
                silent = [
                    rank
                    for rank in range(self._world)
                    if rank != self._rank and rank in before and now[rank]["beat"] == before[rank]["beat"]
                ]
                if not silent:
                    return []
            return [rank for rank in silent if not store.check([f"left/{rank}"])]
        except dist.DistError:
            return [0]  # who held the store

    def _positions(self, store: Any) -> dict[int, dict[str, Any]]:
        keys = {rank: f"at/{rank}" for rank in range(self._world)}
        try:
            # Asking for a key that is not there yet would wait for it.
            return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
        except dist.DistError:
            return {}

    def _tell(
        self, error: PlannerError | None, code: int = ExitCode.ERROR, *, quietly: int = ExitCode.ERROR
    ) -> NoReturn:
        """Tells what happened, unless another rank does, and ends this process: with `code`, or else `quietly`."""
        self._ending.set()
        if error is not None and self._claimed():
            print_error(error)
            self._leave(code)
        self._leave_quietly(quietly)

    def _claimed(self) -> bool:
        """Whether this rank is the one to tell what happened."""
        if self._store is None:
            return True
        rank = str(self._rank)
        try:
            # Set only where nobody has set it: the store gives every rank the name of the one that came first.
            return bool(self._store.compare_set("failure", "", rank) == rank.encode())
        except dist.DistError:
            return True  # without a store nobody agrees on anything, and twice is better than not at all

    def _leave_quietly(self, code: int) -> NoReturn:
        # After who tells it, so that the launcher takes that one for the root cause.
        time.sleep(2 * _BEAT_S)
        self._leave(code)

    def _leave(self, code: int) -> NoReturn:
        if self._store is None:
            sys.exit(code)
        if holds_store():  # the others are to see what is in it
            self._wait_for_others(3 * _BEAT_S)
        # Not by way of the interpreter's end, which would wait for transfers and files that other ranks never finish.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _wait_for_others(self, seconds: float) -> None:
        """Until they have left, no longer than so."""
        keys = [f"left/{rank}" for rank in range(self._world) if rank != self._rank]
        end = time.monotonic() + seconds
        with suppress(dist.DistError):
            while time.monotonic() < end and not self._store.check(keys):
                time.sleep(_BEAT_S / 5)

    # Private methods: the thread

    def _run(self) -> None:
        store = self._thread_store
        try:
            while not self._over.is_set():
                self._beat(store)
                if not self._ending.is_set():
                    self._look(store)
                self._wait_for_signals(_BEAT_S)
        except dist.DistError:  # who held the store is gone: the main thread finds out in its next transfer
            if self._signal:
                self._leave(128 + self._signal)

    def _wait_for_signals(self, timeout_s: float) -> None:
        if not select.select([self._wake[0]], [], [], timeout_s)[0]:
            return
        for number in self._wake[0].recv(16):
            if number in _SIGNALS:
                self._note_signal(number)

    def _beat(self, store: Any) -> None:
        self._beats += 1
        store.set(f"at/{self._rank}", json.dumps({"beat": self._beats, **self.position.summary()}))

    def _look(self, store: Any) -> None:
        if store.check(["failure"]):
            self._leave_quietly(ExitCode.ERROR)
        if self._rank == 0 and not self._asked and store.check(["asked"]):
            self._asked = int(store.get("asked"))
        self._follow_writing(store)
        # Who computes for long is no failure by itself: only who waits may call it one.
        if self.position.waits_for is not None and self.position.idle_s > self._timeout_s:
            self._tell(self._hanging(store))
        if self.position.waits_for is not None and self.position.idle_s > _SILENT_S and store.check(["quit"]):
            self._tell(left_alone(json.loads(store.get("quit")), self.position))
        if self._signal:
            # The launcher sends it to all others, too, when a rank has died; then that is what is to be told.
            silent = self._silent_while_beating(store)
            if silent:
                self._tell(self._gone(silent))
            elif not self.saves_on_stop and time.monotonic() - self._signalled > _SILENT_S + 2 * _BEAT_S:
                store.set(f"left/{self._rank}", "1")
                self._leave(128 + self._signal)

    def _follow_writing(self, store: Any) -> None:
        """Report bytes written, and restart this rank's clock where any rank wrote some: it waits for a slow disk."""
        written = self.position.written_bytes - self._written_bytes
        late_s = min(_SILENT_S, self._timeout_s / 2)
        if not written and (self.position.waits_for is None or self.position.idle_s < late_s):
            return
        self._written_bytes += written
        by_all = store.add("written", written)
        if by_all != self._written_by_all_bytes:
            self._written_by_all_bytes = by_all
            self.position.wait_anew()

    def _silent_while_beating(self, store: Any) -> list[int]:
        """Ranks that give no sign of life; `_silent` looks for seconds, this a little with every beat."""
        now = {rank: at["beat"] for rank, at in self._positions(store).items() if rank != self._rank}
        for rank, beat in now.items():
            if self._seen.get(rank, (None,))[0] != beat:
                self._seen[rank] = (beat, time.monotonic())
        late = [rank for rank in now if time.monotonic() - self._seen[rank][1] > _SILENT_S]
        return [rank for rank in late if not store.check([f"left/{rank}"])]

    def _hanging(self, store: Any) -> PlannerError | None:
        silent = self._silent(store)
        if silent is None:
            return None
        if silent:
            return self._gone(silent)
        return hang(self._positions(store), self._timeout_s)


def _is_launched() -> bool:
    return "RANK" in os.environ or dist.is_initialized()


def _store_of_all() -> Any:
    try:
        return job_store(timedelta(minutes=5))
    except PlannerError as error:  # nobody watches yet
        print_error(error)
        sys.exit(error.exit_code)


def print_error(error: PlannerError) -> None:
    """Prints what happened and what to do on standard error."""
    hint = f"\n\n{printable_lines(f'hint: {error.hint}')}" if error.hint else ""
    print(f"{printable_lines(f'error: {error}')}{hint}", file=sys.stderr, flush=True)
