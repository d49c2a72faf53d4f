"""Linear program whose optimum is a lower bound of the step time of all partitions. Its cuts may divide layers.

    K, V, M number of devices, of chunks per device, of micro-batches
    S, L    number of stages (K V), number of layers
    c_s     number of layers before stage s, s <= c_s <= L - S + s
    y_s,j   1 if layer s + j is before stage s (c_s > s + j), else 0; the program allows any value from 0 to 1
    x_s,l   share of layer l in stage s: y_{s+1,l-s-1} - y_{s,l-s}
    r_w,s,l share of layer l in stage s that is recomputed with option w: for all micro-batches, or all but the last;
            sum_w r <= x

For the cuts of a partition, y does not increase with j. It does not decrease with s, because every stage has a layer.
There are no other constraints on y. Times of stages, transfers and optimizers are sums over layers, so they are linear
in y and r. Because the action order is given, the clocks of `planner.core.cost.simulate` are linear as well: the
maximum of two clocks becomes a variable with the constraints that it is at least each of them.

Memory has a linear lower bound. At a point in the step, a stage takes at least d + sum of a_l bytes without
recomputation, and at least d + sum of h_l bytes with a recompute option. The sums are over the stage's layers l:

    a_l     bytes of the stage l..e minus bytes of the stage l+1..e, without recomputation: mean over all e
    h_l     the same mean with the recompute option
    d       minimum, over all possible stages, of the bytes of a stage minus its sum of a_l or h_l

With per-layer recomputation, a stage may also recompute single layers. Let f_l be the most bytes that recomputing only
layer l can free. The sum then uses min(h_l, a_l - f_l) instead of h_l.

Complexity: O(S L + K V M) rows (constraints) and columns (variables).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from planner.core.cost.arrays import FloatArray, IntArray
from planner.core.cost.device_memory import most_shared_input_bytes
from planner.core.cost.simulate import StageDurations, device_spans
from planner.solve.space.partitions import Evaluator

_SCALED_STEP = 1000.0
"""Approximate step time in the units of the linear program."""

_MOST_LAYERS = 160
"""Largest number of layers for memory constraints. With more layers, the tables of all stages would be too large."""


@dataclass(frozen=True, slots=True)
class LinearExpression:
    """Constant plus a sum of variables times factors. The simulator accepts these expressions as times."""

    factors: Mapping[int, float] = field(default_factory=dict)
    """Factor of each variable, by the column of the variable in the linear program."""
    constant: float = 0.0

    def __bool__(self) -> bool:
        """Return True if the expression is not 0."""
        return bool(self.factors) or self.constant != 0

    def __add__(self, other: "LinearExpression | float") -> "LinearExpression":
        """Return the sum of the expression and `other`."""
        if not isinstance(other, LinearExpression):
            return LinearExpression(self.factors, self.constant + other)
        factors = dict(self.factors)
        for column, factor in other.factors.items():
            factors[column] = factors.get(column, 0.0) + factor
        return LinearExpression(factors, self.constant + other.constant)

    def __sub__(self, other: "LinearExpression") -> "LinearExpression":
        """Return the difference of the expression and `other`."""
        return self + other.scaled_by(-1.0)

    def scaled_by(self, factor: float) -> "LinearExpression":
        """Return the product of the expression and a number."""
        return LinearExpression(
            {column: factor * value for column, value in self.factors.items()}, factor * self.constant
        )


class RecomputeColumns(NamedTuple):
    """Variables and constraints of the linear program for the recomputation of one stage."""

    columns: list[dict[int, int]]
    """For each recompute option, by layer: column of the variable for the layer's recomputed share (0 to 1)."""
    rows: dict[int, int]
    """For each layer: row of the constraint that limits its recomputed share to its share in the stage."""


@dataclass(slots=True)
class LinearConstraints:
    """Constraints of a linear program as a sparse matrix."""

    columns: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def add(self, line: LinearExpression, *, is_equal: bool = False) -> None:
        """Add the constraint `line` >= 0, or `line` = 0 if `is_equal`."""
        self.starts.append(len(self.columns))
        self.columns += line.factors.keys()
        self.factors += line.factors.values()
        self.lower.append(-line.constant)
        self.upper.append(-line.constant if is_equal else np.inf)


