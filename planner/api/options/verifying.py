"""Options of `verify`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from planner.api.option import Option, ignore_arguments
from planner.api.texts import File, Progress
from planner.core.values.profile import Profile
from planner.core.values.run_report import RunReport


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Options of `verify`."""

    profile: Annotated[File | Profile | None, Option("FILE", "The plan's profile, if it was moved.")] = None
    run: Annotated[
        File | RunReport | None,
        Option("run.json", "Use this report of train.py instead of running the plan."),
    ] = None
    steps: Annotated[int | None, Option("N", "Number of optimizer steps, including 2 for warm-up; default: 12.")] = None
    tolerance_time: Annotated[str | float, Option("10%", "Allowed error of the predicted step time.")] = "10%"
    tolerance_memory: Annotated[
        str | Sequence[str | float],
        Option("1%,5%", "Allowed errors of peak memory: first if the prediction is too low, then if it is too high."),
    ] = "1%,5%"
    calibration: Annotated[File | None, "File for the measured costs of this machine."] = None
    progress: Annotated[Progress, "Called after every step."] = ignore_arguments
