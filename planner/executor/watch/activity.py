"""Current activity of this rank. Other ranks name it when they report a failure or a hang."""

import time
from typing import Any

ANY = -1
"""Value of `RankActivity.waits_for` while the rank waits, but for no particular stage."""
STORE = -2
"""Value of `RankActivity.waits_for` while the rank waits for all ranks, over the key-value store."""

_OUTSIDE_STEPS = ("at the start", "joining the others", "building the model", "between steps")
"""Activities outside of training steps. `RankActivity.where` names no step for them."""


class RankActivity:
    """Current activity of this rank. The main thread sets the activity, and `FailureWatch` reads it."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        """Names of the stages in messages, by index."""
        self.stages: tuple[int, ...] = ()
        """Stages of this rank."""
        self.replica = 0
        self.rank_names: dict[int, str] = {}
        """Names of the other ranks, if known."""
        self.predicted_bytes: dict[int, int] = {}
        """Peak memory that the plan predicts for each stage; empty if unknown."""
        self.step = 0
        self.written_bytes = 0
        """Bytes of checkpoints that this rank has written so far."""
        self._now: tuple[str, int | None, int | None] = ("at the start", None, None)
        self._since = time.monotonic()

    def begin(self, doing: str, *, stage: int | None = None, waits_for: int | None = None) -> None:
        """Begin an activity of this rank.

        Args:
            doing: Activity, such as "forward of micro-batch 3".
            stage: Stage of this rank to which the activity belongs; None for no particular stage.
            waits_for: Stage for which this rank waits. `ANY` if the rank waits for no particular stage. `STORE` if the
                rank waits for all other ranks, which write their values to the job's key-value store. None if the rank
                does not wait.
        """
        self._now = (doing, stage, waits_for)
        self._since = time.monotonic()

    def restart_clock(self) -> None:
        """Restart the clock of `idle_s`, because the awaited rank makes progress."""
        self._since = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds without progress: since the activity began, or since the last call of `restart_clock`."""
        return time.monotonic() - self._since

    @property
    def waits_for(self) -> int | None:
        """Stage for which this rank waits; see `begin`."""
        return self._now[2]

    @property
    def name(self) -> str:
        """Name of this rank's stage for messages; empty while it is unknown."""
        stage = self._now[1]
        return self.name_of(self.stages if stage is None else (stage,), self.replica)

    def name_of(self, stages: tuple[int, ...], replica: int) -> str:
        """Return the name, for messages, of a process that runs these stages in a replica."""
        names = [self.names.get(k, f"stage {k}") for k in stages]
        name = names[0] if names else ""
        if len(names) > 1:
            *before, last = [name.removeprefix("stage ") for name in names]
            name = f"the process of stages {', '.join(before)} and {last}"
        return f"{name} of replica {replica}" if name and replica else name

    @property
    def where(self) -> str:
        """Description of the activity, such as "in forward of micro-batch 3 of step 7"."""
        doing = self._now[0]
        return doing if doing in _OUTSIDE_STEPS else f"in {doing} of step {self.step}"

    def summary(self) -> dict[str, Any]:
        """Return this rank's name and activity as JSON values, for other ranks."""
        return {
            "name": self.name,
            "where": self.where,
            "waits_for": self.waits_for,
            "idle_s": self.idle_s,
        }
