"""Solver requests, made from the options of a command and a profile."""

from collections.abc import Iterator
from typing import cast

from planner import files
from planner.api import texts
from planner.api.defaults import default_batch, headroom_of
from planner.api.options.solving import SolverOptions, recorded_values
from planner.api.question import may_choose_chunks
from planner.api.reading import links_of, resolve_balance, resolve_calibration
from planner.api.schedule_file import check_cuts, options_for_schedule, schedule_file_path
from planner.api.texts import Numbers, Sizes
from planner.core.cost.workload import workload_of
from planner.core.errors import UsageError
from planner.core.judge.calibration import calibrated_executor
from planner.core.schedule import GIVEN, GPIPE, SCHEDULE_CHOICES
from planner.core.values.calibration import Calibration
from planner.core.values.cluster import ExecutorCost, Link
from planner.core.values.limits import MOST_BATCH, truncate
from planner.core.values.plan import Inputs, ProfileReference, RecomputePolicy, ScheduleName, memory_limit_of_device
from planner.core.values.precision import precision_option_of
from planner.core.values.profile import Profile
from planner.core.values.units import parse_us
from planner.solve.request import Request, Solver


def request_of(profile: Profile, reference: ProfileReference, options: SolverOptions) -> Request:
    """Return the solver request for the options of `solve`.

    Args:
        profile: The profile.
        reference: Reference from the plan to the profile.
        options: Options of `solve`.

    Raises:
        UsageError: An option is wrong, or contradicts another option or the profile.
        FileError: A file that an option names cannot be read.
    """
    schedule_path = schedule_file_path(options.schedule)
    lists = None if schedule_path is None else files.read_schedule(schedule_path)
    if lists is not None:
        options = options_for_schedule(options, lists, profile)
    links = links_of(options.links, link=options.link, nodes=options.nodes, inter_link=options.inter_link)
    calibration = resolve_calibration(options.calibration)
    cuts = resolve_balance(options.balance, profile) if options.balance is not None else None
    if lists is not None and cuts is not None:
        check_cuts(options, lists, cuts)
    solver = cast("Solver", texts.parse_choice("--solver", options.solver, Solver))
    return Request(
        inputs=_inputs(profile, reference, options, calibration=calibration, links=links, cuts=cuts),
        micro_batches=None
        if options.micro_batches == "auto"
        else texts.parse_integer("--micro-batches", options.micro_batches),
        balance=cuts,
        time_limit_s=texts.parse_duration_s("--time-limit", options.time_limit)
        if options.time_limit is not None
        else None,
        lists=lists,
        solver=solver,
    )


def ineffective_options(options: SolverOptions, inputs: Inputs) -> Iterator[str]:
    """Yield a note for each given option that has no effect because of other options."""
    if options.inter_link is not None and inputs.node_devices == 0:
        yield "`--inter-link` has no effect without `--nodes`: all devices are in one node"
    if inputs.replicas == 1:
        given = {"--allreduce": options.allreduce is not None, "--shard-optimizer": options.shard_optimizer}
        yield from (f"`{name}` has no effect with one replica: add `--replicas auto`" for name in given if given[name])
    if inputs.simplest and options.schedule != "auto":
        yield f"`--simplest` has no effect with `--schedule {options.schedule}`"
    if options.solver == "milp" and options.balance is not None:
        yield "`--solver milp` has no effect with `--balance`, because the cuts are given"


