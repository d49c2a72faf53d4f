"""Insight into a plan: bottleneck, gains from more memory, devices or bandwidth, and effects of measurement noise."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from planner.core.cost.evaluate import Evaluation
from planner.core.cost.width import map_layers
from planner.core.errors import PlannerError
from planner.core.values.cluster import Link
from planner.core.values.plan import FrontierPoint, Inputs, Insight, Noise, Plan, WhatIf
from planner.core.values.profile import LayerProfile, Profile
from planner.core.values.units import format_us
from planner.solve.cases import cases_of
from planner.solve.request import Request, limited_to_plan_width
from planner.solve.search import solve

_DRAWS = 20
"""Number of profiles with random errors of layer times."""
_GIGABYTE = 10**9
_INTERVAL = 1.96
"""Half-width of a 95 % confidence interval, in standard deviations."""


def frontier_of(profile: Profile, request: Request, plan: Plan) -> tuple[FrontierPoint, ...]:
    """Return the best plan's step time, memory and other figures for each pair of replicas and micro-batches.

    The points are sorted by the number of replicas, then by the number of micro-batches. If the schedule is `auto`, the
    searches are short, so longer searches may find faster plans.

    Args:
        profile: The profile of the plan.
        request: Request that the plan answers. Its function `watch` must not stop the searches.
        plan: The plan. The point for the plan's numbers of replicas and micro-batches has the plan's figures, without a
            search.
    """
    request, points = request.without_longer_search(), []
    questions = sorted({(case.replicas, case.micro_batches) for case in cases_of(profile, request)})
    for replicas, m in questions:
        if (replicas, m) == (plan.replicas, plan.micro_batches):
            points.append(frontier_point_of(plan))
            continue
        size = request.inputs.batch // (m * replicas)
        inputs = replace(request.inputs, replicas=replicas)
        best = _solved(profile, replace(request, inputs=inputs, micro_batches=m))
        none = FrontierPoint(micro_batches=m, micro_batch_size=size, replicas=replicas, fits=False)
        points.append(none if best is None else frontier_point_of(best))
    return tuple(points)


def frontier_point_of(plan: Plan) -> FrontierPoint:
    """Return the figures of a plan as a `FrontierPoint`."""
    predicted = plan.predicted
    return FrontierPoint(
        micro_batches=plan.micro_batches,
        micro_batch_size=plan.micro_batch_size,
        replicas=plan.replicas,
        tensor_parallel=plan.tensor_parallel,
        schedule=plan.schedule,
        devices=plan.num_devices,
        step_us=predicted.step_us,
        samples_per_s=predicted.samples_per_s,
        bubble=predicted.bubble,
        peak_bytes=max(plan.peak_bytes_by_device()),
        recompute_share=predicted.recompute_share,
    )


def insight_of(profile: Profile, request: Request, plan: Plan) -> Insight:
    """Return what limits a plan, and what would improve it.

    Args:
        profile: The profile of the plan.
        request: Request that the plan answers. Its function `watch` must not stop the searches.
        plan: The plan.
    """
    if request.actions is not None:
        request = replace(request, actions=request.actions // _DRAWS)  # all searches share the budget
    free = [plan.stages[d].memory_bytes - need for d, need in enumerate(plan.peak_bytes_by_device())]
    tightest = int(np.argmin(free))
    return Insight(
        pace=_pace(profile, plan),
        tightest_device=tightest,
        free_bytes=max(0, free[tightest]),
        what_if=tuple(_what_if(profile, request, plan)),
        noise=_noise(profile, request, plan),
    )


def _pace(profile: Profile, plan: Plan) -> str:
    times = Evaluation.of(plan, profile).stage_times
    forward = [(t.forward_us, f"stage {k}") for k, t in enumerate(times)]
    backward = [(t.backward_us, f"stage {k}") for k, t in enumerate(times)]
    links = [(t.send_us, f"the link after stage {k}") for k, t in enumerate(times) if not t.blocking]
    slowest = max([*forward, *links], key=lambda item: item[0]), max([*backward, *links], key=lambda item: item[0])
    (forward_us, where), (backward_us, there) = slowest
    if where == there:
        return f"{where}: forward {format_us(forward_us)}, backward {format_us(backward_us)} per micro-batch"
    return f"forward of {where} ({format_us(forward_us)}), backward of {there} ({format_us(backward_us)})"


def _what_if(profile: Profile, request: Request, plan: Plan) -> Iterator[WhatIf]:
    for change, inputs in _changes(profile, request, plan.tensor_parallel):
        best = _solved(profile, replace(request, inputs=inputs))
        if best is not None:
            # After each change the plan is still possible and as fast, but a heuristic search may not find it.
            yield WhatIf(change=change, step_us=min(best.predicted.step_us, plan.predicted.step_us))


def _changes(profile: Profile, request: Request, width: int) -> Iterator[tuple[str, Inputs]]:
    inputs = request.inputs
    more = tuple(limit + _GIGABYTE for limit in inputs.memory_bytes)
    yield "1 GB more on every device", replace(inputs, memory_bytes=more)
    if inputs.replicas != 1 or (inputs.devices // width < len(profile.layers) and request.balance is None):
        speeds = inputs.speeds + inputs.speeds[-1:] * width
        limits = inputs.memory_bytes + inputs.memory_bytes[-1:] * width
        links = (*inputs.links, *inputs.links[-1:])
        bigger = replace(inputs, devices=inputs.devices + width, memory_bytes=limits, speeds=speeds, links=links)
        yield "one more device" if width == 1 else f"{width} more GPUs", bigger
    if inputs.link != Link() or inputs.inter_link is not None or inputs.links:
        inter = None if inputs.inter_link is None else _faster(inputs.inter_link)
        links = tuple(map(_faster, inputs.links))
        yield "links twice as fast", replace(inputs, link=_faster(inputs.link), inter_link=inter, links=links)


def _faster(link: Link) -> Link:
    return replace(link, latency_us=link.latency_us / 2, bytes_per_s=link.bytes_per_s * 2)


def _solved(profile: Profile, request: Request) -> Plan | None:
    try:
        return solve(profile, request)
    except PlannerError:
        return None  # nothing fits, or the schedule does not run so: no figure to give


def _noise(profile: Profile, request: Request, plan: Plan) -> Noise | None:
    from statistics import fmean, median  # noqa: PLC0415 - slow to import, and used only here

    spreads = [max(layer.spread) for layer in profile.layers if layer.spread]
    if not spreads or max(spreads) <= 0:
        return None
    # The searches for drawn profiles are shorter than the plan's search, so they may find slower plans.
    rng = np.random.default_rng(0)
    request = replace(request, inputs=limited_to_plan_width(request.inputs, plan, profile), searches_longer=False)
    regrets, same = [], 0
    for _ in range(_DRAWS):
        drawn = map_layers(profile, partial(_drawn, rng=rng))
        best = _solved(drawn, request)
        if best is None:
            return None
        ours_us = Evaluation.of(plan, drawn).step_us
        best_us = best.predicted.step_us
        regrets.append(max(0.0, ours_us / best_us - 1) if best_us else 0.0)
        same += ours_us <= best_us or (best.balance, best.micro_batches) == (plan.balance, plan.micro_batches)
    return Noise(
        draws=_DRAWS,
        spread=median(spreads),
        mean_regret=fmean(regrets),
        worst_regret=max(regrets),
        same_plan=same / _DRAWS,
    )


def _drawn(layer: LayerProfile, rng: "np.random.Generator") -> LayerProfile:
    # A layer's forward has one random error, equal at all micro-batch sizes, and its backward another one.
    deviation = max(layer.spread, default=0.0) / _INTERVAL
    forward, backward = np.maximum(0.0, 1 + deviation * rng.standard_normal(2))
    return replace(
        layer,
        forward_us=tuple(t * float(forward) for t in layer.forward_us),
        backward_us=tuple(t * float(backward) for t in layer.backward_us),
    )
