"""When one rank fails, all ranks end soon, and one message says which stage it was, where, and what to do.

Every rank has a watch, a thread beside the training. Twice a second it tells the others, through the store of the
launcher, where its rank is; so silence means a dead process, and of ranks that wait for each other the one that does
not wait is what holds up the rest. Whoever finds the failure first claims it and prints it; the others leave quietly
as soon as their watch sees the claim, even where they hang in a transfer that will never end.

The watch also catches SIGTERM and SIGINT: with checkpoints the ranks agree on a step to stop after, so that all save
the same one. Python would run a handler only after a hanging transfer; the thread reads the signal from a pipe.
"""

import json
import math
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor

from planner.core.errors import ExitCode, PlannerError, TrainingError
from planner.core.units import format_bytes
from planner.executor.position import ANY, Position
from planner.executor.store import job_store

__all__ = ["Watch", "check_gradients", "check_losses", "check_output"]

_BEAT_S = 0.5
_SILENT_S = 3.0
"""A process that is alive tells where it is six times in that time."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Watch:
    """One rank's watch, from before the model is built until the end of the script.

    Args:
        timeout_s: A rank that has waited for another for so long takes the job for hanging.
    """

    def __init__(self, timeout_s: float) -> None:
        self.position = Position()
        self.saves_on_stop = False
        """Whether a signal to stop is left to `stops_after`."""
        self._rank, self._world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._timeout_s = timeout_s
        self._signal = 0
        self._signalled = 0.0
        self._asked = 0
        """On the first rank: the signal that another one got. On the others: the one that the first was told."""
        self._stop: tuple[int, int] | None = None
        self._over = threading.Event()
        self._ending = threading.Event()
        self._store: Any = job_store(timedelta(minutes=5)) if "RANK" in os.environ and self._world > 1 else None
        self._wake = socket.socketpair()
        self._beats = 0
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        """Begins to watch."""
        if threading.current_thread() is threading.main_thread():
            self._wake[1].setblocking(False)
            self._woken_before = signal.set_wakeup_fd(self._wake[1].fileno(), warn_on_full_buffer=False)
            self._handled_before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        if self._store is not None:
            # It may be the store of an earlier round, when a machine has joined again.
            for key in (f"at/{self._rank}", f"left/{self._rank}", *(("stop", "asked") if self._rank == 0 else ())):
                self._store.delete_key(key)
            self._thread_store = self._store.clone()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Ends the process where the block failed."""
        try:
            if error is not None and not isinstance(error, SystemExit):
                self._end(error)
        finally:
            self._stop_watching()

    def stops_after(self, steps: int, *, ahead: int = 1) -> int:
        """The signal that ends the run now that `steps` steps are done, or 0; every rank must ask after every step.

        The first rank decides, one step ahead: no rank can end a step that the first one has not begun, so all find
        the decision at the end of the same step.

        Args:
            steps: Steps done.
            ahead: How many steps another rank may be ahead of the first, and one more.
        """
        if self._store is None:
            return self._signal
        if self._rank == 0:
            if self._stop is None and (self._signal or self._asked):
                self._stop = (steps + ahead, self._signal or self._asked)
                self._store.set("stop", json.dumps(self._stop))
        else:
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
            self._wake[1].send(b"\0")
            self._thread.join()
            with suppress(dist.DistError):  # without torchrun the first rank held the store, and may have left before
                self._store.set(f"left/{self._rank}", "1")
        if hasattr(self, "_handled_before"):
            for number, handler in self._handled_before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._woken_before)
        for end in self._wake:
            end.close()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signal and time.monotonic() - self._signalled > 1.0:
            self._leave(128 + number)  # asked twice
        self._signal = self._signal or number
        self._signalled = time.monotonic()
        if self._store is None and not self.saves_on_stop:
            sys.exit(128 + number)

    def _end(self, error: BaseException) -> NoReturn:
        """Tells what happened, unless another rank does, and ends this process."""
        self._ending.set()
        told: PlannerError | None
        if isinstance(error, PlannerError):
            told = error
        elif self._store is not None and _is_lost_contact(error):
            told = self._lost_contact()
        else:
            told = _explained(error, self.position)
        if told is not None and self._claimed():
            _print(told)
            self._leave(told.exit_code)
        self._leave_quietly(128 + self._signal if told is None and self._signal else ExitCode.ERROR)

    def _lost_contact(self) -> PlannerError | None:
        """Why a transfer failed; None where another rank tells it."""
        silent = self._silent(self._store)
        if silent:
            return self._gone(silent)
        if silent is None or self._signal:
            return None
        waits_for = self.position.waits_for
        name = self.position.names.get(ANY if waits_for is None else waits_for, "another stage")
        return TrainingError(
            f"{self.position.name} lost contact with {name} {self.position.where}",
            hint="all processes still run, so look at the network between them",
        )

    def _gone(self, silent: Sequence[int]) -> PlannerError:
        told = self._told(self._store)
        # One that went soon after its start may not have told its name.
        names = {rank: self.position.rank_names.get(rank) or _name(rank, told) for rank in silent}
        who = " and ".join(names.values())
        waited = "was" if self.position.waits_for is None else "waited"
        return TrainingError(
            f"{who} {'is' if len(silent) == 1 else 'are'} gone while "
            f"{self.position.name or f'rank {self._rank}'} {waited} {self.position.where}",
            hint="its process was killed or its machine is lost: see the system's log (out of memory?), then start "
            "again with `--resume auto`; `torchrun --max-restarts 3` does so by itself",
        )

    # Private methods: both threads

    def _silent(self, store: Any) -> list[int] | None:
        """Ranks that give no sign of life and did not leave in order; None where a failure is already told."""
        try:
            before = self._told(store)
            end = time.monotonic() + _SILENT_S
            while time.monotonic() < end:
                if store.check(["failure"]):
                    return None
                time.sleep(_BEAT_S / 2)
                now = self._told(store)
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

    def _told(self, store: Any) -> dict[int, dict[str, Any]]:
        keys = {rank: f"at/{rank}" for rank in range(self._world)}
        try:
            return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
        except dist.DistError:
            return {}

    def _claimed(self) -> bool:
        """Whether this rank is the one to tell what happened."""
        if self._store is None:
            return True
        mine = str(self._rank)
        try:
            return bool(self._store.compare_set("failure", "", mine) == mine.encode())
        except dist.DistError:
            return True

    def _leave_quietly(self, code: int) -> NoReturn:
        # After who tells it, so that the launcher takes that one for the root cause.
        time.sleep(2 * _BEAT_S)
        self._leave(code)

    def _leave(self, code: int) -> NoReturn:
        if self._store is None:
            sys.exit(code)
        # Not by way of the interpreter's end, which would wait for transfers and files that other ranks never finish.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    # Private methods: the thread

    def _run(self) -> None:
        store = self._thread_store
        try:
            while not self._over.is_set():
                self._beat(store)
                if not self._ending.is_set():
                    self._look(store)
                if select.select([self._wake[0]], [], [], _BEAT_S)[0]:
                    self._wake[0].recv(16)
        except dist.DistError:  # who held the store is gone: the main thread finds out in its next transfer
            if self._signal:
                self._leave(128 + self._signal)

    def _beat(self, store: Any) -> None:
        self._beats += 1
        store.set(f"at/{self._rank}", json.dumps({"beat": self._beats, **self.position.told()}))

    def _look(self, store: Any) -> None:
        if store.check(["failure"]):
            self._leave_quietly(ExitCode.ERROR)
        if self._rank == 0 and not self._asked and store.check(["asked"]):
            self._asked = int(store.get("asked"))
        if self.position.waits_for is not None and self.position.idle_s > self._timeout_s:
            self._tell(self._hanging(store))
        if self._signal:
            # The launcher sends it to all others, too, when a rank has died; then that is what is to be told.
            silent = self._silent_while_beating(store)
            if silent:
                self._tell(self._gone(silent))
            elif not self.saves_on_stop and time.monotonic() - self._signalled > _SILENT_S + 2 * _BEAT_S:
                store.set(f"left/{self._rank}", "1")
                self._leave(128 + self._signal)

    def _silent_while_beating(self, store: Any) -> list[int]:
        """As `_silent`, a little with every beat."""
        now = {rank: told["beat"] for rank, told in self._told(store).items() if rank != self._rank}
        if not hasattr(self, "_seen"):
            self._seen: dict[int, tuple[int, float]] = {}
        for rank, beat in now.items():
            if self._seen.get(rank, (None,))[0] != beat:
                self._seen[rank] = (beat, time.monotonic())
        late = [rank for rank in now if time.monotonic() - self._seen[rank][1] > _SILENT_S]
        return [rank for rank in late if not store.check([f"left/{rank}"])]

    def _tell(self, error: PlannerError | None) -> None:
        self._ending.set()
        if error is not None and self._claimed():
            _print(error)
            self._leave(ExitCode.ERROR)
        self._leave_quietly(ExitCode.ERROR)

    def _hanging(self, store: Any) -> PlannerError | None:
        silent = self._silent(store)
        if silent is None:
            return None
        if silent:
            return self._gone(silent)
        return _hang(self._told(store), self._timeout_s)


