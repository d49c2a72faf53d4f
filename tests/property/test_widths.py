"""Plans over several tensor-parallel widths, compared with brute force and with each width alone."""

from dataclasses import replace

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from planner.core.errors import PlannerError
from planner.core.judge.verdict import judge
from planner.core.values.cluster import Link
from planner.core.values.plan import Inputs, Plan
from planner.core.values.profile import LayerProfile, Profile, WidthCosts
from planner.solve import Request, solve
from tests.support.brute_force import best_step_us
from tests.support.chains import random_profile
from tests.support.profiles import inputs_of

LATENCY_US, BYTES_PER_US = 0.5, 100.0


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Draw a profile of up to five layers for one, two and four GPUs with uneven speedups."""
    count = draw(st.integers(2, 5))
    whole = random_profile(draw(st.integers(0, 10**6)), count, exact=False)
    widths = {}
    for width in (1, 2, 4):
        shares = [draw(st.floats(1 / width, 1.0)) for _ in range(count)]
        widths[width] = tuple(
            replace(
                _shared(layer, share),
                collective_bytes=tuple(draw(st.integers(0, 500)) for _ in layer.forward_us),
                collectives=draw(st.integers(0, 4)),
            )
            for layer, share in zip(whole.layers, shares, strict=True)
        )
    more = tuple(WidthCosts(tensor_parallel=width, layers=widths[width]) for width in (2, 4))
    return replace(whole, layers=widths[1], widths=more)


def _shared(layer: LayerProfile, share: float) -> LayerProfile:
    def times(of: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(time * share for time in of)

    return replace(
        layer,
        parameter_bytes=int(layer.parameter_bytes * share) + layer.tied_bytes,
        forward_us=times(layer.forward_us),
        backward_us=times(layer.backward_us),
        backward_input_us=times(layer.backward_input_us),
        backward_weight_us=times(layer.backward_weight_us),
        saved_bytes=tuple(int(size * share) for size in layer.saved_bytes),
    )


@st.composite
def requests(draw: st.DrawFn) -> Inputs:
    """Draw inputs with up to eight GPUs, also in nodes of two or four."""
    devices = draw(st.sampled_from([2, 4, 5, 8]))
    inputs = inputs_of(
        devices,
        draw(st.sampled_from([4, 6, 8])),
        memory_bytes=draw(st.sampled_from([2_000, 4_000, 8_000, 10**6])),
        link=Link(latency_us=LATENCY_US, bytes_per_s=BYTES_PER_US * 1e6),
        extrapolate=True,
    )
    return replace(
        inputs,
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "auto"])),
        chunks=1,
        replicas=draw(st.sampled_from([0, 1])),
        inter_link=Link(latency_us=2.0, bytes_per_s=50e6),
        node_devices=draw(st.sampled_from([0, 2, 4, 4])),
        allreduce=Link(latency_us=1.0, bytes_per_s=50e6),
        speeds=draw(st.sampled_from([(), (1.5,) * devices])),
    )


def alone(profile: Profile, inputs: Inputs, width: int) -> tuple[Profile, Inputs] | None:
    """Return the problem with groups of `width` GPUs as devices, computed independently; None if there is none."""
    if inputs.devices < width or inputs.node_devices % width:
        return None
    layers = {1: profile.layers, **{each.tensor_parallel: each.layers for each in profile.widths}}[width]
    speed = inputs.speeds[0] if inputs.speeds else 1.0

    def with_sums(layer: LayerProfile) -> LayerProfile:
        if width == 1:
            return layer
        more = [
            speed * (layer.collectives * LATENCY_US + 2 * (width - 1) / width * size / BYTES_PER_US)
            for size in layer.collective_bytes
        ]
        return replace(
            layer,
            forward_us=tuple(map(sum, zip(layer.forward_us, more, strict=True))),
            backward_us=tuple(map(sum, zip(layer.backward_us, more, strict=True))),
            backward_input_us=tuple(map(sum, zip(layer.backward_input_us, more))),  # noqa: B905 - may be empty
        )

    groups = inputs.devices // width
    return replace(profile, layers=tuple(map(with_sums, layers)), widths=()), replace(
        inputs,
        devices=groups,
        memory_bytes=inputs.memory_bytes[:groups],
        speeds=inputs.speeds[:groups],
        node_devices=inputs.node_devices // width,
    )


def solved(profile: Profile, inputs: Inputs) -> Plan | None:
    """Return the plan; None if nothing fits or there are more devices than layers."""
    try:
        return solve(profile, Request(inputs=inputs))
    except PlannerError:
        return None


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(profile=profiles(), inputs=requests())
def test_best_width_equals_brute_force(profile: Profile, inputs: Inputs) -> None:
    inputs = replace(inputs, schedule="gpipe" if inputs.schedule == "auto" else inputs.schedule)
    problems = [problem for width in (1, 2, 4) if (problem := alone(profile, inputs, width)) is not None]
    assume(inputs.replicas == 0 or problems[-1][1].devices <= len(profile.layers))  # refused as too many devices
    found = [best_step_us(*problem) for problem in problems]
    best = min((step for step in found if step is not None), default=None)
    plan = solved(profile, inputs)
    assert (plan is None) == (best is None)
    if plan is not None and best is not None:
        assert plan.predicted.step_us == pytest.approx(best, rel=1e-9)
        assert plan.solver.status == "optimal"
        event(f"width {plan.tensor_parallel}")


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(profile=profiles(), inputs=requests())
def test_open_width_is_at_least_as_fast_as_each_width(profile: Profile, inputs: Inputs) -> None:
    """The lower bound holds for each width too, and `check` computes the same plan."""
    plan = solved(profile, inputs)
    for width in (1, 2, 4):
        one = solved(profile, replace(inputs, tensor_parallel=width))
        if one is None:
            continue
        assert one.tensor_parallel == width
        assert plan.predicted.step_us <= one.predicted.step_us * (1 + 1e-9)
        assert plan.solver.lower_bound_us <= one.predicted.step_us * (1 + 1e-9)
    if plan is not None:
        verdict = judge(plan, profile, profile_digest=plan.inputs.profile.digest)
        assert verdict.fits
        assert verdict.plan == plan
        assert plan.num_gpus <= inputs.devices
