"""Hints of infeasible requests compared with brute force: what they suggest fits, and one step less does not."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from planner.core.errors import InfeasibleError
from planner.core.values.profile import Profile
from planner.core.values.units import parse_bytes
from planner.solve import Request, solve
from tests.support.brute_force import Space
from tests.support.profiles import inputs_of, profile_of
from tests.support.random_problems import Features, Problem, num_examples, problems

CAP = re.compile(r"with (\d+) devices? the smallest `--mem` is ([0-9.]+\w+) \((?:(\d+) replicas?, )?M = (\d+)\)")
CAP_WITHOUT_CHUNKS = re.compile(r"under [\w ]+, (\d+) devices? need at least `--mem` ([0-9.]+\w+) \(")
DEVICES = re.compile(r"`--devices (\d+)` fits in .* \(M = (\d+)\)")
COUNT = re.compile(r"M = (\d+) fits: leave")
OPTIMIZER = re.compile(r"with (\w+) as optimizer a plan fits")

TOO_TIGHT = (0.98, 0.9, 0.7, 0.5)
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

GPIPE = Features(caps=TOO_TIGHT, unlike=True)
RULES = Features(caps=TOO_TIGHT, rules=True, tied=True)
ONE_FORWARD_ONE_BACKWARD = Features(caps=TOO_TIGHT, schedules=("1f1b",), unlike=True)
INTERLEAVED = Features(caps=TOO_TIGHT, schedules=("interleaved",), chunks=(2, 1, 0))
EVERYTHING = Features(
    caps=TOO_TIGHT, schedules=("auto", "1f1b", "gpipe"), chunks=(0, 1, 2), replicas=(0, 1, 2), rules=True
)


def check_infeasible(problem: Problem) -> bool:
    """Check everything that the error says if the problem is infeasible. Return True if it is."""
    fits = problem.space.any_fits()
    error = _error(problem)
    assert (error is None) == fits
    if error is None:
        return False
    assert re.search(r"-\d|inf|nan", error.message) is None, error.message
    _check_limits(problem, error.hint)
    _check_limit_without_chunks(problem, error.hint)
    _check_device_counts(problem, error.hint)
    _check_options(problem, error.hint)
    _check_optimizers(problem, error.hint)
    return True


def _error(problem: Problem) -> InfeasibleError | None:
    try:
        solve(problem.profile, Request(inputs=problem.inputs, micro_batches=problem.micro_batches))
    except InfeasibleError as error:
        return error
    return None


def _space(problem: Problem, **changes: Any) -> Space:
    """Return all plans for the same request with changed inputs."""
    return Space(problem.profile, replace(problem.inputs, **changes), micro_batches=problem.micro_batches)


def _names_everything(problem: Problem) -> bool:
    """Return True if hints must name everything that fits; where chunks share devices, they may omit it."""
    return problem.inputs.schedule in ("gpipe", "1f1b")


def _check_limits(problem: Problem, hint: str) -> None:
    """Check that the suggested limit is the smallest, rounded up as `--mem` prints it, with its M and replicas."""
    smallest = problem.space.smallest_cap_bytes()
    named = CAP.search(hint)
    if named is None:
        assert not (_names_everything(problem) and smallest < float("inf")), hint
        return
    cap = parse_bytes(named[2])
    assert int(named[1]) == problem.inputs.devices
    shown = 1 if cap < 1000 else 10
    assert smallest <= cap < smallest + shown, f"{hint}, but the smallest is {smallest}"
    space = problem.space.under((cap,) * problem.inputs.devices)
    assert space.only(micro_batches=int(named[4]), replicas=int(named[3]) if named[3] else None).any_fits(), hint
    less = (int(smallest) - 1,) * problem.inputs.devices
    assert not problem.space.under(less).any_fits()


def _check_limit_without_chunks(problem: Problem, hint: str) -> None:
    """Check the smallest limit of all plans that are not interleaved."""
    named = CAP_WITHOUT_CHUNKS.search(hint)
    if named is None:
        return
    blocks = [block for block in problem.space.blocks if block.schedule != "interleaved"]
    smallest = min(float(block.peaks.max(axis=1).min()) for block in blocks)
    cap = parse_bytes(named[2])
    assert int(named[1]) == problem.inputs.devices
    assert smallest <= cap < smallest + (1 if cap < 1000 else 10), f"{hint}, but the smallest is {smallest}"


def _check_device_counts(problem: Problem, hint: str) -> None:
    """Check that the suggested number of devices fits with its M, and that no smaller one does."""
    named = DEVICES.search(hint)
    inputs = problem.inputs
    if named is None:
        return
    count, cap = int(named[1]), inputs.memory_bytes[0]
    assert count > inputs.devices
    for devices in range(inputs.devices + 1, count + 1):
        space = _space(problem, devices=devices, memory_bytes=(cap,) * devices, speeds=())
        assert space.any_fits() == (devices == count), f"{hint}, but {devices}: {space.any_fits()}"
    assert space.only(micro_batches=int(named[2])).any_fits(), hint


def _check_options(problem: Problem, hint: str) -> None:
    """Check that another M, recomputation or schedule is suggested exactly if it fits."""
    inputs = problem.inputs
    if problem.micro_batches is not None:
        every = Space(problem.profile, inputs)
        fitting = {block.micro_batches for block in every.blocks if block.fits(every.caps).any()}
        named = COUNT.search(hint)
        if _names_everything(problem) or named is not None:
            assert (None if named is None else int(named[1])) == min(fitting, default=None), hint
    if inputs.recompute != "auto":
        advised, fits = "`--recompute auto` fits" in hint, _space(problem, recompute="auto").any_fits()
        assert advised <= fits, hint
        assert advised == fits or not _names_everything(problem), hint
    advised = "`--schedule 1f1b` fits" in hint
    if inputs.schedule == "gpipe" or advised:
        assert advised == _space(problem, schedule="1f1b", chunks=1).any_fits(), hint


def _check_optimizers(problem: Problem, hint: str) -> None:
    """Check that the suggested optimizer makes a plan fit."""
    named = OPTIMIZER.search(hint)
    if named is None:
        return
    profile = _with_optimizer(problem.profile, copies=0 if named[1] == "sgd" else 1)
    assert Space(profile, problem.inputs, micro_batches=problem.micro_batches).any_fits(), hint


def _with_optimizer(profile: Profile, *, copies: int) -> Profile:
    layers = []
    for layer in profile.layers:
        gradients = layer.parameter_bytes if layer.gradient_bytes is None else layer.gradient_bytes
        layers.append(
            replace(layer, optimizer_bytes=copies * gradients, optimizer_peak_bytes=0, optimizer_boundary_peak_bytes=0)
        )
    return replace(profile, layers=tuple(layers))


@pytest.mark.parametrize(("replicas", "cap", "batch"), [(0, 3, 2), (2, 3, 2), (2, 4, 6), (2, 6, 4)])
def test_suggested_device_count_includes_all_replicas(replicas: int, cap: int, batch: int) -> None:
    """Micro-batches of one sample make replicas attractive here."""
    profile = profile_of([0.0] * 3, parameter_bytes=1)
    inputs = replace(inputs_of(2, batch, memory_bytes=cap), replicas=replicas)
    problem = Problem(profile, inputs, None, Space(profile, inputs))
    assert check_infeasible(problem)
    error = _error(problem)
    assert DEVICES.search(error.hint) is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("features", "count"),
    [
        pytest.param(GPIPE, 100, id="gpipe"),
        pytest.param(RULES, 80, id="rules"),
        pytest.param(ONE_FORWARD_ONE_BACKWARD, 80, id="1f1b"),
        pytest.param(INTERLEAVED, 60, id="interleaved"),
        pytest.param(EVERYTHING, 80, id="everything"),
    ],
)
def test_hints_of_infeasible_requests_are_true(features: Features, count: int) -> None:
    infeasible, count = 0, num_examples(count)

    @settings(max_examples=count, deadline=None, suppress_health_check=SLOW)
    @given(problems(features))
    def true(problem: Problem) -> None:
        nonlocal infeasible
        infeasible += check_infeasible(problem)

    true()
    assert infeasible >= count // 4
