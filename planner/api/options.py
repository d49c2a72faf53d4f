"""The options of the verbs, each written once.

A record for each verb: its fields are the keywords in Python (`planner.api.keywords`), and those with an `Option` are
options on the command line (`planner.cli.records`), with the same names, defaults and words. Values are kept as they
were typed or handed in; `planner.api.texts` turns either form into values of the core.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import Annotated, Any, Final, get_args, get_type_hints

from planner.api.reading import File, Progress
from planner.api.texts import Numbers, Sizes
from planner.core.cost.calibration import Calibration
from planner.core.schedule import SCHEDULE_CHOICES
from planner.core.values.cluster import Link
from planner.core.values.plan import DEFAULT_SCHEDULE, Plan, RecomputePolicy
from planner.core.values.precision import PRECISIONS
from planner.core.values.profile import Granularity, Profile


@dataclass(frozen=True, slots=True)
class Option:
    """How a keyword is typed on the command line, and what its help says."""

    metavar: str
    """What stands behind it; empty for a flag."""
    help: str
    section: str = ""
    """The title that it stands under in the command's help."""
    forms: str = ""
    """How it is spelled, where that is not its name with dashes."""
    repeatable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyword:
    """A field of a record."""

    name: str
    annotation: Any
    default: Any
    help: str
    option: Option | None
    """None: only Python has it."""

    @property
    def typed(self) -> Any:
        """What a command line gives: `str`, `int`, `bool`, or `list[str]` of an option that may be repeated."""
        if self.option is not None and self.option.repeatable:
            return list[str]
        kinds = {*(get_args(self.annotation) or [self.annotation])} - {NoneType}
        return kinds.pop() if kinds in ({int}, {bool}) else str


def keywords_of(record: type[Any]) -> tuple[Keyword, ...]:
    """The fields of a record, in order."""
    hints = get_type_hints(record, include_extras=True)
    keywords = []
    for of in fields(record):
        plain, about = get_args(hints[of.name])
        option, text = (about, about.help) if isinstance(about, Option) else (None, about)
        keywords.append(Keyword(name=of.name, annotation=plain, default=of.default, help=text, option=option))
    return tuple(keywords)


def values_of(options: Any) -> dict[str, Any]:
    """A record's values by name, as the function takes them."""
    return {of.name: getattr(options, of.name) for of in fields(options)}


def _ignore(*_: object) -> None:
    """Takes what nobody asked to be told."""


_DEVICES: Final = "Devices"
_LINKS: Final = "Links and overhead"
_BATCH: Final = "Batch and schedule"
_CUTS: Final = "Cuts"
_SEARCH: Final = "Search"

_ORDER: Final = f"In which order micro-batches run: {', '.join(SCHEDULE_CHOICES)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverOptions:
    """What is asked of the solver; `planner.api.asked` resolves it against a profile."""

    devices: Annotated[int | None, Option("N", "Devices there are; the plan may use fewer.", _DEVICES)] = None
    mem: Annotated[Sizes | None, Option("8GB", "Memory cap per device, or one each: 24GB,24GB,80GB.", _DEVICES)] = None
    speed: Annotated[
        str | float | Sequence[float] | None,
        Option("1,1,2.5", "How many times faster than the profiled device each is.", _DEVICES),
    ] = None
    nodes: Annotated[str | None, Option("4x8", "4 nodes of 8 devices, in pipeline order.", _DEVICES)] = None
    reserve: Annotated[
        str | int | None, Option("500MB", "Kept free on every device; default: as calibrated or measured.", _DEVICES)
    ] = None
    headroom: Annotated[str | float, Option("5%", "Share of every cap kept free.", _DEVICES)] = "0%"
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
    note: Annotated[Callable[[str], None], "Called with defaults that were taken."] = _ignore


