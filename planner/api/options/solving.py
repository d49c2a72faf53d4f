"""Options of `solve` and `sweep`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Final, get_args

from planner.api import texts
from planner.api.option import Option, OptionConversion, ignore_arguments, option_fields_of, option_name
from planner.api.texts import File, Numbers, Progress, Sizes
from planner.core.schedule import SCHEDULE_CHOICES
from planner.core.values.calibration import Calibration
from planner.core.values.cluster import Link
from planner.core.values.plan import DEFAULT_SCHEDULE, Inputs, RecomputePolicy
from planner.core.values.units import format_count
from planner.solve.deadline import UNWATCHED, SearchObserver

_DEVICES: Final = "Devices"
_LINKS: Final = "Links and overhead"
_BATCH: Final = "Batch and schedule"
_CUTS: Final = "Cuts"
_SEARCH: Final = "Search"
_RUN: Final = "Training run"

_FLAG: Final = OptionConversion(lambda _, value: value, lambda _: "")
_COUNT_OR_AUTO: Final = OptionConversion(texts.parse_count_or_auto, lambda count: str(count or "auto"))
_LINK: Final = OptionConversion(
    lambda option, value: None if value is None else texts.parse_link(value, option), texts.link_text
)
_COUNT: Final = OptionConversion(texts.parse_large_count, format_count)
_PRICE: Final = OptionConversion(texts.parse_price, texts.decimal_text)
_SHARE: Final = OptionConversion(texts.parse_fraction, texts.decimal_text)
_GROUPS: Final = OptionConversion(
    lambda option, value: tuple(texts.parse_layer_names(option, each) for each in value or ()), ",".join
)

_ORDER: Final = f"Schedule: {', '.join(SCHEDULE_CHOICES)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverOptions:
    """Options of `solve` and `sweep` that describe a request to the solver."""

    devices: Annotated[
        Numbers | None,
        Option("N|8,6,4", "Number of available devices; several numbers: one plan per number.", _DEVICES),
    ] = None
    mem: Annotated[
        Sizes | None, Option("8GB", "Memory limit of every device, or one per device: 24GB,24GB,80GB.", _DEVICES)
    ] = None
    speed: Annotated[
        str | float | Sequence[float] | None,
        Option("1,1,2.5", "Speed of each device relative to the profiled device.", _DEVICES),
    ] = None
    nodes: Annotated[
        str | None, Option("4x8", "Nodes x devices per node; consecutive devices fill a node first.", _DEVICES)
    ] = None
    reserve: Annotated[
        str | int | None,
        Option(
            "500MB",
            "Memory per device that tensors cannot use, like the CUDA context; default: from calibration or profile.",
            _DEVICES,
        ),
    ] = None
    headroom: Annotated[
        str | float | None,
        Option(
            "5%|auto",
            "Share of memory kept free for errors of the prediction; auto: largest error of earlier predictions; "
            "default: auto for estimated profiles, else 0%.",
            _DEVICES,
        ),
    ] = None
    link: Annotated[
        str | Link | None,
        Option("25GB/s,5us", "Link between neighboring devices; `,blocking`: no overlap with compute.", _LINKS),
    ] = None
    links: Annotated[
        File | Sequence[Link] | None, Option("FILE", "File of `profile-links`: one measured value per link.", _LINKS)
    ] = None
    inter_link: Annotated[
        str | Link | None,
        Option("25GB/s,10us", "Link between nodes; `--link` then applies within nodes.", _LINKS, recorded=_LINK),
    ] = None
    allreduce: Annotated[
        str | Link | None, Option("100GB/s,10us", "Link for summing gradients over replicas.", _LINKS, recorded=_LINK)
    ] = None
    overhead: Annotated[str | None, Option("1ms", "Executor's own time per action, such as one forward.", _LINKS)] = (
        None
    )
    calibration: Annotated[
        File | Calibration | None,
        Option("FILE", "Costs of this machine measured by `verify`.", _LINKS),
    ] = None
    batch: Annotated[
        int | None,
        Option(
            "B",
            "Samples per optimizer step; default: the largest profiled size, or its first multiple that is at least "
            "the number of devices.",
            _BATCH,
        ),
    ] = None
    micro_batches: Annotated[str | int, Option("auto|M", "Number of micro-batches.", _BATCH)] = "auto"
    min_micro_batch: Annotated[
        int,
        Option(
            "N",
            "Smallest allowed micro-batch size, for batch normalization.",
            _BATCH,
            recorded=OptionConversion(texts.parse_integer),
        ),
    ] = 1
    schedule: Annotated[
        str | File,
        Option(
            "NAME|FILE.csv",
            f"{_ORDER[:-1]}; or a CSV file from `emit --format csv` or torch.",
            _BATCH,
        ),
    ] = DEFAULT_SCHEDULE
    simplest: Annotated[
        str | float,
        Option(
            "2%",
            "For schedule auto: take the simplest schedule whose plan is at most this much slower.",
            _BATCH,
            recorded=_SHARE,
        ),
    ] = "0%"
    chunks: Annotated[str | int, Option("auto|V", "Stages per device, for interleaved schedules.", _BATCH)] = "auto"
    replicas: Annotated[
        str | int,
        Option(
            "auto|R",
            "Number of data-parallel pipelines; batch and devices are divided among them.",
            _BATCH,
            recorded=_COUNT_OR_AUTO,
        ),
    ] = "1"
    shard_optimizer: Annotated[
        bool, Option("", "Divide the optimizer among replicas (ZeRO stage 1).", _BATCH, recorded=_FLAG)
    ] = False
    tensor_parallel: Annotated[
        str | int,
        Option(
            "auto|T", "GPUs that share each layer; auto: best value in the profile.", _BATCH, recorded=_COUNT_OR_AUTO
        ),
    ] = "auto"
    recompute: Annotated[
        str,
        Option(
            "|".join(get_args(RecomputePolicy)),
            "Recomputation of activations. except-last: of all micro-batches but the last; auto: chosen for each "
            "stage; layers: as auto, or for single layers of a stage.",
            _BATCH,
        ),
    ] = "auto"
    extrapolate: Annotated[
        bool, Option("", "Allow micro-batch sizes outside the profiled range.", _BATCH, recorded=_FLAG)
    ] = False
    balance: Annotated[
        Numbers | File | None,
        Option("6,6,6,6|FILE", "Evaluate these cuts (layers per stage) instead of searching.", _CUTS),
    ] = None
    together: Annotated[
        Sequence[str | Sequence[str]] | None,
        Option("A,B", "Layers to keep in one stage (repeatable).", _CUTS, repeatable=True, recorded=_GROUPS),
    ] = None
    apart: Annotated[
        Sequence[str | Sequence[str]] | None,
        Option("A,B", "Layers to keep in different stages (repeatable).", _CUTS, repeatable=True, recorded=_GROUPS),
    ] = None
    tokens: Annotated[
        str | int | None, Option("1T", "Tokens of the training run: predicts days and cost.", _RUN, recorded=_COUNT)
    ] = None
    samples: Annotated[
        str | int | None, Option("300M", "Samples of the training run, instead of tokens.", _RUN, recorded=_COUNT)
    ] = None
    price: Annotated[
        str | float | None, Option("2.50", "Price of a GPU-hour: predicts the cost.", _RUN, recorded=_PRICE)
    ] = None
    solver: Annotated[
        str, Option("auto|dp|milp", "milp: integer program; auto, dp: dynamic program and local search.", _SEARCH)
    ] = "auto"
    time_limit: Annotated[
        str | None, Option("60s", "Stop after this time and return the best plan found.", _SEARCH)
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveOptions(SolverOptions):
    """Options of `solve`."""

    frontier: Annotated[
        bool, Option("", "Also show the best plan for each number of micro-batches, and for each schedule.", _SEARCH)
    ] = False
    explain: Annotated[
        bool,
        Option("", "Explain what limits the plan, what would improve it, and how timing noise affects it.", _SEARCH),
    ] = False
    output: Annotated[File | None, "File of the plan."] = None
    note: Annotated[Callable[[str], None], "Called with assumed defaults."] = ignore_arguments
    watch: Annotated[SearchObserver, "Observer of the search, which may stop it."] = UNWATCHED


_SOLVER_OPTIONS: Final = {keyword.name: keyword.option for keyword in option_fields_of(SolverOptions)}
_RECORDED: Final = {n: of.recorded for n, of in _SOLVER_OPTIONS.items() if of is not None and of.recorded is not None}
"""Conversions of the options that a plan records, by the name of the option's field in `Inputs`."""


