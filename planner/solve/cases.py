"""Check of a request, and its division into cases.

A case is one combination of tensor-parallel width, schedule, stages per device, replicas and number of micro-batches.
"""

from collections.abc import Iterator, Sequence
from math import inf, isqrt

from planner.core.cost.costs import CostsAtSize, covers_size
from planner.core.cost.partition import Partition, check_partition
from planner.core.cost.width import CostTablesByWidth, usable_tensor_parallel_widths
from planner.core.errors import UsageError
from planner.core.schedule import GPIPE, ListedSchedule, Schedule
from planner.core.values.cluster import Cluster
from planner.core.values.limits import MOST_ACTIONS, MOST_CHUNKS, MOST_MICRO_BATCHES, truncate
from planner.core.values.plan import Inputs, Recompute
from planner.core.values.profile import Profile
from planner.core.values.units import pluralize
from planner.solve.request import Request
from planner.solve.space.case import Case, StageRules, layer_indices


def check_request(profile: Profile, request: Request) -> None:
    """Raise `UsageError` if the request contradicts itself or the profile."""
    inputs = request.inputs
    num_layers, num_devices = len(profile.layers), inputs.devices
    if inputs.replicas < 0 or inputs.chunks < 0 or not all(0 < speed < inf for speed in inputs.speeds):
        raise UsageError(
            f"replicas and chunks are at least 1 (0: the solver chooses) and speeds above 0, "
            f"got {inputs.replicas}, {inputs.chunks} and {list(inputs.speeds)}"
        )
    if not 1 <= num_devices == len(inputs.memory_bytes):
        raise UsageError(f"{len(inputs.memory_bytes)} memory limits for {num_devices} devices: one for each is needed")
    if inputs.speeds and len(inputs.speeds) != num_devices:
        raise UsageError(f"{len(inputs.speeds)} speeds for {num_devices} devices: one for each is needed")
    if inputs.links and len(inputs.links) < num_devices - 1:
        raise UsageError(
            f"{len(inputs.links)} links between neighbors for {num_devices} devices: {num_devices - 1} are needed",
            hint=f"measure them between {num_devices} processes: "
            f"`torchrun --nproc-per-node {num_devices} -m planner profile-links`",
        )
    _check_replicas(profile, inputs)
    widths = usable_tensor_parallel_widths(profile, inputs)
    narrowest, widest = min(widths), max(widths)
    replicas = max(inputs.replicas, profile.expert_parallel)
    if replicas * narrowest > num_devices:
        raise UsageError(
            f"{pluralize(replicas, 'replica')} with {pluralize(narrowest, 'GPU')} per layer need "
            f"{replicas * narrowest} GPUs or more, there are {num_devices}",
            hint="choose fewer `--replicas`, or a smaller `--tensor-parallel`",
        )
    if num_devices // widest > num_layers and inputs.replicas == 1:
        raise UsageError(
            f"{num_devices} devices for {pluralize(num_layers, 'layer')}: every stage needs at least one layer",
            hint=f"use `--devices {num_layers * widest}` or fewer, `--replicas auto`, or profile the model in finer "
            "layers",
        )
    _check_split_backward(profile, request)
    _check_solver(request)
    _check_chunks(request)
    if inputs.chunks > 1 and inputs.chunks * 2 > num_layers:
        raise UsageError(
            f"{inputs.chunks} chunks on each of 2 devices or more: there are only {pluralize(num_layers, 'layer')}"
        )
    if request.balance is not None:
        _check_balance(request, request.balance, num_layers)