def check_losses(losses: Sequence[Tensor], mean: float, position: Position) -> None:
    """Refuses to train on with a loss that is no number.

    Raises:
        TrainingError: Naming the first micro-batch whose loss is not finite.
    """
    if math.isfinite(mean):
        return
    micro_batch = next((n for n, loss in enumerate(losses) if not math.isfinite(float(loss))), None)
    if micro_batch is None:
        return  # it is another replica's, which tells it
    raise TrainingError(
        f"the loss of micro-batch {micro_batch} of step {position.step} is {float(losses[micro_batch])}, "
        f"computed on {position.name}",
        hint="run again with `--check-nan` to see in which stage it begins; a lower learning rate or clipped "
        "gradients may help",
    )


def check_output(output: Any, position: Position) -> None:
    """Refuses an output of a stage that is not finite.

    Raises:
        TrainingError: Naming stage and micro-batch.
    """
    for tensor in (output,) if isinstance(output, Tensor) else output:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise TrainingError(
                f"{position.name} put out NaN or infinity {position.where}, from finite inputs",
                hint="one of its layers overflowed, or its parameters are not finite",
            )


def check_gradients(parameters: Mapping[str, Tensor], position: Position) -> None:
    """Refuses gradients that are not finite.

    Raises:
        TrainingError: Naming stage and parameter.
    """
    for name, parameter in parameters.items():
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            raise TrainingError(
                f"the gradient of {name} on {position.name} is not finite in step {position.step}",
                hint="a lower learning rate or clipped gradients may help",
            )


