"""A bound for all cuts of several chunks: what is least in the linear program of `linear_program.py`.

A cut lies at a layer's edge, and a stage is recomputed whole or not at all. Where the program's answer shares a layer
between two stages, or a stage between two ways, branch and bound (Land and Doig, 1960) makes one program for each of
the possibilities: always in the program whose answer is least, and where most time is in doubt. No partition beats
the least answer that is open then, or the best plan.

HiGHS solves the programs, where it is installed: else there is no such bound.
"""

import importlib
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple

import numpy as np

from planner.core.extras import is_installed, without_output
from planner.solve.chunks.linear_program import LinearProgram, RecomputeColumns
from planner.solve.space.arrays import FloatArray, IntArray

_SAFE = 1e-6
"""The solver's tolerances, several times over: by so much of it the bound is lowered."""

_DOUBT = 1e-6
"""Of the work of all layers: less is not in doubt."""

_UNLIMITED = 2**31 - 1


class CutBound(NamedTuple):
    """The answer."""

    bound_us: float
    """No partition is faster."""
    cuts: IntArray
    """Whole cuts near those of the answer, shape (S+1,)."""


class _CutSide(NamedTuple):
    """On which side of a layer a cut lies."""

    column: int
    """The column of a y."""
    value: int
    """What that y is: 0 or 1."""


class _RecomputeOption(NamedTuple):
    """How a stage is recomputed."""

    stage: int
    option: int | None
    """None: not at all."""


_Decision = _CutSide | _RecomputeOption


class _Node(NamedTuple):
    """A program with some things decided; the least comes first."""

    step: float
    number: int
    decided: frozenset[_Decision]
    open: tuple[_Decision, ...]
    """One of these holds for every partition; none where nothing is in doubt."""
    shift: tuple[int, ...]
    """By how much each cut lies behind the foremost place that it may have."""


def is_solvable() -> bool:
    """Whether HiGHS is installed."""
    return is_installed("highspy")


