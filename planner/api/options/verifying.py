"""What `verify` takes beside the plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from planner.api.option import Option, ignore
from planner.api.texts import File, Progress
from planner.core.values.profile import Profile
from planner.core.values.run_report import RunReport


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What `verify` takes beside the plan."""

    profile: Annotated[File | Profile | None, Option("FILE", "The plan's profile, if it was moved.")] = None
    run: Annotated[
        File | RunReport | None,
        Option("run.json", "Judge this run, of which train.py wrote a report, instead of running the plan."),
    ] = None
    steps: Annotated[int | None, Option("N", "Optimizer steps to run, 12 by default; the first 2 warm up.")] = None
    tolerance_time: Annotated[str | float, Option("10%", "How far the step time may be off.")] = "10%"
    tolerance_memory: Annotated[
        str | Sequence[str | float], Option("1%,5%", "How far a predicted peak may be too low, and too high.")
    ] = "1%,5%"
    calibration: Annotated[File | None, "Where to write what the run says of this machine."] = None
    progress: Annotated[Progress, "Called after every step."] = ignore