def recorded_values(options: SolverOptions) -> dict[str, Any]:
    """Return the values of options that a plan records, by name of the field in `Inputs`.

    Raises:
        UsageError: The value of an option is invalid.
    """
    return {name: of.read(option_name(name), getattr(options, name)) for name, of in _RECORDED.items()}


def recorded_options(inputs: Inputs) -> tuple[tuple[str, str], ...]:
    """Return options that a plan records, such as `("--replicas", "2")`, without options that have their default."""
    defaults = {field.name: field.default for field in fields(Inputs)}
    values = {name: getattr(inputs, name) for name in _RECORDED}
    return tuple(
        (option_name(name), _RECORDED[name].write(each))
        for name, value in values.items()
        if value != defaults[name]
        for each in (value if isinstance(value, tuple) else (value,))
    )


def _as_solved(name: str, **other: Any) -> Option:
    option = _SOLVER_OPTIONS[name]
    assert option is not None
    return replace(option, **other)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Options of `sweep`."""

    devices: Annotated[
        Numbers | None,
        _as_solved("devices", metavar="1,2,4,8", help="Numbers of devices to try; default: 1,2,4,8."),
    ] = None
    nodes: Annotated[
        str | None, _as_solved("nodes", metavar="1x8,2x8", help="Cluster sizes to try: nodes x devices per node.")
    ] = None
    mem: Annotated[
        Sizes | None,
        _as_solved("mem", metavar="16GB,80GB", help="Memory limits to try; default: the profiled device's memory."),
    ] = None
    batch: Annotated[int | None, _as_solved("batch")] = None
    micro_batches: Annotated[str | int, _as_solved("micro_batches")] = "auto"
    replicas: Annotated[str | int, _as_solved("replicas")] = "1"
    shard_optimizer: Annotated[bool, _as_solved("shard_optimizer")] = False
    tensor_parallel: Annotated[str | int, _as_solved("tensor_parallel")] = "auto"
    schedule: Annotated[str, _as_solved("schedule", metavar="NAME", help=_ORDER)] = DEFAULT_SCHEDULE
    recompute: Annotated[str, _as_solved("recompute")] = "auto"
    link: Annotated[str | Link | None, _as_solved("link")] = None
    inter_link: Annotated[str | Link | None, _as_solved("inter_link")] = None
    allreduce: Annotated[str | Link | None, _as_solved("allreduce")] = None
    overhead: Annotated[str | None, _as_solved("overhead")] = None
    reserve: Annotated[
        str | int | None,
        _as_solved("reserve", help="Memory per device that tensors cannot use; default: from the profile."),
    ] = None
    headroom: Annotated[str | float | None, _as_solved("headroom")] = None
    tokens: Annotated[str | int | None, _as_solved("tokens")] = None
    samples: Annotated[str | int | None, _as_solved("samples")] = None
    price: Annotated[str | float | None, _as_solved("price")] = None
    time_limit: Annotated[
        str | None, _as_solved("time_limit", help="Time limit per plan; then the best plan found is used.")
    ] = None
    output: Annotated[File | None, Option("DIR", "Folder to write all plans to.", forms="--output -o")] = None
    extrapolate: Annotated[bool, _as_solved("extrapolate")] = False
    progress: Annotated[Progress, "Called before each plan is searched."] = ignore_arguments
    note: Annotated[Callable[[str], None], "Called with assumed defaults."] = ignore_arguments
