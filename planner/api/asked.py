"""What a user asks of the solver, every option resolved against the profile: the command's options to a `Request`."""

from typing import cast

from planner.api import texts
from planner.api.given_lists import check_cuts, for_lists, lists_of, lists_path
from planner.api.headroom import headroom_of
from planner.api.options.solving import SolverOptions
from planner.api.reading import calibration_of, cuts_of, links_of
from planner.api.texts import Numbers, Sizes
from planner.core.errors import UsageError
from planner.core.judge.calibration import calibrated_executor
from planner.core.schedule import GIVEN, GPIPE, SCHEDULE_CHOICES, schedules_for
from planner.core.values.calibration import Calibration
from planner.core.values.cluster import ExecutorCost, Link
from planner.core.values.limits import MOST_BATCH, short
from planner.core.values.plan import Inputs, ProfileReference, RecomputePolicy, ScheduleName
from planner.core.values.precision import precision_of
from planner.core.values.profile import Profile
from planner.core.values.units import parse_us
from planner.solve.request import Request, Solver


def request_of(profile: Profile, reference: ProfileReference, asked: SolverOptions) -> Request:
    """The question behind the options of `solve`, about a profile that the plan refers to as `reference`.

    Raises:
        UsageError: An option is wrong, or does not go with another or with the profile.
        FileError: A file that an option names cannot be read.
    """
    lists = lists_of(asked.schedule)
    if lists is not None:
        asked = for_lists(asked, lists, profile)
    links = links_of(asked.links, link=asked.link, nodes=asked.nodes, inter_link=asked.inter_link)
    calibration = calibration_of(asked.calibration)
    cuts = cuts_of(asked.balance, profile) if asked.balance is not None else None
    if lists is not None and cuts is not None:
        check_cuts(asked, lists, cuts)
    solver = cast("Solver", texts.choice("--solver", asked.solver, Solver))
    return Request(
        inputs=_inputs(profile, reference, asked, calibration=calibration, links=links, cuts=cuts),
        micro_batches=None if asked.micro_batches == "auto" else texts.one("--micro-batches", asked.micro_batches),
        balance=cuts,
        time_limit_s=parse_us(asked.time_limit) / 1e6 if asked.time_limit is not None else None,
        lists=lists,
        solver=solver,
    )


def headroom_asked(profile: Profile, asked: SolverOptions) -> float:
    """The share of every cap that is to stay free; raises `UsageError` as `request_of` does."""
    devices, _ = _devices(asked.devices, asked.nodes)
    return headroom_of(asked.headroom, profile, _caps(asked.mem, devices, profile))