def _as_solved(name: str, **other: Any) -> Option:
    """An option that `solve` has, too, in a record without sections; with `other` words where they differ."""
    (option,) = (keyword.option for keyword in keywords_of(SolverOptions) if keyword.name == name)
    assert option is not None
    return replace(option, section="", **other)


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
    progress: Annotated[Progress, "Called before every cell."] = _ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What `profile` takes beside the model."""

    output: Annotated[File | None, "Where to write the profile; the model's path in it is relative to it."] = None
    batch_sizes: Annotated[
        Numbers,
        Option(
            "auto|1,2,4,8",
            "Micro-batch sizes to measure; the solver chooses among them. `auto`: powers of two up to `--batch` "
            "while they fit into memory, without those too small for batch normalization.",
        ),
    ] = "auto"
    batch: Annotated[int | None, Option("B", "Samples per optimizer step, for `--batch-sizes auto`; default: 8.")] = (
        None
    )
    device: Annotated[
        str,
        Option(
            "cpu|cuda|tpu|tpu:v2|estimate:h100",
            "What to measure on; tpu:v2 (…v6e) compiles for a TPU that is not here, estimate:h100 estimates.",
        ),
    ] = "cpu"
    optimizer: Annotated[
        str | None, Option("NAME", "adamw, adam, sgd, …; default: the file's build_optimizer, or adamw.")
    ] = None
    dtype: Annotated[
        str | None, Option("|".join(PRECISIONS), "Precision to run in; default: as the model is built.")
    ] = None
    settings: Annotated[
        Mapping[str, object] | Sequence[str] | None,
        Option("NAME=VALUE", "A setting of build_model; repeatable.", repeatable=True, forms="--set"),
    ] = None
    inputs: Annotated[
        Sequence[str] | None,
        Option(
            "3x224x224",
            "Input shape[:dtype[:bound]], without example_batch; repeatable.",
            repeatable=True,
            forms="--input",
        ),
    ] = None
    threads: Annotated[int, Option("N", "CPU threads per stage.")] = 1
    granularity: Annotated[
        str, Option("|".join(get_args(Granularity)), "About one layer per block, or cuts inside blocks too.")
    ] = "coarse"
    repeat: Annotated[int, Option("N", "Timed repeats of every layer, at least; more while the plan is in doubt.")] = 10
    time_budget: Annotated[
        str, Option("60s", "Begin no repeats beyond `--repeat` after timing for so long; 0s: none.")
    ] = "60s"
    proof_budget: Annotated[
        str,
        Option("30s", "Hold stages against the model in one piece for about so long, on all cores; 0s: not at all."),
    ] = "30s"
    calibration: Annotated[
        File | Calibration | None,
        Option("FILE", "Executor and link as `verify` measured them, instead of measuring them."),
    ] = None
    example_batch: Annotated[
        Callable[[int], tuple[Any, Any]] | None, "For an `nn.Module`: from a batch size to `(inputs, targets)`."
    ] = None
    loss_fn: Annotated[
        Callable[[Any, Any], Any] | None,
        (
            "For an `nn.Module`: from output and target to a scalar; without it the output's own `.loss`, else the one "
            "scalar in it that carries a gradient, else its mean."
        ),
    ] = None
    progress: Annotated[Progress, "Called as layers are measured."] = _ignore
    note: Annotated[Callable[[str], None], "Called with defaults that were taken, and what was proven."] = _ignore
    warn: Annotated[Callable[[str], None], "Called with what may be wrong."] = _ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitOptions:
    """What `emit` takes beside the plan."""

    output: Annotated[File, Option("DIR", "Folder to write to.", forms="--output -o")] = "."
    profile: Annotated[File | Profile | None, Option("FILE", "The plan's profile, if it was moved.")] = None
    engine: Annotated[
        str,
        Option(
            "FORMAT",
            "For which engine: native (the bundled executor), jax (one program for TPUs), torchgpipe, torch, "
            "torchtitan, deepspeed, megatron, device-map; or csv, the schedule alone, which torch "
            "(`_PipelineScheduleRuntime._load_csv`), torchtitan and NeMo Automodel read.",
            forms="--format",
        ),
    ] = "native"
    standalone: Annotated[
        bool, Option("", "A train.py that needs torch alone: plain GPipe or 1F1B, nn.Sequential.")
    ] = False
    force: Annotated[bool, Option("", "Overwrite a file that was edited.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """What `check` takes beside the plan."""

    mem: Annotated[Sizes | None, Option("8GB", "Judge against this cap instead of the plan's.")] = None
    device: Annotated[str | None, Option("h100", "Judge against the memory of this accelerator instead.")] = None
    headroom: Annotated[str | float, Option("5%", "Warn if less than this share stays free.")] = "0%"
    balance: Annotated[Numbers | File | None, Option("6,6,6,6|FILE", "Judge these cuts instead of the plan's.")] = None
    model: Annotated[
        File | None, Option("MODEL.py[:ENTRY]", "Tell whether this still is the profiled model; needs torch.")
    ] = None
    against: Annotated[
        File | Plan | None,
        Option("PLAN|git:REV", "Tell what differs from this plan, or from this one as committed."),
    ] = None
    profile: Annotated[File | Profile | None, Option("FILE", "The plan's profile, if it was moved.")] = None
    strict: Annotated[bool, Option("", "Warnings make the answer no as well.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What `verify` takes beside the plan."""

    profile: Annotated[File | Profile | None, Option("FILE", "The plan's profile, if it was moved.")] = None
    steps: Annotated[int, Option("N", "Optimizer steps to run; the first 2 warm up.")] = 12
    tolerance_time: Annotated[str | float, Option("10%", "How far the step time may be off.")] = "10%"
    tolerance_memory: Annotated[
        str | Sequence[str | float], Option("1%,5%", "How far a predicted peak may be too low, and too high.")
    ] = "1%,5%"
    calibration: Annotated[File | None, "Where to write what the run says of this machine."] = None
    progress: Annotated[Progress, "Called after every step."] = _ignore
