"""Errors for requests without a plan."""

from collections.abc import Sequence
from dataclasses import replace

from planner.core.cost.width import usable_widths
from planner.core.errors import InfeasibleError, SolverError, UsageError
from planner.core.values.plan import Inputs
from planner.core.values.profile import Profile
from planner.core.values.units import counted
from planner.solve.cases import cases_of, micro_batch_counts
from planner.solve.request import Request
from planner.solve.space.case import Case


def infeasible(profile: Profile, request: Request, cases: Sequence[Case]) -> InfeasibleError:
    """Return the error for a request without a plan: the obstacle and what would fit."""
    if not cases:
        return _too_few(profile, request)

    def cases_for(other: Profile, inputs: Inputs, micro_batches: int | None) -> Sequence[Case]:
        try:
            return cases_of(other, replace(request, inputs=inputs, micro_batches=micro_batches))
        except UsageError:
            return []  # the given cuts or rules leave no case

    from planner.solve.explain import InfeasibleQuery, explain_infeasible  # noqa: PLC0415 - most questions have an answer

    return explain_infeasible(
        InfeasibleQuery(
            profile=profile,
            inputs=request.inputs,
            micro_batches=request.micro_batches,
            balance=request.balance,
            schedules=request.schedules,
            cases=tuple(cases),
            cases_for=cases_for,
        )
    )


def _too_few(profile: Profile, request: Request) -> InfeasibleError:
    """Return the error for too few devices or layers for the schedule's stages on two devices."""
    inputs, schedule = request.inputs, request.schedules[0]
    groups = inputs.cluster_of(min(usable_widths(profile, inputs))).num_devices
    devices = counted(groups // max(1, inputs.replicas), "device")
    chunks = (schedule.exact_chunks or max(2, inputs.chunks)) if schedule.is_chunked else 1
    try:
        schedule.refuse(1, max(micro_batch_counts(profile, request)), chunks)
    except UsageError as error:
        return InfeasibleError(error.message, hint=error.hint)  # even one device is too many for the micro-batches
    return InfeasibleError(
        f"{schedule.title} needs at least 2 devices and {2 * chunks} layers for {counted(chunks, 'stage')} on each, "
        f"not {devices} and {counted(len(profile.layers), 'layer')}",
        hint="use `--schedule 1f1b` or `--schedule gpipe`",
    )


def out_of_time(request: Request) -> SolverError:
    """Return the error for a request whose time limit passed before a plan was found."""
    return SolverError(
        f"no plan was found within the time limit of {request.time_limit_s:g} s",
        hint="allow more with `--time-limit`, or fix `--micro-batches`",
    )
