"""Explanation why no plan fits, and the smallest changes with which a plan would fit.

For GPipe and 1F1B, a dynamic program finds the cuts that need the least memory. For other schedules, a short local
search from even cuts looks for cuts that fit, so its result is advice, not a bound.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from planner.core.cost.arrays import FloatArray, IntArray
from planner.core.cost.width import map_layers, usable_tensor_parallel_widths
from planner.core.errors import InfeasibleError, SolverError, UsageError
from planner.core.schedule import GPIPE, ONE_FORWARD_ONE_BACKWARD, SPLITTING, Schedule
from planner.core.values.plan import Inputs
from planner.core.values.profile import LayerProfile, Profile
from planner.core.values.units import bytes_option, format_bytes, pluralize
from planner.solve.cases import cases_of, micro_batch_counts
from planner.solve.request import Request
from planner.solve.space.case import Case
from planner.solve.space.partitions import Evaluator, move_one_cut
from planner.solve.space.tables import max_stage_layers, values_at_first_layer

_MOST_DEVICES = 1024
"""Largest number of devices that a hint suggests."""

_MOST_ACTIONS = 20_000
"""Largest number of actions in a step for which hints are computed, so that they do not take longer than the search."""

_ROUNDS = 100  # moves of a descent, at most


def infeasible_error(profile: Profile, request: Request, cases: Sequence[Case]) -> InfeasibleError:
    """Return the error for a request without a plan. It names the obstacle, and changes with which a plan fits.

    Args:
        profile: The profile.
        request: The request.
        cases: Combinations of schedule, replicas and micro-batches that were searched.
    """
    if not cases:
        return _too_few_devices(profile, request)
    # The least memory is known only for schedules with known points in the step, so prefer these schedules.
    known = _with_known_moments(cases)
    if not known:
        return _explain_by_descent(profile, request, cases)
    inputs, smallest = request.inputs, [smallest_limit_bytes(case) for case in known]
    best = min(range(len(known)), key=lambda n: (smallest[n], known[n].micro_batches))
    if not np.isfinite(smallest[best]):
        devices = _devices_text(inputs, cases)
        return InfeasibleError(
            f"no cuts for {devices} satisfy `--together` and `--apart`, even with unlimited memory",
            hint="change `--together` or `--apart`, or allow more `--devices`",
        )
    hints = [
        _smallest_limit(inputs, cases, known[best], smallest[best]),
        *_hints(profile, request, known),
    ]
    reason = (
        _reason_of_layer(inputs, known) or _reason_of_state(inputs, cases) or _reason_of_stages(inputs, known[best])
        if request.balance is None
        else _reason_of_given_stage(known[best], request.balance)
    )
    return InfeasibleError(f"no plan fits {_limits_text(inputs, cases)}: {reason}", hint="; ".join(hints))


def state_exceeds_memory(case: Case) -> bool:
    """Return True if parameters and optimizer state alone need more memory than all devices of a pipeline have."""
    return _least_state_bytes(case) > sum(case.limits_bytes)


def _least_state_bytes(case: Case) -> float:
    # Layers that share a tensor may be in one stage, which then has it once.
    shared = sum(tie.parameter_bytes + tie.optimizer_bytes for tie in case.costs.ties)
    return float(case.costs.state.always.sum()) - shared


def _reason_of_layer(inputs: Inputs, cases: Sequence[Case]) -> str:
    alone = [(_least_stage_bytes(case, 1, 0)[1:, -1] + case.cluster.reserve_bytes, case) for case in cases]
    need, case = min(alone, key=lambda each: each[0].max())
    worst, limit = int(need.argmax()), max(inputs.memory_bytes)
    if not limit < need[worst] < np.inf:
        return ""
    name, m, excess = case.costs.names[worst], case.micro_batches, format_bytes(need[worst] - limit)
    return f'layer "{name}" alone needs {format_bytes(need[worst])} with M = {m}, {excess} over'


def _reason_of_state(inputs: Inputs, cases: Sequence[Case]) -> str:
    if not all(map(state_exceeds_memory, cases)):
        return ""
    state_bytes = min(case.replicas * case.cluster.tensor_parallel * _least_state_bytes(case) for case in cases)
    devices, have = _devices_text(inputs, cases), "has" if inputs.devices == 1 else "together have"
    total_bytes = sum(inputs.memory_bytes) - inputs.devices * inputs.reserve_bytes
    return (
        f"parameters and optimizer state alone take {format_bytes(state_bytes)}, "
        f"{devices} {have} {format_bytes(total_bytes)}"
    )


def _too_few_devices(profile: Profile, request: Request) -> InfeasibleError:
    inputs, schedule = request.inputs, request.schedules[0]
    groups = inputs.cluster_of_groups(min(usable_tensor_parallel_widths(profile, inputs))).num_devices
    devices = pluralize(groups // max(1, inputs.replicas), "device")
    chunks = (schedule.exact_chunks or max(2, inputs.chunks)) if schedule.is_chunked else 1
    try:
        schedule.check_supported(1, max(micro_batch_counts(profile, request)), chunks)
    except UsageError as error:
        return InfeasibleError(error.message, hint=error.hint)  # even one device is too many for the micro-batches
    return InfeasibleError(
        f"{schedule.title} needs at least 2 devices and {2 * chunks} layers for {pluralize(chunks, 'stage')} on each, "
        f"not {devices} and {pluralize(len(profile.layers), 'layer')}",
        hint="use `--schedule 1f1b` or `--schedule gpipe`",
    )


def out_of_time_error(request: Request) -> SolverError:
    """Return the error for a request whose time limit passed before a plan was found."""
    if request.time_limit_s is None:
        return SolverError("the search was stopped before a plan was found")
    return SolverError(
        f"no plan was found within the time limit of {request.time_limit_s:g} s",
        hint="allow more time with `--time-limit`, or fix `--micro-batches`",
    )


def _explain_by_descent(profile: Profile, request: Request, cases: Sequence[Case]) -> InfeasibleError:
    inputs = request.inputs
    # Smaller micro-batches usually need less memory, so compute the figures for the largest M.
    most = max(case.micro_batches for case in cases)
    least = min(_least_excess_found_bytes(case) for case in cases if case.micro_batches == most)
    titles = " or ".join(dict.fromkeys(case.schedule.title for case in cases))
    others = tuple(_other_schedules(profile, request))
    if not 0 < least < np.inf or len(set(inputs.memory_bytes)) > 1:
        return InfeasibleError(f"no {titles} plan fits {_limits_text(inputs, cases)}", hint="; ".join(others))
    limit = inputs.memory_bytes[0] + least
    cuts = "the given cuts" if request.balance is not None else "the best cuts found"
    enough = f"with {_devices_text(inputs, cases)} `--mem` {_mem_option(inputs, limit)} is enough (M = {most})"
    return InfeasibleError(
        f"no {titles} plan fits {_limits_text(inputs, cases)}: with {cuts} and M = {most}, a device needs "
        f"{format_bytes(limit)}, {format_bytes(least)} over",
        hint="; ".join((enough, *others)),
    )


def _smallest_limit(inputs: Inputs, cases: Sequence[Case], best: Case, smallest_bytes: float) -> str:
    known, devices = _with_known_moments(cases), _devices_text(inputs, cases)
    side_by_side = f"{pluralize(best.replicas, 'replica')}, " if inputs.replicas != 1 else ""
    if best.cluster.tensor_parallel > 1:
        side_by_side += f"{best.cluster.tensor_parallel} GPUs per layer, "
    limit = f"{_mem_option(inputs, smallest_bytes)} ({side_by_side}M = {best.micro_batches})"
    if len(known) == len(cases):
        return f"with {devices} the smallest `--mem` is {limit}"
    titles = " or ".join(dict.fromkeys(case.schedule.title for case in known))
    return f"under {titles}, {devices} need at least `--mem` {limit}"


def _hints(profile: Profile, request: Request, cases: Sequence[Case]) -> Iterator[str]:
    inputs = request.inputs
    if request.balance is None and len(set(inputs.memory_bytes)) == 1:
        count = _fewest_devices(profile, request, cases)
        if count is not None:
            option, limit = _devices_option(inputs, count[0]), format_bytes(inputs.memory_bytes[0])
            yield f"`{option}` fits in {limit} (M = {count[1]})"
    if request.micro_batches is not None:
        others = _known_cases(profile, replace(request, micro_batches=None))
        more = min((case.micro_batches for case in others if _fits(case)), default=None)
        if more is not None:
            yield f"M = {more} fits: leave `--micro-batches` out"
    if inputs.recompute not in ("auto", "layers") and _any_fits(profile, _changed(request, recompute="auto")):
        yield "`--recompute auto` fits"
    sharded = _changed(request, shard_optimizer=True)
    if inputs.replicas != 1 and inputs != sharded.inputs and _any_fits(profile, sharded):
        yield "`--shard-optimizer` fits, for engines that can divide the optimizer among replicas"
    yield from _other_schedules(profile, request)
    for name, other in _other_optimizers(profile):
        if _any_fits(other, request):
            replaced = " (replaces `build_optimizer`)" if profile.optimizer == "build_optimizer" else ""
            yield f"with {name} as optimizer a plan fits: profile with `--optimizer {name}`{replaced}"
            break


def _fewest_devices(profile: Profile, request: Request, cases: Sequence[Case]) -> tuple[int, int] | None:
    count, inputs = min(filter(None, map(_fewest_devices_of_case, cases)), default=None), request.inputs
    if count is None or inputs.replicas:
        return count
    # More devices also allow more replicas, whose micro-batches may be smaller.
    more = _changed(request, devices=count[0], memory_bytes=inputs.memory_bytes[:1] * count[0], speeds=(), links=())
    return min(filter(None, map(_fewest_devices_of_case, _known_cases(profile, more))), default=None)


def _other_schedules(profile: Profile, request: Request) -> Iterator[str]:
    if request.balance is not None and any(schedule.is_chunked for schedule in request.schedules):
        return  # the cuts are for several stages per device
    names = {schedule.name for schedule in request.schedules}
    # No schedule with known memory needs less than 1F1B.
    known: tuple[Schedule, ...] = (
        (ONE_FORWARD_ONE_BACKWARD, GPIPE) if ONE_FORWARD_ONE_BACKWARD.name not in names else ()
    )
    for schedule in known:
        other = _changed(request, schedule=schedule.name, chunks=1)
        if schedule.name not in names and _any_fits(profile, other):
            yield f"`--schedule {schedule.name}` fits"
            return
    if request.balance is not None:
        return  # the cuts are for one stage per device
    for schedule in SPLITTING:
        other = _changed(request, schedule=schedule.name, chunks=0)
        if schedule.name not in names and _descent_finds_fit(_cases_of(profile, other)):
            yield f"`--schedule {schedule.name}` fits"
            return


def _descent_finds_fit(cases: Sequence[Case]) -> bool:
    most = max((case.micro_batches for case in cases), default=0)
    able = (
        case
        for case in cases
        if case.micro_batches == most and not case.costs.is_split_backward_assumed and not state_exceeds_memory(case)
    )
    return any(_least_excess_found_bytes(case) <= 0 for case in able)


def _changed(request: Request, **inputs: Any) -> Request:
    return replace(request, inputs=replace(request.inputs, **inputs))


def _cases_of(profile: Profile, request: Request) -> list[Case]:
    try:
        return cases_of(profile, request)
    except UsageError:
        return []


def _known_cases(profile: Profile, request: Request) -> list[Case]:
    return _with_known_moments(_cases_of(profile, request))


def _with_known_moments(cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if case.schedule.has_known_peak_points]


def _any_fits(profile: Profile, request: Request) -> bool:
    return any(map(_fits, _known_cases(profile, request)))


def _other_optimizers(profile: Profile) -> Iterator[tuple[str, Profile]]:
    for name, copies in (("momentum", 1), ("sgd", 0)):
        other = map_layers(profile, partial(_with_states, copies=copies))
        if sum(a.optimizer_bytes for a in other.layers) < sum(a.optimizer_bytes for a in profile.layers):
            yield name, other


def _with_states(layer: LayerProfile, copies: int) -> LayerProfile:
    state = copies * layer.created_gradient_bytes
    return replace(layer, optimizer_bytes=state, optimizer_peak_bytes=0, optimizer_boundary_peak_bytes=0)


def smallest_limit_bytes(case: Case) -> float:
    """Return the smallest memory limit in bytes for which a plan fits, if all devices have this limit.

    The limit includes the reserve of the cluster. It is infinite if no cuts are allowed.
    """
    static = case.costs.state.always
    guess = max(1.0, float(static.sum()) / case.num_devices, float(static.max(initial=0.0)))
    while True:
        most_layers = max_stage_layers(case.costs, longest_us=np.inf, limit_bytes=guess)
        least = _least_excess_bytes(case, most_layers, (-case.cluster.reserve_bytes,) * case.num_devices)
        # Stages longer than `most_layers` need more than `guess` for their parameters alone.
        if least - case.cluster.reserve_bytes <= guess or most_layers == case.costs.num_layers:
            return least
        guess = least if np.isfinite(least) else 2 * guess


def _least_excess_bytes(case: Case, most_layers: int, limits_bytes: Sequence[float]) -> float:
    # Return the smallest number for which some cuts exceed no device's limit by more bytes; 0 or less if some cuts fit.
    # Stages of more than `most_layers` layers are not considered.
    least, has_one_table = np.inf, len(set(limits_bytes)) == 1 and case.schedule.is_forwards_first
    # Under 1F1B the memory of a stage depends on the number of later stages. Its limit depends on its own index.
    for count in range(1, case.num_devices + 1):
        if count < case.num_devices and has_one_table:
            continue
        best = np.where(np.arange(case.costs.num_layers + 1) == 0, -np.inf, np.inf)
        for position in range(count):
            need = _least_stage_bytes(case, most_layers, count - 1 - position) - limits_bytes[position]
            longer = np.maximum(values_at_first_layer(best, most_layers), need).min(axis=1)
            best = np.minimum(best, longer) if has_one_table else longer
        least = min(least, float(best[-1]))
    return least


def _fits(case: Case) -> bool:
    most_layers = max_stage_layers(case.costs, longest_us=np.inf, limit_bytes=max(case.limits_bytes))
    return _least_excess_bytes(case, most_layers, case.limits_bytes) <= 0


def _least_stage_bytes(case: Case, most_layers: int, num_later: int) -> FloatArray:
    need = case.memory_table(most_layers, num_later).smallest()
    ends = np.arange(case.costs.num_layers + 1)[:, None]
    return np.where(case.rules.forbids(ends + np.arange(-most_layers, 0), ends), np.inf, need)


def _fewest_devices_of_case(case: Case) -> tuple[int, int] | None:
    # All devices are assumed to have the memory limit of the first one.
    limit = case.limits_bytes[0]
    most_layers = max_stage_layers(case.costs, longest_us=np.inf, limit_bytes=limit)
    most = int(min(_MOST_DEVICES, case.costs.num_layers, case.schedule.most_devices(case.micro_batches)))
    layers = np.arange(case.costs.num_layers + 1)
    behind = layers == case.costs.num_layers
    # Go from the last stage to the first, so that the number of later stages is known (1F1B).
    for count in range(1, most + 1):
        fits = _least_stage_bytes(case, most_layers, count - 1) <= limit
        ends = np.flatnonzero(behind)
        behind = np.isin(layers, (ends[:, None] + np.arange(-most_layers, 0))[fits[ends]])
        if behind[0]:
            return count * case.replicas * case.cluster.tensor_parallel, case.micro_batches
        if not behind.any():
            return None
    return None


def _reason_of_given_stage(case: Case, balance: Sequence[int]) -> str:
    need = _least_stage_bytes(case, case.costs.num_layers, 0)
    ends = np.cumsum(balance)
    over = [
        float(need[end, case.costs.num_layers - count]) - limit
        for end, count, limit in zip(ends, balance, case.limits_bytes, strict=False)
    ]
    stage = int(np.argmax(over))
    total = format_bytes(over[stage] + case.limits_bytes[stage] + case.cluster.reserve_bytes)
    excess = format_bytes(over[stage])
    return f"stage {stage} of the given cuts needs {total} with M = {case.micro_batches}, {excess} over"


def _reason_of_stages(inputs: Inputs, case: Case) -> str:
    m, limits = case.micro_batches, [limit + case.cluster.reserve_bytes for limit in case.limits_bytes]
    if inputs.together or inputs.apart:
        return f"no cuts that satisfy `--together` and `--apart` fit (M = {m})"
    cannot = f"every layer fits alone, but {pluralize(case.num_devices, 'stage')} cannot hold them all"
    if len(set(limits)) == 1:
        smallest = smallest_limit_bytes(case)
        excess_bytes = format_bytes(smallest - limits[0])
        return f"{cannot}; the evenest cut needs {format_bytes(smallest)} with M = {m}, {excess_bytes} over"
    wide = max_stage_layers(case.costs, longest_us=np.inf, limit_bytes=2 * max(limits))
    least = _least_excess_bytes(case, wide, case.limits_bytes)
    return f"{cannot}; with the best cuts and M = {m}, a stage is {format_bytes(least)} over its memory limit"


def _mem_option(inputs: Inputs, limit_bytes: float) -> str:
    return bytes_option(inputs.device_memory_for_limit(int(limit_bytes)))


def _devices_text(inputs: Inputs, cases: Sequence[Case]) -> str:
    grouped = any(case.cluster.tensor_parallel > 1 for case in cases)
    return pluralize(inputs.devices, "GPU" if grouped else "device")


def _devices_option(inputs: Inputs, count: int) -> str:
    nodes = -(-count // inputs.node_devices) if inputs.node_devices else 1
    return f"--nodes {nodes}x{inputs.node_devices}" if nodes > 1 else f"--devices {count}"


def _limits_text(inputs: Inputs, cases: Sequence[Case]) -> str:
    less = f", without {100 * inputs.headroom:.4g} % headroom" if inputs.headroom else ""
    if len(set(inputs.memory_bytes)) == 1:
        each = format_bytes(inputs.memory_bytes[0])
        return f"{each} on each of {_devices_text(inputs, cases)}{less}"
    return f"the memory limits {', '.join(format_bytes(limit) for limit in inputs.memory_bytes)}{less}"


def _least_excess_found_bytes(case: Case) -> float:
    # Only the largest number of devices that has allowed partitions is searched: fewer devices have less memory.
    # Infinite if a rule forbids all partitions, or if the search would take too long.
    counts = range(case.num_devices, 0, -1)
    each = (_least_excess_of_descent_bytes(Evaluator(case, num_devices)) for num_devices in counts)
    return next((least for least in each if least < np.inf), np.inf)


def _least_excess_of_descent_bytes(evaluator: Evaluator) -> float:
    case, num_layers, num_stages = evaluator.case, evaluator.case.costs.num_layers, evaluator.num_stages
    if evaluator.num_actions > _MOST_ACTIONS or not evaluator.can_run:
        return np.inf
    balance = case.rules.balance
    cuts = np.cumsum([0, *balance]) if balance else np.linspace(0, num_layers, num_stages + 1).astype(np.int64)
    starts = np.repeat(np.array(evaluator.allowed)[:, None], num_stages, axis=1)
    best = int(_excess_bytes(evaluator, np.repeat(cuts[None], len(starts), axis=0), starts).argmin())
    return _descend_to_least_excess(evaluator, cuts, starts[best])


def _descend_to_least_excess(evaluator: Evaluator, cuts: IntArray, choices: IntArray) -> float:
    allowed = evaluator.allowed
    least = _excess_bytes(evaluator, cuts[None], choices[None])[0]
    for _ in range(_ROUNDS):
        if least <= 0:
            break
        other_cuts = cuts[None][:0] if evaluator.case.rules.balance else move_one_cut(cuts)
        changed = [
            (*choices[:s], n, *choices[s + 1 :]) for s in range(len(choices)) for n in allowed if n != choices[s]
        ]
        every_cuts = np.concatenate([other_cuts, np.repeat(cuts[None], len(changed), axis=0)])
        kept = np.repeat(choices[None], len(other_cuts), axis=0)
        every_choice = np.concatenate([kept, np.array(changed, dtype=np.int64).reshape(-1, len(choices))])
        if not len(every_cuts):
            break
        over = _excess_bytes(evaluator, every_cuts, every_choice)
        at = int(np.argmin(over))
        if not over[at] < least:
            break
        least, cuts, choices = over[at], every_cuts[at], every_choice[at]
    return float(least)


def _excess_bytes(evaluator: Evaluator, cuts: IntArray, choices: IntArray) -> FloatArray:
    return np.where(evaluator.case.rules.allows(cuts), evaluator.excess_bytes(cuts, choices).max(axis=1), np.inf)
