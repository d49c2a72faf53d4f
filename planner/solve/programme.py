"""A case as an integer programme: a second opinion, and devices that may take any place in the pipeline."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.core.errors import SolverError
from planner.solve.answer import Answer
from planner.solve.arcs import ArcProblem
from planner.solve.arrays import ChoiceArray
from planner.solve.case import Case
from planner.solve.deadline import NEVER, Deadline, OutOfTimeError
from planner.solve.milp import solve_arcs
from planner.solve.problem import ChainProblem, Stages
from planner.solve.tables import width_for

_METHOD = "integer-programming"


def programme_answer(
    case: Case, *, upper_us: float = inf, deadline: Deadline = NEVER, any_order: bool = False
) -> Answer:
    """The fastest partition, if it beats `upper_us`, and what none can beat.

    Args:
        case: The case, under GPipe.
        upper_us: The step time to beat.
        deadline: When the solver stops.
        any_order: Whether any stage may run on any device; else stage k runs on device k.

    Raises:
        MissingPackageError: The solver is not installed.
        SolverError: It failed.
        OutOfTimeError: `deadline` passed before anything was found.
    """
    width = width_for(case.costs, longest_us=case.longest_us(upper_us), cap_bytes=max(case.caps_bytes))
    classes = _classes(case) if any_order else ()
    problem, choice = _arcs(case, width, classes)
    left_s = None if deadline == NEVER else max(0.1, deadline.left_s)
    try:
        solved = solve_arcs(problem, upper_us=upper_us * (1 - 1e-9), time_limit_s=left_s)
    except RuntimeError as error:
        raise SolverError(f"the integer programme was not solved: {error}", hint="use `--solver dp`") from error
    if solved.status == "unknown":
        raise OutOfTimeError
    if solved.status == "infeasible":
        return Answer(case, None, inf, upper_us, _METHOD)
    arcs = list(solved.arcs)
    free = [list(devices) for devices in classes]
    devices = tuple(free[kind].pop(0) for kind in problem.device[arcs]) if classes else ()
    in_order = devices == tuple(range(len(devices)))
    partition = case.partition([0, *problem.end[arcs]], choice[arcs].tolist(), devices=() if in_order else devices)
    return Answer(case, partition, solved.step_us, solved.bound_us, _METHOD)


def _arcs(case: Case, width: int, classes: Sequence[tuple[int, ...]]) -> tuple[ArcProblem, ChoiceArray]:
    """Every stage that fits, as an arc, and its recomputation."""
    num = case.num_devices
    if classes:
        # Any place in the pipeline may be the one of the class's first device.
        single = [_with_one_device(case, devices[0]).problem(1, width=width) for devices in classes]
        stages = [_stages_of(problem, 0, kind) for kind, problem in enumerate(single)]
        counts = tuple(map(len, classes))
    elif case.alike:
        stages, counts = [_stages_of(case.problem(num, width=width), 0, 0)], (num,)
    else:
        problem = case.problem(num, width=width)
        stages, counts = [_stages_of(problem, num - 1 - place, place) for place in range(num)], (1,) * num
    columns: dict[str, Any] = {name: np.concatenate([each[name] for each in stages]) for name in stages[0]}
    choice = columns.pop("choice")
    problem_of_arcs = ArcProblem(
        num_layers=case.costs.num_layers,
        micro_batches=case.micro_batches,
        counts=counts,
        ordered=not classes and not case.alike,
        **columns,
    )
    return problem_of_arcs, choice


def _stages_of(problem: ChainProblem, level: int, device: int) -> dict[str, NDArray[Any]]:
    """The stages of one level, as arcs on one class of devices."""
    stages = Stages.of_ways([problem.stages(level, 0, np.arange(problem.num_layers + 1))])
    at = stages.at(*np.nonzero(np.isfinite(stages.forward)))
    return {
        "device": np.full(len(at.first), device),
        "first": at.first,
        "end": at.end,
        "forward_us": at.forward,
        "backward_us": at.backward,
        "last_backward_us": at.last_backward,
        "link_us": problem.links[level + 1].on_link_us[at.first],
        "optimizer_us": at.own_us,
        "hidden_us": at.hidden_us - 2 * at.link,
        "choice": at.choice,
    }


def _classes(case: Case) -> list[tuple[int, ...]]:
    """Devices that are alike, by number."""
    kinds = [(case.caps_bytes[device], case.cluster.speed(device)) for device in range(case.num_devices)]
    return [tuple(n for n, other in enumerate(kinds) if other == kind) for kind in dict.fromkeys(kinds)]


def _with_one_device(case: Case, device: int) -> Case:
    cap, speed = case.cluster.memory_bytes[device], case.cluster.speed(device)
    return replace(case, cluster=replace(case.cluster, memory_bytes=(cap,), speeds=(speed,)), num_devices=1)
