"""The cuts of a chain for GPipe with a given M as an integer programme: a second opinion on `chain_dp`.

Every possible stage is an arc of layers first..end-1 on a class of devices, with a variable 0 or 1; the chosen arcs
form a path from layer 0 to layer L. The step time (`planner.core.cost.step_time`), with F the forward of a stage, p
and q its backward of micro-batches 0..M-2 and M-1, and C the link in front of it,

    T = sum F + sum C + (M-1) max(F, C)  +  D  +  U

is linear in them without any large constant, since the place of a stage in the pipeline is the layer where it begins.
Backward visits the stages from the last to the first. With sums over the chosen arcs, of which at most one begins at i:

    A_i  = A_{i+1} + sum_{first = i} (p + C)                  all backward work at layers i and behind
    X_i >= Z_{i+1}, (M-2) sum_{first = i} p                   the largest machine up to stage i, times M-2,
    Z_i >= X_i, (M-2) sum_{first = i} C                       and up to the link in front of it
    D_i >= D_{i+1} + sum_{first = i} (q + C)                  the last micro-batch, D = D_0: it goes on, or
    D_i >= A_{i+1} + sum_{first = i} (p + q + C) + X_i        waits for the others at the stage,
    D_i >= A_{i+1} + sum_{first = i} (p + 2 C) + Z_i          or at the link
    U   >= sum_{first = i} optimizer - sum_{end <= i} hidden - 2 sum_{first <= i} C

Where no stage begins at i, D_i is bound by no more than what binds the D of the next stage in front, for p, q, C >= 0:
no plan is cut off. Exactly one arc covers a layer l, so max F >= sum_{arcs covering l} F, and p likewise: far tighter
than a row per first layer. Two more bounds on D help: sum min(p, q) + (M-1) max p, and X_0 >= (M-2) max p.

Arcs that can be in no plan better than one at hand are dropped first: a plan through an arc takes at least the shortest
paths before and behind it, plus the smallest possible largest stages (min-max paths), all with the devices there are.

PuLP states the programme, HiGHS or else CBC solves it. Times are scaled so that a step is about 1000, and M-1 and M-2
are part of X and Z: the solvers' absolute tolerances of 1e-7 to 1e-6 are then about 1e-9 of the step.

Complexity: O(states · classes · arcs) for the bounds, states being the sets of devices in use; the programme is
exponential at worst. A few thousand arcs that cannot be dropped take a minute: few micro-batches for many unlike
devices are the hard case.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.solve.arcs import ArcProblem, Plan, StepCosts, backward_us_of, link_us_of, narrow, step_us, timed

__all__ = ["ArcProblem", "MilpAnswer", "Solver", "Status", "solve_arcs", "step_us"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Solver = Literal["auto", "highs", "cbc"]
Status = Literal["optimal", "feasible", "infeasible", "unknown"]

_RELATIVE = 1e-9
"""Plans closer than this are the same to the solvers."""
_WRONG = 1e-6
"""A solver that is off by more has failed."""
_SCALED_STEP = 1000.0
_MAX_TERMS = 1_000_000
"""A programme of more layers summed over all arcs is not tried: PuLP takes 6 us to state and 6 us to pass on each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MilpAnswer:
    """What is known of the fastest plan among those that take at most `upper_us`."""

    status: Status
    """`infeasible`: there is no such plan; `feasible`, `unknown`: out of time, or too large a programme to try."""
    arcs: Plan = ()
    """Indices of the plan's arcs, in the order of the chain."""
    step_us: float = math.inf
    """The plan's step time, summed up anew from its arcs."""
    bound_us: float
    """No plan is faster, up to rounding (about 1e-9 of it); `upper_us` where there is no plan."""


def solve_arcs(
    problem: ArcProblem, *, upper_us: float = math.inf, time_limit_s: float | None = None, solver: Solver = "auto"
) -> MilpAnswer:
    """The fastest plan.

    Args:
        problem: The arcs to choose from.
        upper_us: Only plans that take no longer are asked for: the step time of a plan at hand, say.
        time_limit_s: For the solver alone; bounds and stating the programme take up to some 10 s more.
        solver: `auto` takes HiGHS where highspy is installed, else CBC.

    Raises:
        RuntimeError: The solver is not installed, or failed.
    """
    plan, kept, least_us = narrow(problem, upper_us)
    if not len(kept):
        return MilpAnswer(status="infeasible", bound_us=upper_us)
    fewer = problem.take(kept)
    # Every plan has a stage that begins at layer 0.
    root_us = float(np.min(least_us[fewer.first == 0]))
    solved = _solve(fewer, root_us, time_limit_s, solver)
    at_hand, found = timed(problem, plan), timed(problem, tuple(int(kept[n]) for n in solved.arcs))
    proven = solved.status in ("optimal", "infeasible")
    if proven and at_hand[0] <= upper_us and found[0] > at_hand[0] * (1 + _WRONG):
        raise RuntimeError(f"the solver says that no plan is faster than {found[0]} us, but one takes {at_hand[0]} us")
    best_us, best = min(at_hand, found, key=lambda timed: timed[0])
    bound_us = best_us if proven else max(root_us, solved.bound_us)
    if best_us <= upper_us * (1 + _RELATIVE) and best:
        status: Status = "optimal" if proven else "feasible"
        return MilpAnswer(status=status, arcs=best, step_us=best_us, bound_us=min(best_us, bound_us))
    return MilpAnswer(status="infeasible" if proven else "unknown", bound_us=min(upper_us, bound_us))


