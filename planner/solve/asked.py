"""What a user asks of the solver, every option resolved against the profile: the command's options to a `Request`."""

from collections.abc import Sequence
from typing import cast

from planner.core.cost.calibration import Calibration, calibrated_executor
from planner.core.errors import UsageError
from planner.core.schedule import GPIPE, SCHEDULE_CHOICES, schedules_for
from planner.core.values import options
from planner.core.values.cluster import ExecutorCost, Link
from planner.core.values.limits import MOST_BATCH, MOST_DEVICES, at_most, short
from planner.core.values.options import Numbers, Sizes
from planner.core.values.plan import DEFAULT_SCHEDULE, Inputs, ProfileReference, RecomputePolicy, ScheduleName
from planner.core.values.precision import precision_of
from planner.core.values.profile import Profile
from planner.core.values.units import parse_us
from planner.solve.search import Request, Solver

__all__ = ["request_of"]


def request_of(
    profile: Profile,
    reference: ProfileReference,
    *,
    devices: int | None = None,
    mem: Sizes | None = None,
    batch: int | None = None,
    micro_batches: str | int = "auto",
    speed: str | float | Sequence[float] | None = None,
    schedule: str = DEFAULT_SCHEDULE,
    chunks: str | int = "auto",
    replicas: str | int = "1",
    recompute: str = "auto",
    link: str | Link | None = None,
    links: Sequence[Link] = (),
    nodes: str | None = None,
    inter_link: str | Link | None = None,
    allreduce: str | Link | None = None,
    overhead: str | None = None,
    reserve: str | int | None = None,
    calibration: Calibration | None = None,
    headroom: str | float = "0%",
    balance: Numbers | None = None,
    together: Sequence[str | Sequence[str]] | None = None,
    apart: Sequence[str | Sequence[str]] | None = None,
    solver: str = "auto",
    time_limit: str | None = None,
    devices_any_order: bool = False,
    extrapolate: bool = False,
) -> Request:
    """The question behind the options of `gpipe-plan solve`, which carry the same names here.

    Raises:
        UsageError: An option is wrong, or does not go with another or with the profile.
    """
    num_devices, node_devices = _devices(devices, nodes)
    recomputation = _recompute(recompute, profile)
    chosen = cast("Solver", options.choice("--solver", solver, Solver))
    only_gpipe = recomputation == "layers" or chosen == "milp" or devices_any_order
    policy = _schedule(schedule, profile, only_gpipe=only_gpipe)
    # Cuts are for one stage on each device, unless it is said that they are not.
    cuts = options.integers("--balance", balance) if balance is not None else None
    executor = _executor(profile, calibration)
    kept = 1 - options.share(headroom)
    inputs = Inputs(
        profile=reference,
        model_digest=profile.model.digest,
        devices=num_devices,
        memory_bytes=tuple(int(cap * kept) for cap in _caps(mem, num_devices, profile)),
        speeds=options.speeds(speed, num_devices) if speed is not None else (),
        batch=_batch(batch, profile),
        link=Link() if links else executor.link if link is None else options.link(link),
        inter_link=options.link(inter_link, "--inter-link") if inter_link is not None else None,
        node_devices=node_devices,
        links=tuple(links)[: max(1, num_devices - 1)],
        allreduce=options.link(allreduce, "--allreduce") if allreduce is not None else None,
        reserve_bytes=_reserve(reserve, calibration, profile),
        compute=calibration.compute if calibration is not None else 1.0,
        overhead_us=executor.overhead_us if overhead is None else parse_us(overhead),
        schedule=policy,
        chunks=1 if cuts and policy == "auto" and chunks == "auto" else _chunks(chunks, policy),
        replicas=options.count_or_auto("--replicas", replicas),
        together=tuple(options.names("--together", group) for group in together or ()),
        apart=tuple(options.names("--apart", group) for group in apart or ()),
        any_order=devices_any_order,
        recompute=recomputation,
        optimizer=profile.optimizer,
        dtype=precision_of(profile.environment.dtype),
        extrapolate=extrapolate,
    )
    return Request(
        inputs=inputs,
        micro_batches=None if micro_batches == "auto" else options.one("--micro-batches", micro_batches),
        balance=cuts,
        time_limit_s=parse_us(time_limit) / 1e6 if time_limit is not None else None,
        solver=chosen,
    )


def _executor(profile: Profile, calibration: Calibration | None) -> ExecutorCost:
    known = profile.device.executor or ExecutorCost(overhead_us=0.0, link=Link())
    return known if calibration is None else calibrated_executor(calibration, profile.device.kind, known)


def _reserve(reserve: str | int | None, calibration: Calibration | None, profile: Profile) -> int:
    if reserve is None:
        return profile.device.reserve_bytes if calibration is None else calibration.reserve_bytes
    return options.size(reserve)


def _caps(mem: Sizes | None, devices: int, profile: Profile) -> tuple[int, ...]:
    if mem is not None:
        return options.caps(mem, devices)
    if profile.device.memory_bytes == 0:
        raise UsageError(
            f"the profile does not say how much memory its device has ({profile.device.kind})",
            hint="give the cap per device: `--mem 8GB`",
        )
    return (profile.device.memory_bytes,) * devices


def _devices(devices: int | None, nodes: str | None) -> tuple[int, int]:
    """How many devices there are, and how many in each node (0 where nodes make no difference)."""
    if nodes is None:
        if devices is None:
            raise UsageError("how many devices are there?", hint="`--devices 8`, or `--nodes 4x8`")
        if devices < 1:
            raise UsageError(f"`--devices {short(devices)}`: at least 1 device is needed")
        return at_most("--devices", devices, MOST_DEVICES, "devices"), 0
    count, each = options.nodes(nodes)
    total = count * each
    if devices is not None and not 1 <= devices <= total:
        raise UsageError(
            f"`--devices {short(devices)}`, but `--nodes {nodes}` has {total}", hint="leave `--devices` out"
        )
    return total if devices is None else devices, each


def _schedule(schedule: str, profile: Profile, *, only_gpipe: bool) -> ScheduleName:
    """What is asked; where the schedule is left open, GPipe if only that can do the rest of what is asked."""
    policy = options.choice("--schedule", schedule, SCHEDULE_CHOICES)
    # What trains on a TPU is the JAX program, which knows one schedule.
    return GPIPE.name if policy == "auto" and (only_gpipe or profile.device.kind.startswith("tpu")) else policy


def _chunks(chunks: str | int, policy: ScheduleName) -> int:
    if any(allowed.is_chunked for allowed in schedules_for(policy)):
        return options.count_or_auto("--chunks", chunks)
    if str(chunks) not in ("auto", "1"):
        raise UsageError(f"`--chunks {chunks}` needs `--schedule interleaved`, not `{policy}`")
    return 1


def _recompute(recompute: str, profile: Profile) -> RecomputePolicy:
    policy = cast("RecomputePolicy", options.choice("--recompute", recompute, RecomputePolicy))
    differs = profile.proof.differs_recomputed if profile.proof is not None else ""
    if not differs or policy == "never":
        return policy
    if policy == "auto":
        return "never"
    raise UsageError(
        f"`--recompute {policy}`: stages of this model that are recomputed do not come out the same ({differs})",
        hint="use `--recompute never`",
    )


def _batch(batch: int | None, profile: Profile) -> int:
    if batch is None:
        return max(profile.micro_batch_sizes)
    if batch < 1:
        raise UsageError(f"`--batch {short(batch)}`: at least 1 sample is needed")
    return at_most("--batch", batch, MOST_BATCH, "samples")
