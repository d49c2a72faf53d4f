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

Arcs that can be in no plan better than one at hand are dropped first (`planner.solve.arcs`).

PuLP states the programme, HiGHS or else CBC solves it. Times are scaled so that a step is about 1000, and M-1 and M-2
are part of X and Z: the solvers' absolute tolerances of 1e-7 to 1e-6 are then about 1e-9 of the step.

Complexity: exponential at worst. A few thousand arcs that cannot be dropped take a minute: few micro-batches for many
unlike devices are the hard case.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from planner.core.extras import check_installed, importing
from planner.solve.arcs import ArcProblem, Plan, narrow, step_us
from planner.solve.arrays import FloatArray, IntArray
from planner.solve.quiet import without_output

Solver = Literal["auto", "highs", "cbc"]
Status = Literal["optimal", "feasible", "infeasible", "unknown"]

_RELATIVE = 1e-9
"""Plans closer than this are the same to the solvers."""
_WRONG = 1e-6
"""A solver that is off by more has failed."""
_SCALED_STEP = 1000.0
_MAX_TERMS = 1_000_000
"""A programme of more layers summed over all arcs is not tried: PuLP takes some us to state and to pass on each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MilpAnswer:
    """What is proven of the fastest plan among those that take at most `upper_us`."""

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
        MissingPackageError: PuLP, or every solver that it could use, is not installed.
        RuntimeError: The solver failed.
    """
    plan, kept, least_us = narrow(problem, upper_us)
    at_hand_us = step_us(problem, plan)
    if not len(kept):
        return MilpAnswer(status="infeasible", bound_us=upper_us)
    fewer = problem.take(kept)
    # Every plan has a stage that begins at layer 0.
    root_us = float(np.min(least_us[fewer.first == 0]))
    solved = _solve(fewer, root_us, time_limit_s, solver)
    better = tuple(kept[list(solved.arcs)].tolist())
    better_us = step_us(problem, better)
    proven = solved.status in ("optimal", "infeasible")
    if proven and at_hand_us <= upper_us and better_us > at_hand_us * (1 + _WRONG):
        raise RuntimeError(f"the solver says that no plan is faster than {better_us} us, but one takes {at_hand_us} us")
    if better_us < at_hand_us:
        plan, at_hand_us = better, better_us
    bound_us = at_hand_us if proven else max(root_us, solved.bound_us)
    if plan and at_hand_us <= upper_us * (1 + _RELATIVE):
        status: Status = "optimal" if proven else "feasible"
        return MilpAnswer(status=status, arcs=plan, step_us=at_hand_us, bound_us=min(at_hand_us, bound_us))
    return MilpAnswer(status="infeasible" if proven else "unknown", bound_us=min(upper_us, bound_us))


