"""Integer program for GPipe's cuts: an independent check of the dynamic program, slow and easy to verify.

Every stage that fits is an arc from layer `first` to layer `end`. A variable that is 0 or 1 says if the arc is chosen.
The chosen arcs form a path from layer 0 to layer L. The step time (`planner.core.cost.step_time`) is

    T = sum F + sum C + (M-1) S + D + U

    M       number of micro-batches
    F, C    forward time of a stage; transfer time of the link before the stage
    p, q    backward time of a stage for micro-batches 0..M-2, and for micro-batch M-1
    o       time of all-reduce and optimizer step of a stage
    h       F + q of a stage, without the recomputation in q
    S       variable: longest forward time of a stage, or transfer time of a link
    B       variable: longest p of a stage, or transfer time of a link; constrained like S
    D       variable: time of the backward of all micro-batches
    U       variable: time that optimizer steps add

All sums are over chosen arcs. Exactly one chosen arc covers layer i, so this constraint compares S with one stage:

    S >= sum_{first <= i < end} max(F, C)     for every i

At most one chosen arc begins at layer i. The backward visits the stages from the last to the first:

    A_i   time of the backward of one of the micro-batches 0..M-2 through layers i..L-1 and their links
    X_i   (M-2) times the slowest stage or link of layers i..L-1, without the link before layer i
    Z_i   (M-2) times the slowest stage or link of layers i..L-1
    D_i   time of the backward of all micro-batches through layers i..L-1 and their links; D = D_0

    A_i  = A_{i+1} + sum_{first = i} (p + C)
    X_i >= Z_{i+1}
    X_i >= (M-2) sum_{first = i} p
    Z_i >= X_i
    Z_i >= (M-2) sum_{first = i} C
    D_i >= D_{i+1} + sum_{first = i} (q + C)                  micro-batch M-1 does not wait,
    D_i >= A_{i+1} + sum_{first = i} (p + q + C) + X_i        or it waits for earlier micro-batches at the stage,
    D_i >= A_{i+1} + sum_{first = i} (p + 2 C) + Z_i          or at the link
    D   >= sum (min(p, q) + C) + (M-1) B                      implied, but makes HiGHS several times faster

The backward of earlier stages, and their forward in the next step, hide a part of a stage's optimizer step:

    U   >= sum_{first = i} o - sum_{end <= i} h - 2 sum_{first <= i} C     for every i

PuLP states the program, and HiGHS solves it. Times are scaled so that a step is about 1000. Complexity: exponential in
the worst case. Chains of 50 layers on 4 devices take seconds.
"""

import warnings
from math import inf
from typing import Any, Final

import numpy as np

from planner.core.cost.arrays import BoolArray, FloatArray
from planner.core.cost.evaluate import Evaluation
from planner.core.errors import SolverError
from planner.core.extras import check_installed, discarding_stdout
from planner.solve.answer import Answer
from planner.solve.deadline import NEVER, Deadline, OutOfTimeError
from planner.solve.space.case import Case
from planner.solve.space.problem import StageTimeArrays
from planner.solve.space.tables import max_stage_layers

_METHOD: Final = "integer-programming"
_EQUAL: Final = 1e-6
_SCALED_STEP: Final = 1000.0
_MAX_TERMS: Final = 1_000_000
"""Largest total number of layers of all possible stages. PuLP takes microseconds for each, so more are refused."""


def search_integer_program(case: Case, *, upper_us: float = inf, deadline: Deadline = NEVER) -> Answer:
    """Return the fastest partition under GPipe, and a lower bound, from an integer program.

    Args:
        case: Layers and devices to plan for, under GPipe.
        upper_us: Step time that a partition must beat, in microseconds.
        deadline: Time at which the search stops.

    Raises:
        MissingPackageError: PuLP or HiGHS is not installed.
        SolverError: The program is too large, or its solver failed.
        OutOfTimeError: `deadline` passed before a partition was found.
    """
    arcs = _Arcs(case, longest_us=case.stage_time_limit_us(upper_us))
    if not len(arcs.first):
        return Answer(case, None, inf, upper_us, _METHOD)
    if np.sum(arcs.end - arcs.first) > _MAX_TERMS:
        raise SolverError("the integer program is too large to state", hint="use `--solver dp`")
    check_installed("milp")
    import pulp  # noqa: PLC0415 - takes longer to import than all else that a short command needs

    with warnings.catch_warnings(), discarding_stdout():
        # PuLP 3.3 warns of every way to make a variable that 3.3.0 had.
        warnings.simplefilter("ignore", DeprecationWarning)
        unit_us = case.bound_us / _SCALED_STEP or 1.0
        program = _IntegerProgram(pulp, arcs, unit_us)
        limit_s = max(0.1, deadline.left_s) if deadline.is_limited else None
        highs = pulp.HiGHS(msg=False, timeLimit=limit_s, gapRel=0.0, gapAbs=0.0, mip_feasibility_tolerance=1e-9)
        program.lp.solve(highs)
    if program.lp.status == pulp.LpStatusInfeasible:
        return Answer(case, None, inf, upper_us, _METHOD)
    if program.lp.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        if limit_s is None:
            raise SolverError(f"the integer program was not solved: {pulp.LpStatus[program.lp.status]}")
        raise OutOfTimeError
    chosen = [n for n in np.argsort(arcs.first) if (program.is_chosen[n].varValue or 0.0) > 0.5]
    partition = case.partition([0, *arcs.end[chosen]], arcs.choice[chosen].tolist())
    found_us = Evaluation(case.costs, partition, case.cluster).step_us
    objective_us = float(pulp.value(program.lp.objective)) * unit_us
    if program.lp.sol_status != pulp.LpSolutionOptimal:
        bound_us = float(program.lp.solverModel.getInfo().mip_dual_bound) * unit_us
        return Answer(case, partition, found_us, min(found_us, upper_us, bound_us), _METHOD)
    if abs(objective_us - found_us) > _EQUAL * found_us:
        raise SolverError(f"the integer program computed {objective_us} us for a plan that takes {found_us} us")
    return Answer(case, partition, found_us, min(found_us, upper_us), _METHOD)