def approximate_num_constraints(evaluator: Evaluator) -> int:
    """Return the approximate number of constraints of the linear program."""
    return (
        3 * evaluator.num_stages * (evaluator.case.costs.num_layers - evaluator.num_stages) + 2 * evaluator.num_actions
    )


class LinearProgram:
    """Linear program for the cuts on one number of devices; its optimum is a lower bound of the step time.

    Args:
        evaluator: Evaluator for this number of devices.
        reference_cuts: Cuts of any partition. The program limits memory only at those points in the step at which
            this partition may need the most memory.
        scale_us: Approximate step time in microseconds, which sets the units of the program.
    """

    def __init__(self, evaluator: Evaluator, reference_cuts: IntArray, *, scale_us: float) -> None:
        self.evaluator, self.unit_us = evaluator, scale_us / _SCALED_STEP
        self._L, self._S = evaluator.case.costs.num_layers, evaluator.num_stages
        self._W = self._L - self._S
        self.upper: list[float] = [1.0] * ((self._S - 1) * self._W)
        """Upper bound of every column. The first columns are the y_s,j of the module's docstring, by s, then j."""
        self.constraints = LinearConstraints()
        self._add_cut_constraints()
        recomputing = evaluator.allowed[1:]
        self._choices = [[choice] for choice in recomputing]
        """For each option w, the recompute choices that it covers: indices into `CHOICES`."""
        if evaluator.case.policy == "layers":
            self._choices = [recomputing]
        self.recomputation = self._add_memory_constraints(reference_cuts)
        """Recomputation of each stage; None if memory is not constrained."""
        self.step = self._column()
        """Column of the step time, which is minimized."""
        self._add_time_constraints()

    def _column(self, upper: float = np.inf) -> int:
        self.upper.append(upper)
        return len(self.upper) - 1

    def _new_variable_for(self, value: LinearExpression) -> LinearExpression:
        if not value.factors:
            return value
        column = self._column()
        self.constraints.add(LinearExpression({column: 1.0}) - value, is_equal=True)
        return LinearExpression({column: 1.0})

    # ---- cuts

    def _add_cut_constraints(self) -> None:
        for s in range(1, self._S):
            for j in range(self._W):
                column = (s - 1) * self._W + j
                if j + 1 < self._W:
                    self.constraints.add(LinearExpression({column: 1.0, column + 1: -1.0}))
                if s + 1 < self._S:
                    self.constraints.add(LinearExpression({column + self._W: 1.0, column: -1.0}))

    def _sum_before(self, cut: int, weights: FloatArray) -> LinearExpression:
        if cut in (0, self._S):
            return LinearExpression({}, float(weights.sum()) if cut else 0.0)
        first = (cut - 1) * self._W
        factors = {first + j: float(w) for j, w in enumerate(weights[cut : cut + self._W].tolist()) if w}
        return LinearExpression(factors, float(weights[:cut].sum()))

    def _stage_sum(self, stage: int, weights: FloatArray) -> LinearExpression:
        return self._sum_before(stage + 1, weights) - self._sum_before(stage, weights)

    def _at_cut(self, cut: int, values: FloatArray) -> LinearExpression:
        # The entry of `values`, shape (layers + 1,), for a cut. The weight of a layer is the change of the value if the
        # cut moves from before to after the layer.
        return self._sum_before(cut, np.diff(values)) + float(values[0])

    # ---- times

    def _add_time_constraints(self) -> None:
        evaluator = self.evaluator
        case, costs, unit = evaluator.case, evaluator.case.costs, self.unit_us
        speeds = evaluator.speeds
        overhead = case.cluster.overhead_us / unit
        forward_us = np.where(costs.has_backward, costs.forward_us, 0.0)
        no_entry = np.zeros(self._L + 1)

        def stages(layer_us: FloatArray, more: float, entry_us: FloatArray = no_entry) -> list[LinearExpression]:
            return [
                self._new_variable_for(
                    self._stage_sum(s, layer_us / (speeds[s] * unit))
                    + self._at_cut(s, entry_us / (speeds[s] * unit))
                    + more
                )
                for s in range(self._S)
            ]

        forward = stages(costs.forward_us, overhead, entry_us=np.append(costs.entry_us, 0.0))
        alone = stages(costs.backward_us, overhead)
        again = last_again = [LinearExpression()] * self._S
        if self.recomputation is not None:
            in_last = [n for n, choices in enumerate(self._choices) if 1 not in choices]
            again = self._recompute_times(forward_us / unit, range(len(self._choices)))
            last_again = self._recompute_times(forward_us / unit, in_last)
        elif 0 not in evaluator.allowed:
            again = stages(forward_us, 0.0)
            last_again = again if 1 not in evaluator.allowed else last_again
        durations = {"F": forward, "B": _pairwise_sums(alone, again)}
        last = {"F": forward, "B": _pairwise_sums(alone, last_again)}
        if case.schedule.splits_backward:
            split_backward = (
                stages(costs.split_backward.input_us, overhead),
                stages(costs.split_backward.weight_us, overhead),
            )
            durations |= {"I": _pairwise_sums(split_backward[0], again), "W": split_backward[1]}
            last |= {"I": _pairwise_sums(split_backward[0], last_again), "W": split_backward[1]}
        sends = [self._send(s) for s in range(self._S)]
        times = StageDurations(durations, last, sends, evaluator.blocking.tolist())
        carried = device_spans(evaluator.actions, times, begin=LinearExpression(), later_of=self._maximum)
        # Tied parameters are updated once if both layers are in one stage, which the columns do not say.
        twice_us = sum(tie.optimizer_us for tie in costs.ties)
        own = [
            sum(
                (self._stage_sum(s, costs.optimizer_us / (speeds[s] * unit)) for s in chunks),
                start=LinearExpression({}, -twice_us / (speeds[chunks[0]] * unit)),
            )
            for chunks in evaluator.stages_by_device
        ]
        step = LinearExpression({self.step: 1.0})
        if case.schedule.splits_backward:
            for begin, end, more in zip(carried.begins, carried.ends, own, strict=True):
                self.constraints.add(step - (end + more - begin))
            return
        pipeline = LinearExpression({self._column(): 1.0})
        for end in carried.ends:
            self.constraints.add(pipeline - end)
        hidden = LinearExpression()
        for device, more in enumerate(own):
            self.constraints.add(step - (pipeline + more) + hidden)
            hidden = hidden + forward[device] + alone[device]
            hidden = hidden + sends[device] + sends[device]

    def _recompute_times(self, forward_us: FloatArray, options: Iterable[int]) -> list[LinearExpression]:
        assert self.recomputation is not None
        columns = [[stage.columns[option] for option in options] for stage in self.recomputation]
        return [
            self._new_variable_for(
                LinearExpression({column: forward_us[n] / speed for option in some for n, column in option.items()})
            )
            for some, speed in zip(columns, self.evaluator.speeds, strict=True)
        ]

    def _send(self, stage: int) -> LinearExpression:
        if stage + 1 == self._S or not self.evaluator.transfer_us[stage].any():
            return LinearExpression()
        return self._new_variable_for(self._at_cut(stage + 1, self.evaluator.transfer_us[stage] / self.unit_us))

    def _maximum(self, one: LinearExpression, other: LinearExpression) -> LinearExpression:
        if not one or not other:
            return one or other
        column = self._column()
        for clock in (one, other):
            self.constraints.add(LinearExpression({column: 1.0}) - clock)
        return LinearExpression({column: 1.0})

    # ---- memory

    def _add_memory_constraints(self, reference_cuts: IntArray) -> list[RecomputeColumns] | None:
        evaluator = self.evaluator
        if 0 not in evaluator.allowed or evaluator.case.costs.ties or self._L > _MOST_LAYERS:
            return None
        if (evaluator.excess_bytes(reference_cuts[None], np.zeros((1, self._S), dtype=np.int64)) <= 0).all():
            return None
        recomputation = [self._recompute_columns(s) for s in range(self._S)]
        whole = Evaluator(evaluator.case, evaluator.num_devices, most_layers=self._W + 1)
        for device, points in enumerate(whole.peak_allocation_counts):
            for point in self._points_with_most_memory(whole, device, reference_cuts):
                room = LinearExpression({}, evaluator.case.limits_bytes[device])
                for chunk, s in enumerate(evaluator.stages_by_device[device]):
                    counts = points[point, chunk]
                    handed_over = most_shared_input_bytes(evaluator.case.costs, counts) * (
                        s - 1 in evaluator.stages_by_device[device]
                    )
                    room = room - self._least_bytes(whole, counts, recomputation[s], s) + handed_over
                self.constraints.add(room.scaled_by(1 / evaluator.case.limits_bytes[device]))
        return recomputation

    def _recompute_columns(self, stage: int) -> RecomputeColumns:
        layers = range(stage, stage + self._W + 1)
        columns = [{n: self._column(1.0) for n in layers} for _ in self._choices]
        rows = {}
        for n in layers:
            only = np.zeros(self._L)
            only[n] = 1.0
            rows[n] = len(self.constraints.starts)
            self.constraints.add(
                self._stage_sum(stage, only) + LinearExpression({option[n]: -1.0 for option in columns})
            )
        return RecomputeColumns(columns, rows)

    def _points_with_most_memory(self, whole: Evaluator, device: int, reference_cuts: IntArray) -> list[int]:
        points, chunks = whole.peak_allocation_counts[device], whole.stages_by_device[device]
        alive = np.empty((len(self.evaluator.allowed), len(chunks), len(points)))
        for chunk, s in enumerate(chunks):
            place = reference_cuts[s + 1], max(0, reference_cuts[s] - reference_cuts[s + 1] + whole.most_layers)
            for option, choice in enumerate(self.evaluator.allowed):
                alive[option, chunk] = points[:, chunk] @ whole.stage_allocation_bytes[choice, *place][1:]
        alike = alive.sum(axis=1)
        return sorted(
            {
                int((alike[option] + alive[other, chunk] - alive[option, chunk]).argmax())
                for option, other in product(range(len(alive)), repeat=2)
                for chunk in range(len(chunks))
            }
        )

    def _least_bytes(
        self, whole: Evaluator, counts: FloatArray, recompute: RecomputeColumns, stage: int
    ) -> LinearExpression:
        tables, most_saved = whole.bytes_at_point(counts), np.full(self._L, -np.inf)
        kept_table = tables[0]
        if self.evaluator.case.policy == "layers":
            least, most_saved = whole.memory_bounds_by_layers(counts)
            kept_table = np.minimum(kept_table, least)
        kept, least_bytes = _linear_lower_bound(kept_table)
        changed: dict[int, float] = {}
        for columns, choices in zip(recompute.columns, self._choices, strict=True):
            dropped, dropped_least_bytes = _linear_lower_bound(np.min(tables[choices], axis=0))
            # A layer is recomputed with its stage or on its own. The bound uses the larger saving.
            saved = np.maximum(kept - dropped, most_saved)
            changed |= {column: -float(saved[n]) for n, column in columns.items()}
            least_bytes = min(least_bytes, dropped_least_bytes)
        return self._stage_sum(stage, kept) + LinearExpression(changed) + least_bytes


