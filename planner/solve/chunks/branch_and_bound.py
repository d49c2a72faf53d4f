"""Lower bound of the step time of all partitions, by branch and bound over a linear program.

In a partition, every layer belongs to one stage, and a stage has one recompute choice. The solution of the linear
program may divide a layer between two stages, or a stage between two recompute choices. Branch and bound (Land and
Doig, 1960) then replaces the linear program (a node) by several nodes with one more decision each. A decision fixes on
which side of a layer a cut is, or the recompute choice of a stage. The search continues with the node of smallest step
time. The smallest step time of all remaining nodes is a lower bound for all partitions.

The solver HiGHS solves the linear programs (`linear_program.py`). Without HiGHS, this bound is not available.
"""

import importlib
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple

import numpy as np

from planner.core.cost.arrays import FloatArray, IntArray
from planner.core.extras import discarding_stdout
from planner.solve.chunks.linear_program import LinearProgram, RecomputeColumns

_SAFE = 1e-6
"""Relative amount by which the lower bound is lowered: several times the tolerances of HiGHS."""

_DOUBT = 1e-6
"""Tolerance for divided layers, as a share of the time of all layers.

A cut may divide layers, and so may the recompute options of a stage. Branching ends if the smaller parts take at most
this time, for every cut and every stage.
"""

_UNLIMITED = 2**31 - 1


class CutBound(NamedTuple):
    """Lower bound of the step time from the linear program, and the cuts of the program's solution."""

    bound_us: float
    """Lower bound of the step time of all partitions, in microseconds."""
    cuts: IntArray | None
    """Cuts of the solution in whole layers, shape (stages + 1,); None if the bound reaches a known plan's step time."""


class _CutSide(NamedTuple):
    """Decision that a cut is before or after a layer."""

    column: int
    """Column of the linear program for the variable y_s,j of this cut and layer (`linear_program.py`)."""
    value: int
    """Fixed value of the variable y_s,j: 1 if the cut is after the layer, 0 if the cut is before the layer."""


class _RecomputeOption(NamedTuple):
    """Decision on the recompute option of a stage."""

    stage: int
    option: int | None
    """Index into `RecomputeColumns.columns`; None to recompute no layer."""


_Decision = _CutSide | _RecomputeOption


class _Node(NamedTuple):
    """Solution of the linear program under some decisions. Nodes are sorted by step time."""

    step: float
    """Smallest step time under the decisions in `decided`, in the units of the linear program."""
    number: int
    """Position in the order of creation; sorts nodes of equal step time."""
    decided: frozenset[_Decision]
    # Every partition under `decided` satisfies one of these decisions. Empty to stop branching.
    open: tuple[_Decision, ...]
    # Number of layers before each inner cut s in the solution, rounded, minus s.
    shift: tuple[int, ...]


