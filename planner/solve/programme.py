"""A case as an integer programme: a second opinion, and devices that may take any place in the pipeline."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.evaluate import Partition
from planner.core.errors import SolverError
from planner.solve.answer import Answer
from planner.solve.case import Case
from planner.solve.deadline import NEVER, Deadline, OutOfTimeError
from planner.solve.milp import ArcProblem, solve_arcs
from planner.solve.problem import ChainProblem
from planner.solve.tables import CHOICES, width_for

__all__ = ["programme_answer"]

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
        SolverError: The solver is missing, or failed.
        OutOfTimeError: `deadline` passed before anything was found.
    """
    width = width_for(case.costs, longest_us=case.longest_us(upper_us), cap_bytes=max(case.caps_bytes))
    classes = _classes(case) if any_order else []
    arcs = _Arcs(case, width, classes)
    left_s = None if deadline == NEVER else max(0.1, deadline.left_s)
    try:
        found = solve_arcs(arcs.problem, upper_us=upper_us * (1 - 1e-9), time_limit_s=left_s)
    except RuntimeError as error:
        raise SolverError(f"the integer programme was not solved: {error}", hint="use `--solver dp`") from error
    if found.status == "unknown":
        raise OutOfTimeError
    if found.status == "infeasible":
        return Answer(case, None, inf, upper_us, _METHOD)
    return Answer(case, arcs.partition(found.arcs), found.step_us, found.bound_us, _METHOD)


class _Arcs:
    """Every stage that fits, as an arc, and what it stands for."""

    def __init__(self, case: Case, width: int, classes: list[list[int]]) -> None:
        self._case = case
        self._classes = classes
        rows = list(self._rows(width))
        columns = [np.concatenate([row[n] for row in rows]) for n in range(len(rows[0]))]
        self.choice = columns[-1]
        if classes:
            counts, ordered = tuple(map(len, classes)), False
        elif case.alike:
            counts, ordered = (case.num_devices,), False
        else:
            counts, ordered = (1,) * case.num_devices, True
        self.problem = ArcProblem(
            num_layers=case.costs.num_layers,
            micro_batches=case.micro_batches,
            counts=counts,
            ordered=ordered,
            device=columns[0],
            first=columns[1],
            end=columns[2],
            forward_us=columns[3],
            backward_us=columns[4],
            last_backward_us=columns[5],
            link_us=columns[6],
            optimizer_us=columns[7],
            hidden_us=columns[8],
        )

    def _rows(self, width: int) -> Iterator[tuple[NDArray[Any], ...]]:
        case = self._case
        if self._classes:
            for n, devices in enumerate(self._classes):
                yield _arcs_of(_alone(case, devices[0]).problem(1, width=width), 0, n)
        elif case.alike:
            yield _arcs_of(case.problem(case.num_devices, width=width), 0, 0)
        else:
            problem = case.problem(case.num_devices, width=width)
            for position in range(case.num_devices):
                yield _arcs_of(problem, case.num_devices - 1 - position, position)

    def partition(self, arcs: tuple[int, ...]) -> Partition:
        case, problem = self._case, self.problem
        unused = [list(devices) for devices in self._classes]
        devices = tuple(unused[problem.device[arc]].pop(0) for arc in arcs) if unused else ()
        usual = devices == tuple(range(len(devices)))
        return Partition(
            schedule=case.schedule.name,
            micro_batches=case.micro_batches,
            balance=tuple(int(problem.end[arc] - problem.first[arc]) for arc in arcs),
            recompute=tuple(CHOICES[int(self.choice[arc])] for arc in arcs),
            replicas=case.replicas,
            devices=() if usual else devices,
        )


def _arcs_of(problem: ChainProblem, level: int, device: int) -> tuple[NDArray[Any], ...]:
    stages = problem.stages(level, 0, np.arange(problem.num_layers + 1))
    row, column = np.nonzero(np.isfinite(stages.forward))
    at = stages.at(row, column)
    link = problem.links[level + 1].on_link_us[at.first]
    hidden = at.forward + at.backward_alone + at.received
    device_of = np.full(len(row), device)
    return device_of, at.first, at.end, at.forward, at.backward, at.last_backward, link, at.own, hidden, at.choice


def _classes(case: Case) -> list[list[int]]:
    """Devices that are alike, by number."""
    classes: dict[tuple[float, float], list[int]] = {}
    for device in range(case.num_devices):
        classes.setdefault((case.caps_bytes[device], case.cluster.speed(device)), []).append(device)
    return list(classes.values())


def _alone(case: Case, device: int) -> Case:
    """The case with one device, which any place in the pipeline may have."""
    cluster = replace(
        case.cluster,
        memory_bytes=(case.cluster.memory_bytes[device],),
        speeds=(case.cluster.speed(device),),
    )
    return replace(case, cluster=cluster, num_devices=1)
