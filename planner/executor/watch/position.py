"""Where this rank is in its training, told to the others so that they can say who kept them waiting."""

import time
from typing import Any

ANY = -1
"""In `waits_for`: no stage in particular."""
STORE = -2
"""In `waits_for`: all ranks, over the store, where no connection breaks if one of them is gone."""

_OUTSIDE = ("at the start", "joining the others", "building the model", "between steps")
"""What is done in no step."""


class Position:
    """What this rank is doing. The main thread writes it, the watch reads it (see `planner.executor.watch.failure`)."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        """What to call the stages in messages, by index."""
        self.stages: tuple[int, ...] = ()
        """The stages of this rank."""
        self.replica = 0
        self.rank_names: dict[int, str] = {}
        """What to call the other ranks, as far as that is known."""
        self.predicted_bytes: dict[int, int] = {}
        """Peak memory that the plan predicts for each stage; empty where it is not known."""
        self.step = 0
        self.written_bytes = 0
        """Bytes of checkpoints that this rank has put on the disk so far."""
        self._now: tuple[str, int | None, int | None] = ("at the start", None, None)
        self._since = time.monotonic()

    def at(self, doing: str, *, stage: int | None = None, waits_for: int | None = None) -> None:
        """From now on this rank is `doing` that.

        Args:
            doing: Such as "forward of micro-batch 3".
            stage: For which of the rank's stages, if it is for one.
            waits_for: The stage that must send or receive first, `ANY` or `STORE` if any may, None if none must.
        """
        self._now = (doing, stage, waits_for)
        self._since = time.monotonic()

    def wait_anew(self) -> None:
        """Restart the clock of `idle_s`: what this rank waits for makes progress."""
        self._since = time.monotonic()

    @property
    def idle_s(self) -> float:
        """For how long it has been doing the same."""
        return time.monotonic() - self._since

    @property
    def waits_for(self) -> int | None:
        """See `at`."""
        return self._now[2]

    @property
    def name(self) -> str:
        """This rank's stage, in words; empty as long as that is not known."""
        stage = self._now[1]
        return self.name_of(self.stages if stage is None else (stage,), self.replica)

    def name_of(self, stages: tuple[int, ...], replica: int) -> str:
        """Stages of a replica, in words; those of one process are one thing, whatever their number."""
        names = [self.names.get(k, f"stage {k}") for k in stages]
        name = names[0] if names else ""
        if len(names) > 1:
            *before, last = [name.removeprefix("stage ") for name in names]
            name = f"the process of stages {', '.join(before)} and {last}"
        return f"{name} of replica {replica}" if name and replica else name

    @property
    def where(self) -> str:
        """What it is doing, in words."""
        doing = self._now[0]
        return doing if doing in _OUTSIDE else f"in {doing} of step {self.step}"

    def summary(self) -> dict[str, Any]:
        """Where this rank is, for the other ranks."""
        return {
            "name": self.name,
            "where": self.where,
            "waits_for": self.waits_for,
            "idle_s": self.idle_s,
        }
