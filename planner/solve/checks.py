"""Refuse requests that contradict themselves or the profile."""

from math import inf

from planner.core.cost.partition import Partition, check_partition
from planner.core.cost.width import usable_widths
from planner.core.errors import UsageError
from planner.core.schedule import GPIPE
from planner.core.values.limits import MOST_CHUNKS
from planner.core.values.plan import Inputs, Recompute
from planner.core.values.profile import Profile
from planner.core.values.units import counted
from planner.solve.request import Request


def check_request(profile: Profile, request: Request) -> None:
    """Raise `UsageError` if the request contradicts itself or the profile."""
    inputs = request.inputs
    num_layers, num_devices = len(profile.layers), inputs.devices
    if inputs.replicas < 0 or inputs.chunks < 0 or not all(0 < speed < inf for speed in inputs.speeds):
        raise UsageError(
            f"replicas and chunks are at least 1 (0 leaves them open) and speeds above 0, "
            f"got {inputs.replicas}, {inputs.chunks} and {list(inputs.speeds)}"
        )
    if not 1 <= num_devices == len(inputs.memory_bytes):
        raise UsageError(f"{len(inputs.memory_bytes)} memory limits for {num_devices} devices: one for each is needed")
    if inputs.speeds and len(inputs.speeds) != num_devices:
        raise UsageError(f"{len(inputs.speeds)} speeds for {num_devices} devices: one for each is needed")
    if inputs.links and len(inputs.links) < num_devices - 1:
        raise UsageError(
            f"{len(inputs.links)} links between neighbours for {num_devices} devices: {num_devices - 1} are needed",
            hint=f"measure them between {num_devices} processes: "
            f"`torchrun --nproc-per-node {num_devices} -m planner profile-links`",
        )
    _check_replicas(inputs)
    widest = max(usable_widths(profile, inputs))
    if num_devices // widest > num_layers and inputs.replicas == 1:
        raise UsageError(
            f"{num_devices} devices for {counted(num_layers, 'layer')}: every stage needs at least one layer",
            hint=f"use `--devices {num_layers * widest}` or fewer, `--replicas auto`, or profile the model in finer "
            "layers",
        )
    _check_split_backward(profile, request)
    _check_solver(request)
    _check_chunks(request)
    if inputs.chunks > 1 and inputs.chunks * 2 > num_layers:
        raise UsageError(
            f"{inputs.chunks} chunks on each of 2 devices or more: there are only {counted(num_layers, 'layer')}"
        )
    if request.balance is not None:
        _check_balance(request, request.balance, num_layers)


def _check_chunks(request: Request) -> None:
    """Raise `UsageError` if no allowed schedule runs the requested number of chunks."""
    inputs = request.inputs
    if any(schedule.runs_chunks(inputs.chunks) for schedule in request.schedules):
        return
    schedule = request.schedules[0]
    raise UsageError(
        f"`{schedule.name}` runs {counted(schedule.exact_chunks or 1, 'stage')} on each device, "
        f"got {counted(inputs.chunks, 'chunk')}",
        hint="leave `--chunks` out, or use `--schedule interleaved` or `interleaved-zb`",
    )


def _check_solver(request: Request) -> None:
    inputs = request.inputs
    if request.solver != "milp":
        return
    if not all(schedule.has_closed_form for schedule in request.schedules):
        raise UsageError(f"`--solver milp` plans for the GPipe schedule only, not `{inputs.schedule}`")
    if inputs.recompute == "layers":
        raise UsageError("`--solver milp` recomputes stage by stage only", hint="use `--recompute auto`")


def _check_balance(request: Request, balance: tuple[int, ...], num_layers: int) -> None:
    never: Recompute = "never"
    recompute = tuple(never for _ in balance)
    cuts = Partition(schedule=GPIPE.name, micro_batches=1, balance=balance, recompute=recompute)
    chunks = request.inputs.chunks or MOST_CHUNKS
    check_partition(cuts, num_layers=num_layers, num_devices=request.inputs.devices * chunks)


def _check_replicas(inputs: Inputs) -> None:
    unlike = len(set(inputs.memory_bytes)) > 1 or len(set(inputs.speeds)) > 1
    if inputs.replicas != 1 and unlike:
        raise UsageError("replicas of a pipeline need devices that are all alike, got unequal memory limits or speeds")
    if inputs.replicas > inputs.devices:
        raise UsageError(f"{inputs.replicas} replicas need at least as many devices, there are {inputs.devices}")
    if inputs.replicas > 1 and inputs.batch % inputs.replicas:
        raise UsageError(
            f"a batch of {inputs.batch} cannot be shared equally by {inputs.replicas} replicas",
            hint="choose a `--batch` that the replicas divide",
        )


def _check_split_backward(profile: Profile, request: Request) -> None:
    is_compiled = profile.device.how == "compiled"
    if is_compiled and all(schedule.splits_backward for schedule in request.schedules):
        raise UsageError(
            f"`{request.inputs.schedule}` runs backwards in halves, and the programs that train on "
            f"`{profile.device.kind}` run them whole",
            hint="use `--schedule gpipe`",
        )
