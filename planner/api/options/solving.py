"""What `solve` and `sweep` take beside the profile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, get_args

from planner.api.option import Option, ignore, keywords_of
from planner.api.texts import File, Numbers, Progress, Sizes
from planner.core.schedule import SCHEDULE_CHOICES
from planner.core.values.calibration import Calibration
from planner.core.values.cluster import Link
from planner.core.values.plan import DEFAULT_SCHEDULE, RecomputePolicy

_DEVICES: Final = "Devices"
_LINKS: Final = "Links and overhead"
_BATCH: Final = "Batch and schedule"
_CUTS: Final = "Cuts"
_SEARCH: Final = "Search"

_ORDER: Final = f"In which order micro-batches run: {', '.join(SCHEDULE_CHOICES)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverOptions:
    """What is asked of the solver; `planner.api.asked` resolves it against a profile."""

    devices: Annotated[
        Numbers | None,
        Option("N|8,6,4", "Devices there are; the plan may use fewer. Several: a plan for each.", _DEVICES),
    ] = None
    mem: Annotated[Sizes | None, Option("8GB", "Memory cap per device, or one each: 24GB,24GB,80GB.", _DEVICES)] = None
    speed: Annotated[
        str | float | Sequence[float] | None,
        Option("1,1,2.5", "How many times faster than the profiled device each is.", _DEVICES),
    ] = None
    nodes: Annotated[str | None, Option("4x8", "4 nodes of 8 devices, in pipeline order.", _DEVICES)] = None
    reserve: Annotated[
        str | int | None, Option("500MB", "Kept free on every device; default: as calibrated or measured.", _DEVICES)
    ] = None
    headroom: Annotated[
        str | float,
        Option("5%|auto", "Share of every cap kept free; auto: as peaks came out above predictions.", _DEVICES),
    ] = "0%"
    devices_any_order: Annotated[bool, Option("", "Unlike devices may take any place in the pipeline.", _DEVICES)] = (
        False
    )
    link: Annotated[
        str | Link | None, Option("25GB/s,5us", "Links between neighbours; `,blocking` if they do not overlap.", _LINKS)
    ] = None
    links: Annotated[
        File | Sequence[Link] | None, Option("FILE", "Links as `profile-links` measured them, one by one.", _LINKS)
    ] = None
    inter_link: Annotated[
        str | Link | None, Option("25GB/s,10us", "Links between nodes; `--link` is then within a node.", _LINKS)
    ] = None
    allreduce: Annotated[
        str | Link | None, Option("100GB/s,10us", "What replicas sum their gradients over.", _LINKS)
    ] = None
    overhead: Annotated[str | None, Option("1ms", "Executor's time per micro-batch, stage and direction.", _LINKS)] = (
        None
    )
    calibration: Annotated[
        File | Calibration | None,
        Option("FILE", "What `verify` measured of this machine: link, overhead and more.", _LINKS),
    ] = None
    batch: Annotated[
        int | None, Option("B", "Samples per optimizer step; default: the largest profiled size.", _BATCH)
    ] = None
    micro_batches: Annotated[str | int, Option("auto|M", "How many micro-batches.", _BATCH)] = "auto"
    min_micro_batch: Annotated[int, Option("N", "Least samples of a micro-batch, for batch normalization.", _BATCH)] = 1
    schedule: Annotated[
        str | File,
        Option(
            "NAME|FILE.csv",
            f"{_ORDER[:-1]}, or a table of them as `emit --format csv` and torch write it.",
            _BATCH,
        ),
    ] = DEFAULT_SCHEDULE
    chunks: Annotated[
        str | int, Option("auto|V", "Stages per device, under `interleaved` and `interleaved-zb`.", _BATCH)
    ] = "auto"
    replicas: Annotated[
        str | int, Option("auto|R", "Pipelines side by side, which share the batch and the devices.", _BATCH)
    ] = "1"
    recompute: Annotated[
        str,
        Option(
            "|".join(get_args(RecomputePolicy)),
            "Recompute activations in backward; `layers`: layer by layer where that is better.",
            _BATCH,
        ),
    ] = "auto"
    extrapolate: Annotated[bool, Option("", "Allow unprofiled micro-batch sizes.", _BATCH)] = False
    balance: Annotated[
        Numbers | File | None, Option("6,6,6,6|FILE", "Judge these cuts instead of searching.", _CUTS)
    ] = None
    together: Annotated[
        Sequence[str | Sequence[str]] | None,
        Option("A,B", "Layers that must be in one stage; may be repeated.", _CUTS, repeatable=True),
    ] = None
    apart: Annotated[
        Sequence[str | Sequence[str]] | None,
        Option("A,B", "Layers of which no two may be in one stage; likewise.", _CUTS, repeatable=True),
    ] = None
    solver: Annotated[
        str, Option("auto|dp|milp", "Dynamic programme, or integer programme as a second opinion.", _SEARCH)
    ] = "auto"
    time_limit: Annotated[str | None, Option("60s", "Then give the best plan found, with its proven gap.", _SEARCH)] = (
        None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveOptions(SolverOptions):
    """What `solve` takes beside the profile."""

    frontier: Annotated[bool, Option("", "Show the best plan for every M and under every schedule.", _SEARCH)] = False
    explain: Annotated[
        bool, Option("", "Show what binds, what would help, and what noise does to the plan.", _SEARCH)
    ] = False
    output: Annotated[File | None, "Where to write the plan."] = None
    note: Annotated[Callable[[str], None], "Called with defaults that were taken."] = ignore


_SOLVER_OPTIONS: Final = {keyword.name: keyword.option for keyword in keywords_of(SolverOptions)}


def _as_solved(name: str, **other: Any) -> Option:
    """An option that `solve` has, too, in the same section; with `other` words where they differ."""
    option = _SOLVER_OPTIONS[name]
    assert option is not None
    return replace(option, **other)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What `sweep` takes beside the profile."""

    devices: Annotated[Numbers, _as_solved("devices", metavar="1,2,4,8", help="How many devices there may be.")] = (
        "1,2,4,8"
    )
    mem: Annotated[Sizes | None, _as_solved("mem", metavar="16GB,80GB", help="Memory caps that they may have.")] = None
    batch: Annotated[int | None, _as_solved("batch")] = None
    micro_batches: Annotated[str | int, _as_solved("micro_batches")] = "auto"
    schedule: Annotated[str, _as_solved("schedule", metavar="NAME", help=_ORDER)] = DEFAULT_SCHEDULE
    recompute: Annotated[str, _as_solved("recompute", help="Recompute activations in backward.")] = "auto"
    link: Annotated[str | Link | None, _as_solved("link", help="Links between neighbours.")] = None
    overhead: Annotated[str | None, _as_solved("overhead")] = None
    reserve: Annotated[
        str | int | None, _as_solved("reserve", help="Kept free on every device, as measured or 0B.")
    ] = None
    headroom: Annotated[str | float, _as_solved("headroom")] = "0%"
    time_limit: Annotated[
        str | None, _as_solved("time_limit", help="For each cell; then the best plan found, with its proven gap.")
    ] = None
    output: Annotated[File | None, Option("DIR", "Write the plan of every cell there.", forms="--output -o")] = None
    extrapolate: Annotated[bool, _as_solved("extrapolate")] = False
    progress: Annotated[Progress, "Called before every cell."] = ignore