class BranchAndBound:
    """Bounds for all partitions of a program."""

    def __init__(self, program: LinearProgram) -> None:
        # It loads longer than all else that a short command needs.
        self._highs: Any = importlib.import_module("highspy")
        self._program = program
        with without_output():
            self._solver = self._highs.Highs()
        self._solver.setOptionValue("output_flag", False)
        self._solver.setOptionValue("threads", 1)
        self._solver.passModel(self._model())
        self._decided: frozenset[_Decision] = frozenset()
        """The solver's model has this decided."""
        self._nodes: list[_Node] = []
        """A heap of what is still to be looked into."""
        self._made = 0
        self.iterations = 0
        """Iterations of the simplex method so far."""

    def solve(self, *, most_iterations: int = _UNLIMITED, limit_s: float = inf) -> CutBound | None:
        """What the program itself says; None where the solver does not get so far.

        Args:
            most_iterations: Of the simplex method.
            limit_s: For all of it.
        """
        if not self._run_solver(most_iterations, self._solver.getRunTime() + limit_s):
            return None
        root = self._node(frozenset())
        self._nodes = [root]
        return CutBound(self._in_us(root.step), self._cuts_of(root))

    def branch(self, upper_us: float, *, most_iterations: int, limit_s: float = inf) -> float:
        """What no partition can beat, in microseconds, at most `upper_us`; 0 where `solve` had no answer.

        Args:
            upper_us: A step that is reached: what cannot be faster is not looked into.
            most_iterations: Of the simplex method; the last program may take some more.
            limit_s: For all of it.
        """
        if not self._made:
            return 0.0
        upper, nodes = upper_us / self._program.unit_us, self._nodes
        last, ends_s = self.iterations + most_iterations, self._solver.getRunTime() + limit_s
        while nodes and nodes[0].step < upper and nodes[0].open and not self._is_over(last, ends_s):
            for child in self._children(heappop(nodes), last, ends_s):
                heappush(nodes, child)
        return min(upper_us, self._in_us(nodes[0].step)) if nodes else upper_us

    def _is_over(self, last_iteration: int, ends_s: float) -> bool:
        return self.iterations >= last_iteration or self._solver.getRunTime() >= ends_s

    def _children(self, node: _Node, last_iteration: int, ends_s: float) -> list[_Node]:
        """The programs in which one more thing is decided, without those in which nothing fits; else the node."""
        children = []
        for decision in node.open:
            decided = node.decided | {decision}
            self._decide(decided)
            if self._run_solver(max(0, last_iteration - self.iterations), ends_s):
                children.append(self._node(decided))
            elif self._solver.getModelStatus() != self._highs.HighsModelStatus.kInfeasible:
                # There may be more effort another time; what the solver cannot do it will not do then.
                return [node if self._is_over(last_iteration, ends_s) else node._replace(open=())]
        return children

    def _cuts_of(self, node: _Node) -> IntArray:
        num_layers, cuts = self._program.evaluator.case.costs.num_layers, len(node.shift)
        inner = np.maximum.accumulate(np.array(node.shift, dtype=np.int64)) + np.arange(1, cuts + 1)
        return np.array([0, *inner.tolist(), num_layers])

    def _run_solver(self, most_iterations: int, ends_s: float) -> bool:
        """Has the program solved, by that time on the solver's clock; whether it was."""
        self._solver.setOptionValue("simplex_iteration_limit", most_iterations)
        self._solver.setOptionValue("time_limit", ends_s)
        self._solver.run()
        self.iterations += self._solver.getInfo().simplex_iteration_count
        return bool(self._solver.getModelStatus() == self._highs.HighsModelStatus.kOptimal)

    def _node(self, decided: frozenset[_Decision]) -> _Node:
        """What the solver found, and what to decide next."""
        solution, costs = self._solver.getSolution(), self._program.evaluator.case.costs
        columns, rows = np.array(solution.col_value), np.array(solution.row_value)
        layer_us = costs.forward_us + costs.backward_us
        cuts_us, sides = self._undecided_cut(columns, layer_us)
        recompute_us, options = self._undecided_recomputation(columns, rows, costs.forward_us)
        decisions: tuple[_Decision, ...] = sides if cuts_us >= recompute_us else options
        is_open = max(cuts_us, recompute_us) > _DOUBT * layer_us.sum()
        shift = np.rint(self._cut_variables(columns).sum(axis=1)).astype(np.int64)
        return _Node(
            self._solver.getInfo().objective_function_value,
            self._next_number(),
            decided,
            decisions if is_open else (),
            tuple(shift.tolist()),
        )

    def _next_number(self) -> int:
        self._made += 1
        return self._made

    def _undecided_cut(self, columns: FloatArray, layer_us: FloatArray) -> tuple[float, tuple[_CutSide, ...]]:
        """Time of layers that lie on both sides of a cut, and on which side of the most divided layer it may lie."""
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
        """Time of layers that are recomputed in another way than most of their stage is, and the ways it may have."""
        doubts = [(0.0, 0)]
        for s, stage in enumerate(self._stages()):
            layers, own = list(stage.rows), list(stage.rows.values())
            kept = rows[own] - np.array(self._program.constraints.lower)[own]
            shares = np.array([kept, *(columns[list(option.values())] for option in stage.columns)])
            by_option_us = shares @ forward_us[layers]
            doubts.append((float(by_option_us.sum() - by_option_us.max()), s))
        doubt_us, s = max(doubts)
        if not doubt_us:
            return 0.0, ()
        options = range(len(self._stages()[s].columns))
        return doubt_us, (_RecomputeOption(s, None), *(_RecomputeOption(s, option) for option in options))

    def _decide(self, decided: frozenset[_Decision]) -> None:
        """Has these things decided, and no others, in the solver's model."""
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
        stage = self._stages()[decision.stage]
        for option, columns in enumerate(stage.columns):
            for column in columns.values():
                is_none = is_decided and option != decision.option
                self._solver.changeColBounds(column, 0.0, 0.0 if is_none else upper[column])
        for row in stage.rows.values():
            lower, is_whole = constraints.lower[row], is_decided and decision.option is not None
            self._solver.changeRowBounds(row, lower, lower if is_whole else constraints.upper[row])

    def _stages(self) -> list[RecomputeColumns]:
        """Those whose ways are to be decided: layers by themselves may be recomputed or not."""
        return [] if self._program.evaluator.case.policy == "layers" else self._program.recomputation or []

    def _cut_variables(self, columns: FloatArray) -> FloatArray:
        """The program's y, shape (S-1, L-S)."""
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