# Private functions


def _explained(error: BaseException, position: Position) -> PlannerError:
    root = error
    while root.__cause__ is not None:  # the engine wraps what a stage raises
        root = root.__cause__
    who = position.name or "this rank"
    if _is_out_of_memory(root):
        return _out_of_memory(root, who, position)
    first = f"{type(root).__name__}: {root}".strip()
    return TrainingError(
        f"{who} failed {position.where}: {first}\n{_frames(root)}".rstrip(),
        hint="the other stages have ended, too; start again with `--resume auto` once it is mended",
    )


def _out_of_memory(error: BaseException, who: str, position: Position) -> PlannerError:
    predicted = sum(position.predicted_bytes.get(stage, 0) for stage in position.stages)
    beside = f"; the plan predicts a peak of {format_bytes(predicted)}" if predicted else ""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        held = f"{format_bytes(torch.cuda.memory_allocated())} allocated"
    else:
        held = f"{format_bytes(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)} in the process"
    return TrainingError(
        f"{who} ran out of memory {position.where}, with {held}{beside}\n  {str(error).strip().splitlines()[0][:300]}",
        hint="solve again with less memory (`--mem`), more in reserve (`--reserve`), more micro-batches or `--recompute"
        " always`; what else runs on the device counts, too",
    )


def _is_out_of_memory(error: BaseException) -> bool:
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def _is_lost_contact(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in ("gloo/", "Connection closed by peer", "NCCL"))
    )


def _frames(error: BaseException) -> str:
    """The user's own lines in the traceback; all where there are none."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((*ours, "<frozen"))]
    own_code = [frame for frame in theirs if Path(frame.filename) != Path(sys.argv[0]).resolve()]
    return "".join(traceback.format_list(own_code or theirs or frames)).rstrip()


def _hang(told: Mapping[int, Mapping[str, Any]], timeout_s: float) -> PlannerError:
    """Of all that wait, who does not."""
    hint = "raise `--timeout` if it needs that long; else look at what it does there (py-spy dump)"
    culprits = [rank for rank, at in told.items() if at["waits_for"] is None]
    waiting = "; ".join(
        f"{_name(rank, told)} waits {at['where']}" for rank, at in told.items() if at["waits_for"] is not None
    )
    if not culprits:
        return TrainingError(f"the stages wait for each other for {timeout_s:g} s: {waiting}", hint=hint)
    who = "; ".join(
        f"{_name(rank, told)} has been {told[rank]['where']} for {told[rank]['idle_s']:.0f} s" for rank in culprits
    )
    return TrainingError(f"{who}, and holds up the others: {waiting}", hint=hint)


def _name(rank: int, told: Mapping[int, Mapping[str, Any]]) -> str:
    return str(told.get(rank, {}).get("name") or f"rank {rank}")


def _print(error: PlannerError) -> None:
    hint = f"\n\nhint: {error.hint}" if error.hint else ""
    print(f"error: {error}{hint}", file=sys.stderr, flush=True)
