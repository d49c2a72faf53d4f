"""Options that repeat the request of a plan."""

import shlex
from dataclasses import fields, replace
from typing import Any, Literal

import pytest

from planner.api.options.solving import SolverOptions
from planner.api.question import calibrated_solve_options, solve_command_options
from planner.api.solver_request import request_of
from planner.core.values.balance import quote_options, replan_command
from planner.core.values.cluster import ExecutorCost, Link
from planner.core.values.plan import ProfileReference
from tests.support.chains import random_profile

REFERENCE = ProfileReference(path="profile.yaml", digest="sha256:0")
LINK = "25GB/s,5us,blocking"


def typed(words: str) -> SolverOptions:
    """Return the options as the command line parses them."""
    names, options = {field.name for field in fields(SolverOptions)}, dict[str, Any]()
    of = iter(shlex.split(words))
    for word in of:
        name = word.removeprefix("--").replace("-", "_")
        assert name in names
        value: Any = True if name == "extrapolate" else next(of)
        if name in ("together", "apart"):
            value = [*options.get(name, ()), value]
        options[name] = int(value) if name == "batch" else value
    return SolverOptions(**options)


@pytest.mark.parametrize(
    "words",
    [
        "--devices 4 --mem 8GB --batch 8",
        "--devices 2 --mem 1GB,3GiB --batch 8 --schedule 1f1b --recompute always --speed 1.0,2.5",
        f"--nodes 2x4 --mem 8GB --batch 8 --replicas auto --link {LINK} --inter-link 1GB/s,0.5us --allreduce 1GB/s,0us",
        "--nodes 2x4 --devices 7 --mem 8GB --batch 8 --schedule interleaved --chunks 2 --overhead 0.25us --reserve 5B",
        "--devices 2 --mem 8GB --batch 8 --chunks 1 --extrapolate --together 'a b,c' --apart d,e",
        "--devices 3 --mem 8000000001B --batch 6 --min-micro-batch 2 --schedule search --apart a,b",
    ],
)
def test_repeated_options_give_the_same_request(words: str) -> None:
    """Values of a calibration are not repeated."""
    profile = random_profile(1, 8, sizes=(1, 2, 4))
    executor = ExecutorCost(overhead_us=12.5, link=Link(latency_us=3.0, bytes_per_s=1e9))
    device = replace(profile.device, executor=executor, reserve_bytes=100)
    profile = replace(profile, device=device)
    inputs = request_of(profile, REFERENCE, typed(words)).inputs
    again = quote_options(solve_command_options(inputs, device))
    assert request_of(profile, REFERENCE, typed(again)).inputs == inputs
    names = {option.partition(" ")[0] for option in calibrated_solve_options(inputs, device)}
    assert not {"--overhead", "--reserve"} & names
    assert ("--link" in names) == ("--inter-link" in words)


@pytest.mark.parametrize("more", ["", "--headroom 0%", "--headroom 3.7%"])
@pytest.mark.parametrize("how", ["measured", "estimated"])
@pytest.mark.parametrize("limits", ["8GB", "7B,8000000001B"])
def test_headroom_is_applied_once(limits: str, how: Literal["measured", "estimated"], more: str) -> None:
    """The limits of the plan already exclude the headroom."""
    profile = random_profile(1, 8, sizes=(1, 2, 4))
    profile = replace(profile, device=replace(profile.device, how=how))
    inputs = request_of(profile, REFERENCE, typed(f"--devices 2 --mem {limits} --batch 8 {more}")).inputs
    assert (inputs.headroom > 0) == (more == "--headroom 3.7%" or (how == "estimated" and not more))
    assert (
        request_of(profile, REFERENCE, typed(quote_options(solve_command_options(inputs, profile.device)))).inputs
        == inputs
    )


def test_repeated_command_is_quoted() -> None:
    """The plan's path is included if it is not the default."""
    assert replan_command("my profile.yaml", ["--devices 2; ls"], calibration="c.yaml", plan="out/plan.yaml") == (
        "gpipe-plan solve 'my profile.yaml' --devices '2; ls' --calibration c.yaml -o out/plan.yaml"
    )
    assert replan_command("p.yaml", (), calibration="c.yaml") == "gpipe-plan solve p.yaml --calibration c.yaml"