def _solve(problem: ArcProblem, root_us: float, time_limit_s: float | None, solver: Solver) -> MilpAnswer:
    """Solve the programme over arcs each of which is on some path."""
    if np.sum(problem.end - problem.first) > _MAX_TERMS:
        return MilpAnswer(status="unknown", bound_us=-math.inf)
    with importing("milp"):
        import pulp  # noqa: PLC0415 - loads longer than all else that a short command needs

    unit_us = max(root_us, float(problem.optimizer_us.max())) / _SCALED_STEP or 1.0
    with warnings.catch_warnings():
        # PuLP 3.3 warns of every way to make a variable that 3.3.0 had, and of the CBC it brings along.
        warnings.simplefilter("ignore", DeprecationWarning)
        programme = _Programme(pulp, problem, unit_us)
        with without_output():
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
    return MilpAnswer(status=status, arcs=arcs, bound_us=bound_us)


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
    check_installed("milp")
    raise RuntimeError(f"PuLP has no solver that runs here ({name})")


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
        f, p, q, c = problem.letters
        largest = self._largest("F", np.maximum(f, c))
        span = self._time("D", self._sum(self.all, np.minimum(p, q) + c) + self._largest("B", np.maximum(p, c)))
        if not np.array_equal(p, q):
            self.lp += span >= self._last()
        self.lp += self._sum(self.all, f + c) + largest + span + self._tail()

    def plan(self) -> Plan:
        """The chosen arcs in the order of the chain."""
        arcs = [n for n, variable in enumerate(self.chosen) if (variable.varValue or 0.0) > 0.5]
        arcs.sort(key=lambda n: int(self.problem.first[n]))
        cuts = [0, *(int(self.problem.end[n]) for n in arcs)]
        if cuts[:-1] != [int(self.problem.first[n]) for n in arcs] or cuts[-1] != self.problem.num_layers:
            raise RuntimeError(f"the solver's answer is no plan: its stages end at layers {cuts[1:]}")
        return tuple(arcs)

    def _sum(self, arcs: IntArray, times_us: FloatArray) -> Any:
        """The chosen ones' times."""
        times = (times_us[arcs] / self.unit_us).tolist()
        terms = zip(arcs.tolist(), times, strict=True)
        return self.pulp.LpAffineExpression([(self.chosen[n], time) for n, time in terms if time])

    def _count(self, arcs: IntArray) -> Any:
        return self.pulp.LpAffineExpression([(self.chosen[n], 1.0) for n in arcs])

    def _time(self, name: str, *at_least: Any) -> Any:
        """A time of 0 or more, and of at least each of these."""
        time = self.pulp.LpVariable(name, lowBound=0.0)
        for least in at_least:
            self.lp += time >= least
        return time

    def _paths(self) -> None:
        device = self.problem.device
        self.lp += self._count(self.starting[0]) == 1
        for into, out in zip(self.ending[1:], self.starting[1:], strict=True):
            if not self.problem.ordered:
                self.lp += self._count(into) == self._count(out)
                continue
            # In a fixed order, what ends at place k-1 goes on at place k.
            for k in range(1, len(self.problem.counts)):
                self.lp += self._count(into[device[into] == k - 1]) == self._count(out[device[out] == k])
        for t, count in enumerate(self.problem.counts):
            self.lp += self._count(np.flatnonzero(device == t)) <= count

    def _largest(self, name: str, times_us: FloatArray) -> Any:
        """M-1 times the largest."""
        first, end, extra = self.problem.first, self.problem.end, self.problem.micro_batches - 1
        layers = range(self.problem.num_layers if extra else 0)
        covering = (np.flatnonzero((first <= layer) & (layer < end)) for layer in layers)
        return self._time(name, *(self._sum(arcs, extra * times_us) for arcs in covering))

    def _last(self) -> Any:
        """D_0 by the recursion over the first layers; M is at least 2."""
        _, p, q, c = self.problem.letters
        waits = self.problem.micro_batches - 2
        work = done = most = 0
        for i, arcs in reversed(list(enumerate(self.starting))):
            at_stage = most = self._time(f"X{i}", most, self._sum(arcs, waits * p))
            at_link = most = self._time(f"Z{i}", most, self._sum(arcs, waits * c))
            done = self._time(
                f"D{i}",
                done + self._sum(arcs, q + c),
                work + self._sum(arcs, p + q + c) + at_stage,
                work + self._sum(arcs, p + 2 * c) + at_link,
            )
            work = self._time(f"A{i}", work + self._sum(arcs, p + c))
        return done

    def _tail(self) -> Any:
        """U."""
        c = self.problem.letters[-1]
        tail, hidden = self._time("U"), 0
        for i, (ends, starts) in enumerate(zip(self.ending, self.starting, strict=True)):
            before = self._time(f"H{i}")
            self.lp += before <= hidden + self._sum(ends, self.problem.hidden_us) + self._sum(starts, 2 * c)
            self.lp += tail >= self._sum(starts, self.problem.optimizer_us) - before
            hidden = before
        return tail