_Terms = list[tuple[Any, float]]
"""Variables of PuLP with their factors, each variable once."""


class _Solved(NamedTuple):
    status: Status
    arcs: Plan
    bound_us: float


def _solve(problem: ArcProblem, root_us: float, time_limit_s: float | None, solver: Solver) -> _Solved:
    """Solve the programme over arcs each of which is on some path."""
    if np.sum(problem.end - problem.first) > _MAX_TERMS:
        return _Solved("unknown", (), -math.inf)
    import pulp  # noqa: PLC0415 - loads longer than all else that a short command needs

    unit_us = max(root_us, float(problem.optimizer_us.max())) / _SCALED_STEP or 1.0
    with warnings.catch_warnings():
        # PuLP 3.3 warns of every way to make a variable that 3.3.0 had, and of the CBC it brings along.
        warnings.simplefilter("ignore", DeprecationWarning)
        programme = _Programme(pulp, problem, unit_us)
        programme.lp.solve(_solver(pulp, solver, time_limit_s))
    status: Status = "unknown"
    if programme.lp.sol_status == pulp.LpSolutionOptimal:
        status = "optimal"
    elif programme.lp.sol_status == pulp.LpSolutionIntegerFeasible:
        status = "feasible"
    model = programme.lp.solverModel  # CBC runs as a command and leaves none
    # Out of time before it has begun to branch, CBC too reports an infeasible programme.
    if programme.lp.status == pulp.LpStatusInfeasible and (model is not None or time_limit_s is None):
        status = "infeasible"
    arcs = programme.plan() if status in ("optimal", "feasible") else ()
    bound_us = float(model.getInfo().mip_dual_bound) * unit_us if model is not None else -math.inf
    return _Solved(status, arcs, bound_us)


def _solver(pulp: Any, name: Solver, time_limit_s: float | None) -> Any:
    options: dict[str, Any] = {"msg": False, "timeLimit": time_limit_s, "gapRel": 0.0, "gapAbs": 0.0}
    candidates = []
    if name != "cbc":
        candidates.append(pulp.HiGHS(**options, mip_feasibility_tolerance=1e-9))
    if name != "highs":
        candidates += [pulp.PULP_CBC_CMD(**options), pulp.COIN_CMD(**options)]
    for candidate in candidates:
        if candidate.available():
            return candidate
    raise RuntimeError(f"no solver for integer programmes is installed ({name}): pip install highspy")