def _inputs(
    profile: Profile,
    reference: ProfileReference,
    options: SolverOptions,
    *,
    calibration: Calibration | None,
    links: tuple[Link, ...],
    cuts: tuple[int, ...] | None,
) -> Inputs:
    num_devices, node_devices = _devices(options.devices, options.nodes)
    recompute = _recompute(options.recompute, profile)
    only_gpipe = options.solver == "milp"
    is_file = schedule_file_path(options.schedule) is not None
    schedule = GIVEN if is_file else _schedule(str(options.schedule), profile, only_gpipe=only_gpipe)
    _check_run(options, profile)
    executor = profile.device.executor or ExecutorCost(overhead_us=0.0, link=Link())
    if calibration is not None:
        executor = calibrated_executor(calibration, profile.device.kind, executor)
    limits = _memory_limits(options.mem, num_devices, profile)
    headroom = headroom_of(options.headroom, profile, limits)
    batch = default_batch(profile, num_devices) if options.batch is None else options.batch
    return Inputs(
        profile=reference,
        model_digest=profile.model.digest,
        devices=num_devices,
        memory_bytes=tuple(memory_limit_of_device(limit, headroom) for limit in limits),
        speeds=texts.parse_speeds(options.speed, num_devices) if options.speed is not None else (),
        batch=texts.check_count("--batch", batch, "sample", MOST_BATCH),
        link=Link() if links else executor.link if options.link is None else texts.parse_link(options.link),
        node_devices=node_devices,
        links=links[: max(1, num_devices - 1)],
        reserve_bytes=_reserve(options.reserve, calibration, profile),
        headroom=headroom,
        compute=calibration.compute if calibration is not None else 1.0,
        step_ratio=calibration.step_ratio if calibration is not None else None,
        overhead_us=executor.overhead_us if options.overhead is None else parse_us(options.overhead, "--overhead "),
        schedule=schedule,
        # A balance means one stage per device, unless `--chunks` says otherwise.
        chunks=1 if cuts and schedule == "auto" and options.chunks == "auto" else _chunks(options.chunks, schedule),
        recompute=recompute,
        optimizer=profile.optimizer,
        dtype=precision_option_of(profile.environment.dtype),
        **recorded_values(options),
    )


def _check_run(options: SolverOptions, profile: Profile) -> None:
    if options.tokens is not None and options.samples is not None:
        raise UsageError(f"`--tokens {options.tokens}` and `--samples {options.samples}`: give one of them")
    if options.tokens is not None and not workload_of(profile).tokens:
        raise UsageError(
            f"`--tokens {options.tokens}`: the profile does not state the tokens of a sample",
            hint="give the length of the run in samples: `--samples 300M`",
        )


def _reserve(reserve: str | int | None, calibration: Calibration | None, profile: Profile) -> int:
    if reserve is None:
        return profile.device.reserve_bytes if calibration is None else calibration.reserve_bytes
    return texts.parse_size_bytes("--reserve", reserve)


def _memory_limits(mem: Sizes | None, devices: int, profile: Profile) -> tuple[int, ...]:
    if mem is not None:
        return texts.parse_memory_limits(mem, devices)
    if profile.device.memory_bytes == 0:
        raise UsageError(
            f"the profile does not state the memory of its device ({profile.device.kind})",
            hint="give the memory limit per device: `--mem 8GB`",
        )
    return (profile.device.memory_bytes,) * devices


def _devices(numbers: Numbers | None, nodes: str | None) -> tuple[int, int]:
    """Return the number of devices, and the number of devices per node; 0 if all are in one node."""
    devices = None if numbers is None else texts.parse_device_count(numbers)
    if nodes is None:
        if devices is None:
            raise UsageError("the number of devices is missing", hint="give `--devices 8` or `--nodes 4x8`")
        return devices, 0
    count, each = texts.parse_node_counts(nodes)
    total = count * each
    if devices is not None and devices > total:
        raise UsageError(
            f"`--devices {truncate(devices)}`, but `--nodes {nodes}` has {total}", hint="remove `--devices`"
        )
    return total if devices is None else devices, each


def _schedule(schedule: str, profile: Profile, *, only_gpipe: bool) -> ScheduleName:
    policy = texts.parse_choice("--schedule", schedule, SCHEDULE_CHOICES)
    # The program that trains on TPUs supports only GPipe.
    return GPIPE.name if policy == "auto" and (only_gpipe or profile.device.kind.startswith("tpu")) else policy


def _chunks(chunks: str | int, policy: ScheduleName) -> int:
    count = texts.parse_count_or_auto("--chunks", chunks)
    return count if may_choose_chunks(policy) else max(1, count)


def _recompute(recompute: str, profile: Profile) -> RecomputePolicy:
    policy = cast("RecomputePolicy", texts.parse_choice("--recompute", recompute, RecomputePolicy))
    differs = profile.proof.differs_recomputed if profile.proof is not None else ""
    if not differs or policy == "never":
        return policy
    if policy == "auto":
        return "never"
    raise UsageError(
        f"`--recompute {policy}`: recomputed stages of this model train differently ({differs})",
        hint="use `--recompute never`",
    )