class BranchAndBound:
    """Branch and bound over cuts and recompute choices."""

    def __init__(self, program: LinearProgram) -> None:
        # HiGHS is imported here, because it loads longer than everything else that a short command needs.
        self._highs: Any = importlib.import_module("highspy")
        self._program = program
        with discarding_stdout():
            self._solver = self._highs.Highs()
        self._solver.setOptionValue("output_flag", False)
        self._solver.setOptionValue("threads", 1)
        # Presolving would keep the solver from stopping at a bound of the objective, and saves no time.
        self._solver.setOptionValue("presolve", "off")
        self._solver.passModel(self._model())
        self._decided: frozenset[_Decision] = frozenset()
        """Decisions in the solver's current model."""
        self._nodes: list[_Node] = []
        """Heap of the remaining nodes."""
        self._made = 0
        self.iterations = 0
        """Number of simplex iterations so far."""

    def solve_root(
        self, *, upper_us: float = inf, most_iterations: int = _UNLIMITED, limit_s: float = inf
    ) -> CutBound | None:
        """Solve the linear program of the root node, before any branching.

        Args:
            upper_us: Step time of a known plan, in microseconds. The solver stops when the bound reaches it.
            most_iterations: Limit on simplex iterations.
            limit_s: Time limit in seconds.

        Returns:
            Lower bound of the step time, and the cuts of the solution; None if a limit is reached first.
        """
        upper = upper_us / self._program.unit_us * (1 + 2 * _SAFE)
        self._solver.setOptionValue("objective_bound", upper)
        if not self._run_solver(most_iterations, self._solver.getRunTime() + limit_s):
            return CutBound(upper_us, None) if upper_us < inf and self._is_beaten() else None
        if upper_us < inf and self._solver.getInfo().objective_function_value >= upper:
            return CutBound(upper_us, None)
        root = self._node(frozenset())
        self._nodes = [root]
        inner = np.maximum.accumulate(np.array(root.shift, dtype=np.int64)) + np.arange(1, len(root.shift) + 1)
        cuts = np.array([0, *inner.tolist(), self._program.evaluator.case.costs.num_layers])
        return CutBound(self._in_us(root.step), cuts)

    def branch(self, upper_us: float, *, most_iterations: int, limit_s: float = inf) -> float:
        """Branch until a limit is reached; return a lower bound of the step time of all partitions, in microseconds.

        The bound is at most `upper_us`. It is 0 if `solve_root` has found no bound.

        Args:
            upper_us: Step time of a known plan, in microseconds.
            most_iterations: Limit on simplex iterations.
            limit_s: Time limit in seconds.
        """
        if not self._made:
            return 0.0
        upper, nodes = upper_us / self._program.unit_us, self._nodes
        self._solver.setOptionValue("objective_bound", upper * (1 + 2 * _SAFE))
        last, ends_s = self.iterations + most_iterations, self._solver.getRunTime() + limit_s
        while nodes and nodes[0].step < upper and nodes[0].open and not self._is_over(last, ends_s):
            for child in self._children(heappop(nodes), last, ends_s):
                heappush(nodes, child)
        return min(upper_us, self._in_us(nodes[0].step)) if nodes else upper_us

    def _is_over(self, last_iteration: int, ends_s: float) -> bool:
        return self.iterations >= last_iteration or self._solver.getRunTime() >= ends_s

    def _children(self, node: _Node, last_iteration: int, ends_s: float) -> list[_Node]:
        children = []
        for decision in node.open:
            decided = node.decided | {decision}
            self._apply_decisions(decided)
            if self._run_solver(max(0, last_iteration - self.iterations), ends_s):
                children.append(self._node(decided))
            elif not self._is_beaten():
                # At a limit, a later call of `branch` may continue. If the solver fails, the node is not branched on.
                return [node if self._is_over(last_iteration, ends_s) else node._replace(open=())]
        return children

    def _is_beaten(self) -> bool:
        # No partition is faster than the known plan, because none is possible or all take longer.
        status = self._highs.HighsModelStatus
        return self._solver.getModelStatus() in (status.kInfeasible, status.kObjectiveBound)

    def _run_solver(self, most_iterations: int, ends_s: float) -> bool:
        self._solver.setOptionValue("simplex_iteration_limit", most_iterations)
        self._solver.setOptionValue("time_limit", ends_s)
        self._solver.run()
        self.iterations += self._solver.getInfo().simplex_iteration_count
        return bool(self._solver.getModelStatus() == self._highs.HighsModelStatus.kOptimal)

    def _node(self, decided: frozenset[_Decision]) -> _Node:
        solution, costs = self._solver.getSolution(), self._program.evaluator.case.costs
        columns, rows = np.array(solution.col_value), np.array(solution.row_value)
        layer_us = costs.forward_us + costs.backward_us
        cuts_us, sides = self._undecided_cut(columns, layer_us)
        recompute_us, options = self._undecided_recomputation(columns, rows, costs.forward_us)
        decisions: tuple[_Decision, ...] = sides if cuts_us >= recompute_us else options
        is_open = max(cuts_us, recompute_us) > _DOUBT * layer_us.sum()
        shift = np.rint(self._cut_variables(columns).sum(axis=1)).astype(np.int64)
        self._made += 1
        return _Node(
            self._solver.getInfo().objective_function_value,
            self._made,
            decided,
            decisions if is_open else (),
            tuple(shift.tolist()),
        )

    def _undecided_cut(self, columns: FloatArray, layer_us: FloatArray) -> tuple[float, tuple[_CutSide, ...]]:
        # Return the time of the smaller shares of the layers that the least decided cut divides, and two decisions on
        # its most evenly divided layer.
        fractions = self._cut_variables(columns)
        if not fractions.size:
            return 0.0, ()
        doubt = np.minimum(fractions, 1 - fractions)
        cuts, width = fractions.shape
        doubt_us = (doubt * layer_us[np.arange(1, cuts + 1)[:, None] + np.arange(width)]).sum(axis=1)
        cut = int(doubt_us.argmax())
        column = cut * width + int(doubt[cut].argmax())
        return float(doubt_us[cut]), (_CutSide(column, 0), _CutSide(column, 1))

    def _undecided_recomputation(
        self, columns: FloatArray, rows: FloatArray, forward_us: FloatArray
    ) -> tuple[float, tuple[_RecomputeOption, ...]]:
        # Return the time of the layers outside the stage's most used option, and a decision for each option.
        doubts = [(0.0, 0)]
        for s, stage in enumerate(self._stages_to_decide()):
            layers, own = list(stage.rows), list(stage.rows.values())
            kept = rows[own] - np.array(self._program.constraints.lower)[own]
            shares = np.array([kept, *(columns[list(option.values())] for option in stage.columns)])
            by_option_us = shares @ forward_us[layers]
            doubts.append((float(by_option_us.sum() - by_option_us.max()), s))
        doubt_us, s = max(doubts)
        if not doubt_us:
            return 0.0, ()
        options = range(len(self._stages_to_decide()[s].columns))
        return doubt_us, (_RecomputeOption(s, None), *(_RecomputeOption(s, option) for option in options))

    def _apply_decisions(self, decided: frozenset[_Decision]) -> None:
        for decision in self._decided - decided:
            self._bound(decision, is_decided=False)
        for decision in decided - self._decided:
            self._bound(decision, is_decided=True)
        self._decided = decided

    def _bound(self, decision: _Decision, *, is_decided: bool) -> None:
        constraints, upper = self._program.constraints, self._program.upper
        if isinstance(decision, _CutSide):
            bounds = (decision.value, decision.value) if is_decided else (0.0, upper[decision.column])
            self._solver.changeColBounds(decision.column, *bounds)
            return
        stage = self._stages_to_decide()[decision.stage]
        for option, columns in enumerate(stage.columns):
            for column in columns.values():
                is_none = is_decided and option != decision.option
                self._solver.changeColBounds(column, 0.0, 0.0 if is_none else upper[column])
        for row in stage.rows.values():
            lower, is_whole = constraints.lower[row], is_decided and decision.option is not None
            self._solver.changeRowBounds(row, lower, lower if is_whole else constraints.upper[row])

    def _stages_to_decide(self) -> list[RecomputeColumns]:
        return [] if self._program.evaluator.case.policy == "layers" else self._program.recomputation or []

    def _cut_variables(self, columns: FloatArray) -> FloatArray:
        cuts = self._program.evaluator.num_stages - 1
        width = self._program.evaluator.case.costs.num_layers - cuts - 1
        return columns[: cuts * width].reshape(cuts, width)

    def _in_us(self, step: float) -> float:
        return step * self._program.unit_us * (1 - _SAFE)

    def _model(self) -> Any:
        program, constraints = self._program, self._program.constraints
        model = self._highs.HighsLp()
        model.num_col_, model.num_row_ = len(program.upper), len(constraints.starts)
        costs = np.zeros(len(program.upper))
        costs[program.step] = 1.0
        model.col_cost_, model.col_lower_ = costs, np.zeros(len(program.upper))
        model.col_upper_ = np.array(program.upper)
        model.row_lower_, model.row_upper_ = np.array(constraints.lower), np.array(constraints.upper)
        model.a_matrix_.format_ = self._highs.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array([*constraints.starts, len(constraints.columns)], dtype=np.int32)
        model.a_matrix_.index_ = np.array(constraints.columns, dtype=np.int32)
        model.a_matrix_.value_ = np.array(constraints.factors)
        return model