def _inputs(
    profile: Profile,
    reference: ProfileReference,
    asked: SolverOptions,
    *,
    calibration: Calibration | None,
    links: tuple[Link, ...],
    cuts: tuple[int, ...] | None,
) -> Inputs:
    """What a plan records of the question; files that the options name are read."""
    num_devices, node_devices = _devices(asked.devices, asked.nodes)
    recompute = _recompute(asked.recompute, profile)
    only_gpipe = asked.solver == "milp" or asked.devices_any_order
    schedule = GIVEN if lists_path(asked.schedule) else _schedule(str(asked.schedule), profile, only_gpipe=only_gpipe)
    executor = profile.device.executor or ExecutorCost(overhead_us=0.0, link=Link())
    if calibration is not None:
        executor = calibrated_executor(calibration, profile.device.kind, executor)
    caps = _caps(asked.mem, num_devices, profile)
    kept = 1 - headroom_of(asked.headroom, profile, caps)
    largest = max(profile.micro_batch_sizes)
    return Inputs(
        profile=reference,
        model_digest=profile.model.digest,
        devices=num_devices,
        memory_bytes=tuple(int(cap * kept) for cap in caps),
        speeds=texts.speeds(asked.speed, num_devices) if asked.speed is not None else (),
        batch=largest if asked.batch is None else texts.number_of("--batch", asked.batch, "sample", MOST_BATCH),
        link=Link() if links else executor.link if asked.link is None else texts.link(asked.link),
        inter_link=texts.link(asked.inter_link, "--inter-link") if asked.inter_link is not None else None,
        node_devices=node_devices,
        links=links[: max(1, num_devices - 1)],
        allreduce=texts.link(asked.allreduce, "--allreduce") if asked.allreduce is not None else None,
        reserve_bytes=_reserve(asked.reserve, calibration, profile),
        compute=calibration.compute if calibration is not None else 1.0,
        step_ratio=calibration.step_ratio if calibration is not None else None,
        overhead_us=executor.overhead_us if asked.overhead is None else parse_us(asked.overhead),
        schedule=schedule,
        # Cuts are for one stage on each device, unless it is said that they are not.
        chunks=1 if cuts and schedule == "auto" and asked.chunks == "auto" else _chunks(asked.chunks, schedule),
        replicas=texts.count_or_auto("--replicas", asked.replicas),
        together=tuple(texts.names("--together", group) for group in asked.together or ()),
        apart=tuple(texts.names("--apart", group) for group in asked.apart or ()),
        any_order=asked.devices_any_order,
        recompute=recompute,
        optimizer=profile.optimizer,
        dtype=precision_of(profile.environment.dtype),
        min_micro_batch=texts.one("--min-micro-batch", asked.min_micro_batch),
        extrapolate=asked.extrapolate,
    )


def _reserve(reserve: str | int | None, calibration: Calibration | None, profile: Profile) -> int:
    if reserve is None:
        return profile.device.reserve_bytes if calibration is None else calibration.reserve_bytes
    return texts.size(reserve)


def _caps(mem: Sizes | None, devices: int, profile: Profile) -> tuple[int, ...]:
    if mem is not None:
        return texts.caps(mem, devices)
    if profile.device.memory_bytes == 0:
        raise UsageError(
            f"the profile does not say how much memory its device has ({profile.device.kind})",
            hint="give the cap per device: `--mem 8GB`",
        )
    return (profile.device.memory_bytes,) * devices


def _devices(asked: Numbers | None, nodes: str | None) -> tuple[int, int]:
    """How many devices there are, and how many in each node (0 where nodes make no difference)."""
    devices = None if asked is None else texts.device_count(asked)
    if nodes is None:
        if devices is None:
            raise UsageError("how many devices are there?", hint="`--devices 8`, or `--nodes 4x8`")
        return devices, 0
    count, each = texts.nodes(nodes)
    total = count * each
    if devices is not None and devices > total:
        raise UsageError(
            f"`--devices {short(devices)}`, but `--nodes {nodes}` has {total}", hint="leave `--devices` out"
        )
    return total if devices is None else devices, each


def _schedule(schedule: str, profile: Profile, *, only_gpipe: bool) -> ScheduleName:
    """What is asked; where the schedule is left open, GPipe if only that can do the rest of what is asked."""
    policy = texts.choice("--schedule", schedule, SCHEDULE_CHOICES)
    # What trains on a TPU is the JAX program, which knows one schedule.
    return GPIPE.name if policy == "auto" and (only_gpipe or profile.device.kind.startswith("tpu")) else policy


def _chunks(chunks: str | int, policy: ScheduleName) -> int:
    count = texts.count_or_auto("--chunks", chunks)
    may_choose = policy != GIVEN and any(allowed.is_chunked for allowed in schedules_for(policy))
    return count if may_choose else max(1, count)


def _recompute(recompute: str, profile: Profile) -> RecomputePolicy:
    policy = cast("RecomputePolicy", texts.choice("--recompute", recompute, RecomputePolicy))
    differs = profile.proof.differs_recomputed if profile.proof is not None else ""
    if not differs or policy == "never":
        return policy
    if policy == "auto":
        return "never"
    raise UsageError(
        f"`--recompute {policy}`: recomputed stages of this model train differently ({differs})",
        hint="use `--recompute never`",
    )