class _Programme:
    """The programme in PuLP; times in `unit_us`, names as in the module's docstring."""

    def __init__(self, pulp: Any, problem: ArcProblem, unit_us: float) -> None:
        self.pulp, self.problem, self.unit_us = pulp, problem, unit_us
        self.lp = pulp.LpProblem("gpipe", pulp.LpMinimize)
        self.all = np.arange(len(problem.first))
        self.starting = [np.flatnonzero(problem.first == i) for i in range(problem.num_layers)]
        self.ending = [np.flatnonzero(problem.end == i) for i in range(problem.num_layers)]
        self.chosen = [pulp.LpVariable(f"y{n}", cat=pulp.LpBinary) for n in self.all]
        self._paths()
        costs = StepCosts.of(problem)
        forward = self._sum(self.all, problem.forward_us + link_us_of(problem))
        largest = self._largest("F", costs.forward)
        span = self._backward(self._largest("B", costs.backward))
        self.lp.setObjective(self._expression([*forward, (largest, 1.0), (span, 1.0), (self._tail(), 1.0)]))

    def plan(self) -> Plan:
        """The chosen arcs in the order of the chain."""
        arcs = [n for n, variable in enumerate(self.chosen) if (variable.varValue or 0.0) > 0.5]
        arcs.sort(key=lambda n: int(self.problem.first[n]))
        cuts = [0, *(int(self.problem.end[n]) for n in arcs)]
        if cuts[:-1] != [int(self.problem.first[n]) for n in arcs] or cuts[-1] != self.problem.num_layers:
            raise RuntimeError(f"the solver's answer is no plan: its stages end at layers {cuts[1:]}")
        return tuple(arcs)

    # ---- rows

    def _expression(self, terms: _Terms) -> Any:
        return self.pulp.LpAffineExpression(terms)

    def _row(self, terms: _Terms, sense: int, right: float) -> None:
        if terms:
            self.lp.addConstraint(self.pulp.LpConstraint(self._expression(terms), sense, rhs=right))

    def _time(self, name: str, *at_least: _Terms) -> Any:
        """A time of 0 or more, and of at least each of these."""
        time = self.pulp.LpVariable(name, lowBound=0.0)
        for terms in at_least:
            self._raise(time, terms)
        return time

    def _raise(self, time: Any, at_least: _Terms) -> None:
        less = [(variable, -factor) for variable, factor in at_least]
        self._row([(time, 1.0), *less], self.pulp.LpConstraintGE, 0.0)

    def _sum(self, arcs: IntArray, times_us: FloatArray) -> _Terms:
        times = (times_us[arcs] / self.unit_us).tolist()
        return [(self.chosen[n], time) for n, time in zip(arcs.tolist(), times, strict=True) if time]

    def _paths(self) -> None:
        equal = self.pulp.LpConstraintEQ
        problem, ones = self.problem, np.full(len(self.all), self.unit_us)
        self._row(self._sum(self.starting[0], ones), equal, 1.0)
        for into, out in zip(self.ending[1:], self.starting[1:], strict=True):
            # In a fixed order, what ends at place k-1 goes on at place k; else anywhere.
            for place in range(1, len(problem.counts)) if problem.ordered else [None]:
                ends = into if place is None else into[problem.device[into] == place - 1]
                starts = out if place is None else out[problem.device[out] == place]
                self._row([*self._sum(ends, ones), *self._sum(starts, -ones)], equal, 0.0)
        for t, count in enumerate(problem.counts):
            self._row(self._sum(np.flatnonzero(problem.device == t), ones), self.pulp.LpConstraintLE, float(count))

    def _largest(self, name: str, times_us: FloatArray) -> Any:
        """M-1 times the largest."""
        largest = self._time(name)
        for layer in range(self.problem.num_layers if self.problem.micro_batches > 1 else 0):
            covering = np.flatnonzero((self.problem.first <= layer) & (layer < self.problem.end))
            self._raise(largest, self._sum(covering, (self.problem.micro_batches - 1) * times_us))
        return largest

    def _backward(self, largest: Any) -> Any:
        """D, given M-1 times the largest p."""
        p, q, link = backward_us_of(self.problem), self.problem.last_backward_us, link_us_of(self.problem)
        span = self._time("D", [*self._sum(self.all, np.minimum(p, q) + link), (largest, 1.0)])
        if not np.array_equal(p, q):  # else that is all
            self._raise(span, self._last(p, q, link, largest))
        return span

    def _last(self, p: FloatArray, q: FloatArray, link: FloatArray, largest: Any) -> _Terms:
        """D_0 by the recursion over the first layers; M is at least 2."""
        work: _Terms = []
        done: _Terms = []
        most: _Terms = []
        for i, arcs in reversed(list(enumerate(self.starting))):
            if not len(arcs):
                continue
            most = self._raised(f"X{i}", most, arcs, p)
            waits = [[*work, *self._sum(arcs, p + q + link), *most]]
            if link[arcs].any():
                most = self._raised(f"Z{i}", most, arcs, link)
                waits.append([*work, *self._sum(arcs, p + 2 * link), *most])
            last = self._time(f"D{i}", [*done, *self._sum(arcs, q + link)], *waits)
            done = [(last, 1.0)]
            work = [(self._time(f"A{i}", [*work, *self._sum(arcs, p + link)]), 1.0)]
        if most:
            num = self.problem.micro_batches
            self._raise(most[0][0], [(largest, (num - 2) / (num - 1))])
        return done

    def _raised(self, name: str, most: _Terms, arcs: IntArray, times_us: FloatArray) -> _Terms:
        """M-2 times the largest so far, with these arcs' times."""
        own = self._sum(arcs, (self.problem.micro_batches - 2) * times_us)
        return [(self._time(name, most, own), 1.0)] if own else most

    def _tail(self) -> Any:
        """U."""
        tail = self._time("U")
        problem, link = self.problem, link_us_of(self.problem)
        hidden: _Terms = []
        for i, (ends, starts) in enumerate(zip(self.ending, self.starting, strict=True)):
            more = [*hidden, *self._sum(ends, problem.hidden_us), *self._sum(starts, 2 * link)]
            before = self._time(f"H{i}")
            self._row([(before, -1.0), *more], self.pulp.LpConstraintGE, 0.0)
            hidden = [(before, 1.0)]
            self._raise(tail, [*self._sum(starts, problem.optimizer_us), (before, -1.0)])
        return tail