class _Arcs:
    """Possible stages as arcs from their first layer to their end; one array entry per arc, times in microseconds."""

    def __init__(self, case: Case, *, longest_us: float) -> None:
        self.num_layers, self.num_places = case.costs.num_layers, case.num_devices
        self.micro_batches, self.is_ordered = case.micro_batches, not case.is_homogeneous
        most_layers = max_stage_layers(case.costs, longest_us=longest_us, limit_bytes=max(case.limits_bytes))
        problem = case.chain_problem(case.num_devices, most_layers=most_layers)
        # If devices are equal, the same arcs are used for every place in the pipeline.
        places = [0] if case.is_homogeneous else list(range(case.num_devices))
        columns: list[list[Any]] = []
        for place in places:
            level = case.num_devices - 1 - place
            stages = StageTimeArrays.stacked([problem.stages(level, 0, np.arange(self.num_layers + 1))])
            at = stages.select(*np.nonzero(np.isfinite(stages.forward)))
            before = np.where(at.first > 0, problem.links[level + 1].on_link_us[at.first], 0.0)
            times = (at.forward, at.backward, at.last_backward, before, at.between_steps_us, at.slack_us - 2 * at.link)
            columns.append([np.full(len(at.first), place), at.first, at.end, at.choice, *times])
        joined = [np.concatenate(column) for column in zip(*columns, strict=True)]
        if self.is_ordered:  # The stage at the first place begins at layer 0, and no other stage does.
            joined = [column[(joined[0] == 0) == (joined[1] == 0)] for column in joined]
        self.place, self.first, self.end, self.choice = joined[:4]
        self.forward, self.backward, self.last_backward, self.link, self.optimizer, self.hidden = joined[4:]


class _IntegerProgram:
    def __init__(self, pulp: Any, arcs: _Arcs, unit_us: float) -> None:
        self._pulp, self._arcs, self._unit_us = pulp, arcs, unit_us
        self.is_chosen = [pulp.LpVariable(f"y{n}", cat=pulp.LpBinary) for n in range(len(arcs.first))]
        self.lp = pulp.LpProblem("gpipe", pulp.LpMinimize)
        self._state_path()
        forward = self._sum(arcs.first >= 0, arcs.forward + arcs.link)
        self.lp += forward + self._largest(np.maximum(arcs.forward, arcs.link)) + self._backward() + self._tail()

    def _state_path(self) -> None:
        arcs, ones = self._arcs, np.full(len(self._arcs.first), self._unit_us)
        self.lp += self._sum(arcs.first == 0, ones) == 1
        self.lp += self._sum(arcs.first >= 0, ones) <= arcs.num_places
        for layer in range(1, arcs.num_layers):
            for place in range(arcs.num_places if arcs.is_ordered else 1):
                # If an arc at one place ends at this layer, an arc at the next place begins at this layer.
                ends = (arcs.end == layer) & (arcs.place == place)
                begins = (arcs.first == layer) & (arcs.place == place + arcs.is_ordered)
                self.lp += self._sum(ends, ones) == self._sum(begins, ones)

    def _sum(self, arcs: BoolArray, times_us: FloatArray) -> Any:
        terms = ((self.is_chosen[n], float(times_us[n] / self._unit_us)) for n in np.flatnonzero(arcs))
        return self._pulp.LpAffineExpression([(variable, time) for variable, time in terms if time])

    def _time(self, name: str, *at_least: Any) -> Any:
        time = self._pulp.LpVariable(name, lowBound=0.0)
        for least in at_least:
            self.lp += time >= least
        return time

    def _largest(self, times_us: FloatArray, name: str = "F") -> Any:
        arcs, others = self._arcs, self._arcs.micro_batches - 1
        covering = ((arcs.first <= layer) & (layer < arcs.end) for layer in range(arcs.num_layers if others else 0))
        return self._time(name, *(self._sum(arcs_there, others * times_us) for arcs_there in covering))

    def _backward(self) -> Any:
        arcs, waits = self._arcs, max(0, self._arcs.micro_batches - 2)
        p, q, c = arcs.backward, arcs.last_backward, arcs.link
        work = done = most = self._pulp.LpAffineExpression()
        for layer in reversed(range(arcs.num_layers)):
            at = arcs.first == layer
            at_stage = self._time(f"X{layer}", most, self._sum(at, waits * p))
            most = self._time(f"Z{layer}", at_stage, self._sum(at, waits * c))
            choices = [done + self._sum(at, q + c)]
            if arcs.micro_batches > 1:
                choices += [work + self._sum(at, p + q + c) + at_stage, work + self._sum(at, p + 2 * c) + most]
            done, work = self._time(f"D{layer}", *choices), self._time(f"A{layer}", work + self._sum(at, p + c))
        self.lp += done >= self._sum(arcs.first >= 0, np.minimum(p, q) + c) + self._largest(np.maximum(p, c), "B")
        return done

    def _tail(self) -> Any:
        arcs, tail, hidden = self._arcs, self._time("U"), self._pulp.LpAffineExpression()
        for layer in range(arcs.num_layers):
            begins, before = arcs.first == layer, self._time(f"H{layer}")
            self.lp += before <= hidden + self._sum(arcs.end == layer, arcs.hidden) + self._sum(begins, 2 * arcs.link)
            self.lp += tail >= self._sum(begins, arcs.optimizer) - before
            hidden = before
        return tail