def cases_of(profile: Profile, request: Request, *, tables: CostTablesByWidth | None = None) -> list[Case]:
    """Return all possible combinations of tensor-parallel width, schedule, chunks, replicas and micro-batches.

    Args:
        profile: The profile to plan for.
        request: The request.
        tables: Cost tables of the profile; None to compute them.

    Raises:
        UsageError: No tensor-parallel width or no number of micro-batches is possible, or a layer name is unknown.
    """
    inputs = request.inputs
    names = [layer.name for layer in profile.layers]
    rules = StageRules(
        together=_named(inputs.together, names, "--together"),
        apart=_named(inputs.apart, names, "--apart"),
        balance=request.balance,
    )
    tables = tables or CostTablesByWidth(profile)
    costs: dict[tuple[int, int, int, bool], CostsAtSize] = {}
    cases = []
    for cluster, replicas in _clusters(profile, inputs):
        table = tables.at(cluster)
        for m in micro_batch_counts(profile, request, replicas=replicas, required=inputs.replicas != 0):
            size = inputs.batch // (m * replicas)
            key = cluster.tensor_parallel, cluster.optimizer_shards, size, replicas > 1
            if key not in costs:
                costs[key] = CostsAtSize(table, size, extrapolate=inputs.extrapolate, replicas=replicas)
            cases += [
                Case(
                    costs_at_size=costs[key],
                    cluster=cluster,
                    schedule=schedule,
                    micro_batches=m,
                    num_devices=num_devices,
                    replicas=replicas,
                    policy=inputs.recompute,
                    rules=rules,
                    chunks=chunks,
                )
                for schedule, chunks, num_devices in _schedules(request, m, len(names), cluster.num_devices // replicas)
                # If the split backward times are assumed, `auto` does not recommend schedules that need them.
                if inputs.schedule != "auto" or not (schedule.splits_backward and table.is_split_backward_assumed)
            ]
    if not costs:
        micro_batch_counts(profile, request)  # raises the error that says why no M is possible with one replica
    return cases if request.balance is None else _cases_with_num_stages(cases, request.balance)


def _cases_with_num_stages(cases: Sequence[Case], balance: tuple[int, ...]) -> list[Case]:
    able = [c for c in cases if len(balance) % c.chunks == 0 and len(balance) <= c.num_devices * c.chunks]
    if cases and not able:
        most = max(case.num_devices * case.chunks for case in cases)
        raise UsageError(
            f"{len(balance)} stages were given, which cannot run with these devices, replicas, chunks, schedule and "
            f"micro-batches (at most {most} stages can)",
            hint="give other cuts, or more `--devices`; 1F1B needs as many micro-batches as stages, and chunks above 1 "
            "as many stages as devices times chunks",
        )
    return able


def _schedules(
    request: Request, micro_batches: int, num_layers: int, num_devices: int
) -> Iterator[tuple[Schedule, int, int]]:
    devices = min(num_devices, num_layers, MOST_ACTIONS // micro_batches)
    for schedule in request.schedules:
        if isinstance(schedule, ListedSchedule) and schedule.rows:
            count, chunks = len(schedule.rows), request.inputs.chunks
            if devices >= count and num_layers >= count * chunks and schedule.num_micro_batches == micro_batches:
                yield schedule, chunks, count
            continue
        if schedule.splits_backward and devices < 2:
            continue  # one device never waits, so a split backward gains nothing
        for chunks in _chunks(request, schedule, num_layers, devices):
            most = min(devices, num_layers // chunks, MOST_ACTIONS // micro_batches // chunks)
            most = int(min(most, schedule.most_devices(micro_batches)))
            if most >= 1:
                yield schedule, chunks, most


def _chunks(request: Request, schedule: Schedule, num_layers: int, devices: int) -> Sequence[int]:
    requested = request.inputs.chunks
    if not schedule.is_chunked:
        return (1,)
    if schedule.exact_chunks is not None:
        return (schedule.exact_chunks,) if requested in (0, schedule.exact_chunks) else ()
    # One chunk per device is 1F1B with a longer warm-up, which also runs with fewer micro-batches. `auto` tries it,
    # unless the cuts are given.
    if requested == 1 and request.inputs.schedule == "auto" and request.balance is not None:
        return ()
    several = (requested,) if requested else range(1, MOST_CHUNKS + 1)
    return [chunks for chunks in several if num_layers >= 2 * chunks and devices >= 2]


def _clusters(profile: Profile, inputs: Inputs) -> Iterator[tuple[Cluster, int]]:
    for width in usable_tensor_parallel_widths(profile, inputs):
        for replicas in _replica_counts(profile, inputs, inputs.cluster_of_groups(width)):
            yield inputs.cluster_of_groups(width, replicas), replicas


def _replica_counts(profile: Profile, inputs: Inputs, cluster: Cluster) -> list[int]:
    if inputs.replicas:
        return [inputs.replicas]
    step = profile.expert_parallel
    return [r for r in range(step, cluster.num_devices + 1, step) if inputs.batch % r == 0]


def micro_batch_counts(
    profile: Profile, request: Request, *, replicas: int = 1, required: bool = True
) -> tuple[int, ...]:
    """Return the possible numbers of micro-batches of a request, ascending.

    Each number divides the batch of a replica into micro-batches of a size that the profile covers.

    Args:
        profile: The profile to plan for.
        request: The request.
        replicas: Number of replicas.
        required: True to raise an error if no number is possible.

    Raises:
        UsageError: No number is possible, and `required` is set.
    """
    inputs = request.inputs
    batch = inputs.batch // replicas
    low = [m for m in range(1, isqrt(max(0, batch)) + 1) if batch % m == 0]
    divisors = sorted({*low, *(batch // m for m in low)})
    if request.micro_batches is not None and request.micro_batches not in divisors and required:
        which = truncate(", ".join(map(str, divisors)), 200)
        raise UsageError(
            f"a batch of {batch} cannot be split into {request.micro_batches} equal micro-batches",
            hint=f"M must divide the batch{' of each replica' if replicas > 1 else ''}: one of {which}",
        )
    wanted = [m for m in divisors if request.micro_batches in (None, m) and batch // m >= inputs.min_micro_batch]
    if required and not wanted:
        m = request.micro_batches or 1
        raise UsageError(
            f"a batch of {batch} gives micro-batches of at most {batch // m} samples, "
            f"but `--min-micro-batch {inputs.min_micro_batch}` requires more",
            hint="choose a larger `--batch`, fewer `--micro-batches`, or a smaller `--min-micro-batch`",
        )
    covered = [m for m in wanted if covers_size(profile, batch // m, extrapolate=inputs.extrapolate)]
    if required and covered and covered[0] > MOST_MICRO_BATCHES:
        raise UsageError(
            f"at most {MOST_MICRO_BATCHES} micro-batches are supported, a batch of {batch} needs {covered[0]}",
            hint="choose a smaller `--batch`, or profile larger sizes with `--batch-sizes`",
        )
    counts = tuple(m for m in covered if m <= MOST_MICRO_BATCHES)
    if not counts and required:
        sizes = truncate(", ".join(str(batch // m) for m in wanted), 200)
        profiled = ", ".join(map(str, profile.micro_batch_sizes))
        raise UsageError(
            f"a batch of {batch} gives micro-batches of {sizes}: none is within the profiled sizes {profiled}",
            hint="choose another `--batch`, profile more sizes with `--batch-sizes`, or allow `--extrapolate`",
        )
    return counts


def _named(groups: Sequence[Sequence[str]], names: Sequence[str], option: str) -> tuple[tuple[int, ...], ...]:
    try:
        return layer_indices([tuple(dict.fromkeys(group)) for group in groups], names)
    except KeyError as error:
        near = f'the layers are "{names[0]}" to "{names[-1]}"; `gpipe-plan show` lists them'
        raise UsageError(
            f'`{option}` names the layer "{error.args[0]}", the profile has no such layer', hint=near
        ) from None


def _check_chunks(request: Request) -> None:
    inputs = request.inputs
    if any(schedule.runs_chunks(inputs.chunks) for schedule in request.schedules):
        return
    schedule = request.schedules[0]
    raise UsageError(
        f"`{schedule.name}` runs {pluralize(schedule.exact_chunks or 1, 'stage')} on each device, "
        f"got {pluralize(inputs.chunks, 'chunk')}",
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


def _check_replicas(profile: Profile, inputs: Inputs) -> None:
    if inputs.replicas != 1 and not inputs.are_devices_alike:
        raise UsageError("replicas of a pipeline need equal devices, got unequal memory limits or speeds")
    if inputs.replicas > inputs.devices:
        raise UsageError(f"{inputs.replicas} replicas need at least as many devices, there are {inputs.devices}")
    if inputs.replicas > 1 and inputs.batch % inputs.replicas:
        raise UsageError(
            f"a batch of {inputs.batch} cannot be shared equally by {inputs.replicas} replicas",
            hint="choose a `--batch` that the replicas divide",
        )
    if inputs.batch % profile.expert_parallel:
        raise UsageError(
            f"a batch of {inputs.batch} cannot be shared equally by {profile.expert_parallel} replicas, among which "
            "the profile divides experts (`--expert-parallel`)",
            hint=f"use `--batch {profile.expert_parallel}` or a multiple",
        )
    if inputs.replicas % profile.expert_parallel:
        raise UsageError(
            f"the profile divides experts among {profile.expert_parallel} replicas (`--expert-parallel`), "
            f"got {pluralize(inputs.replicas, 'replica')}",
            hint=f"use `--replicas {profile.expert_parallel}` or a multiple, or `--replicas auto`",
        )


def _check_split_backward(profile: Profile, request: Request) -> None:
    is_compiled = profile.device.how == "compiled"
    if is_compiled and all(schedule.splits_backward for schedule in request.schedules):
        raise UsageError(
            f"`{request.inputs.schedule}` splits the backward, but programs that train on "
            f"`{profile.device.kind}` do not",
            hint="use `--schedule gpipe`",
        )