def _pairwise_sums(first: list[LinearExpression], second: list[LinearExpression]) -> list[LinearExpression]:
    return [one + other for one, other in zip(first, second, strict=True)]


def _linear_lower_bound(table: FloatArray) -> tuple[FloatArray, float]:
    # Return a weight for each layer, and a constant. For each stage, the constant plus the weights of its layers is at
    # most the value of the stage in `table`.
    first, added = _stage_places(len(table) - 1, table.shape[1])
    is_stage = (first >= 0) & np.isfinite(table)
    # The average that the first layer of a stage adds to it, over all ends.
    with np.errstate(invalid="ignore"):
        differences = (table[:, :-1] - table[:, 1:]).ravel()[added]
    is_known = (added >= 0) & np.isfinite(differences)
    sums = np.where(is_known, differences, 0.0).sum(axis=1)
    weights = np.maximum(sums / np.maximum(is_known.sum(axis=1), 1), 0.0)
    before = np.concatenate([[0.0], np.cumsum(weights)])
    least = table - (before[:, None] - before[np.maximum(first, 0)])
    return weights, float(least[is_stage].min())


@lru_cache(maxsize=64)
def _stage_places(num_layers: int, most_layers: int) -> tuple[IntArray, IntArray]:
    # Return two arrays for a table of stages, shape (layers + 1, most_layers): the first layer of the stage of each
    # entry; and, for each first layer, the flat indices of stages of two or more layers in the table without its last
    # column. Both are negative where there is no stage.
    first = np.arange(num_layers + 1)[:, None] - most_layers + np.arange(most_layers)[None]
    ends = np.arange(num_layers)[:, None] + np.arange(2, most_layers + 1)
    places = ends * (most_layers - 1) + np.arange(most_layers - 2, -1, -1)
    return first, np.where(ends <= num_layers, places, -1)
