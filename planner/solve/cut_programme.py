"""A bound for all cuts of several chunks: a linear programme in which cuts are continuous.

    S     stages;  L layers;  c_s  the cut in front of stage s, s <= c_s <= L - S + s
    y     y_{s,j} says by how much c_s - s > j: 0 or 1 for whole cuts, anything between here
    x     x_{s,l} = y_{s+1,l-s-1} - y_{s,l-s}, the share of layer l in stage s
    r     r_{s,l} <= x_{s,l}, the share that is computed again

For whole cuts y falls in j, and grows in s since every stage has a layer: these are all rows that y has. Times of
stages, transfers and optimizers are sums over layers, so that they are linear in y and r; and with the order of actions
given, so is what the clocks of `planner.core.cost.simulate` say, if each "the later of two" is a variable that is no
less than either. The least step time over all of these is below that of every partition.

Memory is counted from below: at a moment of a device a stage of layers i..e-1 takes at least sum a_l + d without
recomputation and sum h_l + d with it, a and h being what layers add to stages on average, and d the least that any
stage takes beyond, taken from the tables of all stages. Where single layers may be recomputed, h_l is no more than a_l
less what a layer saves at most, as often as it is held at the moment.

HiGHS solves it, where it is installed: else there is no such bound. Complexity: rows and columns are O(S L + K V M).
"""

import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from planner.core.cost.device_memory import most_handed_over_bytes
from planner.core.cost.linear import Linear
from planner.core.cost.simulate import Times, clocks
from planner.core.extras import is_installed
from planner.solve.arrays import FloatArray, IntArray
from planner.solve.many import Many

_SAFE = 1e-6
"""The solver's tolerances, several times over: by so much of it the bound is lowered."""

_SCALED_STEP = 1000.0
"""What a step is about in the programme's units."""

_UNLIMITED = 2**31 - 1

_MOST_LAYERS = 160
"""In longer chains memory does not count: tables of all stages would take too much of it themselves."""

_MOMENTS = 3
"""Of each device, the moments at which most is held are enough."""


class CutBound(NamedTuple):
    """The answer."""

    bound_us: float
    """No partition is faster."""
    cuts: IntArray
    """Whole cuts near those of the programme, shape (S+1,)."""


def is_solvable() -> bool:
    """Whether HiGHS is installed."""
    return is_installed("highspy")


def programme_size(many: Many) -> int:
    """About how many rows the programme has: what it takes to solve it grows faster than that."""
    return 3 * many.num_stages * (many.case.costs.num_layers - many.num_stages) + 2 * many.num_actions


def cut_bound(
    many: Many, near: IntArray, *, scale_us: float, most_iterations: int = _UNLIMITED, limit_s: float | None = None
) -> CutBound | None:
    """The bound for all partitions; None where the solver does not get so far.

    Args:
        many: The partitions.
        near: Cuts at which memory is looked at, shape (S+1,).
        scale_us: About what a step takes.
        most_iterations: Of the simplex method.
        limit_s: For the solver.
    """
    return _Programme(many, near, scale_us / _SCALED_STEP).solved(most_iterations, limit_s)


@dataclass(slots=True)
class _Lines:
    """The rows of a programme, each of them a sum that is at least 0, or 0."""

    columns: list[int]
    factors: list[float]
    starts: list[int]
    lower: list[float]
    upper: list[float]

    def add(self, line: Linear, *, is_equal: bool = False) -> None:
        self.starts.append(len(self.columns))
        self.columns += line.factors.keys()
        self.factors += line.factors.values()
        self.lower.append(-line.constant)
        self.upper.append(-line.constant if is_equal else np.inf)


class _Programme:
    def __init__(self, many: Many, near: IntArray, unit_us: float) -> None:
        self._many, self._unit_us = many, unit_us
        self._L, self._S = many.case.costs.num_layers, many.num_stages
        self._W = self._L - self._S
        self._upper: list[float] = [1.0] * ((self._S - 1) * self._W)
        self._lines = _Lines([], [], [], [], [])
        self._again = 0 in many.allowed and len(many.allowed) > 1
        self._cuts_in_order()
        layers = self._layers_again(near) if self._again else None
        self._step = self._column()
        self._times(layers)

    def solved(self, most_iterations: int, limit_s: float | None) -> CutBound | None:
        """Has the programme solved."""
        # It loads longer than all else that a short command needs.
        highspy: Any = importlib.import_module("highspy")
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("simplex_iteration_limit", most_iterations)
        if limit_s is not None:
            solver.setOptionValue("time_limit", limit_s)
        solver.passModel(self._model(highspy))
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        values = np.array(solver.getSolution().col_value[: (self._S - 1) * self._W])
        shift = np.rint(values.reshape(self._S - 1, self._W).sum(axis=1)).astype(np.int64)
        inner = np.maximum.accumulate(shift) + np.arange(1, self._S)
        bound_us = solver.getInfo().objective_function_value * self._unit_us * (1 - _SAFE)
        return CutBound(bound_us, np.array([0, *inner.tolist(), self._L]))

    def _model(self, highspy: Any) -> Any:
        model, lines = highspy.HighsLp(), self._lines
        model.num_col_, model.num_row_ = len(self._upper), len(lines.starts)
        costs = np.zeros(len(self._upper))
        costs[self._step] = 1.0
        model.col_cost_, model.col_lower_ = costs, np.zeros(len(self._upper))
        model.col_upper_ = np.array(self._upper)
        model.row_lower_, model.row_upper_ = np.array(lines.lower), np.array(lines.upper)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array([*lines.starts, len(lines.columns)], dtype=np.int32)
        model.a_matrix_.index_ = np.array(lines.columns, dtype=np.int32)
        model.a_matrix_.value_ = np.array(lines.factors)
        return model

    def _column(self, upper: float = np.inf) -> int:
        self._upper.append(upper)
        return len(self._upper) - 1

    def _defined(self, value: Linear) -> Linear:
        """A column of its own for a value that is used often."""
        if not value.factors:
            return value
        column = self._column()
        self._lines.add(Linear({column: 1.0}) - value, is_equal=True)
        return Linear({column: 1.0})

    # ---- cuts

    def _cuts_in_order(self) -> None:
        for s in range(1, self._S):
            for j in range(self._W):
                column = (s - 1) * self._W + j
                if j + 1 < self._W:
                    self._lines.add(Linear({column: 1.0, column + 1: -1.0}))
                if s + 1 < self._S:
                    self._lines.add(Linear({column + self._W: 1.0, column: -1.0}))

    def _before(self, cut: int, weights: FloatArray) -> Linear:
        """The weights of all layers in front of a cut."""
        if cut in (0, self._S):
            return Linear({}, float(weights.sum()) if cut else 0.0)
        first = (cut - 1) * self._W
        factors = {first + j: float(w) for j, w in enumerate(weights[cut : cut + self._W].tolist()) if w}
        return Linear(factors, float(weights[:cut].sum()))

    def _of_stage(self, stage: int, weights: FloatArray) -> Linear:
        return self._before(stage + 1, weights) - self._before(stage, weights)

    # ---- times

    def _times(self, layers: "list[dict[int, int]] | None") -> None:
        many = self._many
        case, costs, unit = many.case, many.case.costs, self._unit_us
        speeds = many.speeds
        overhead = case.cluster.overhead_us / unit
        forward_us = np.where(costs.has_backward, costs.forward_us, 0.0)

        def stages(layer_us: FloatArray, more: float) -> list[Linear]:
            return [self._defined(self._of_stage(s, layer_us / (speeds[s] * unit)) + more) for s in range(self._S)]

        forward = stages(costs.forward_us, overhead)
        alone = stages(costs.backward_us, overhead)
        again = [Linear()] * self._S
        if layers is not None:
            again = [
                self._defined(Linear({column: forward_us[n] / (speeds[s] * unit) for n, column in layers[s].items()}))
                for s in range(self._S)
            ]
        elif 0 not in many.allowed:
            again = stages(forward_us, 0.0)
        last_again = [Linear()] * self._S if 1 in many.allowed else again
        durations = {"F": forward, "B": _added(alone, again)}
        last = {"F": forward, "B": _added(alone, last_again)}
        if case.schedule.splits_backward:
            halves = stages(costs.halves.input_us, overhead), stages(costs.halves.weight_us, overhead)
            durations |= {"I": _added(halves[0], again), "W": halves[1]}
            last |= {"I": _added(halves[0], last_again), "W": halves[1]}
        sends = [self._send(s) for s in range(self._S)]
        times = Times(durations, last, sends, many.blocking.tolist())
        carried = clocks(many.actions, times, begin=Linear(), later=self._later)
        own = [
            sum((self._of_stage(s, costs.optimizer_us / (speeds[s] * unit)) for s in chunks), start=Linear())
            for chunks in many.chunks
        ]
        step = Linear({self._step: 1.0})
        if case.schedule.splits_backward:
            for begin, end, more in zip(carried.begins, carried.ends, own, strict=True):
                self._lines.add(step - (end + more - begin))
            return
        pipeline = Linear({self._column(): 1.0})
        for end in carried.ends:
            self._lines.add(pipeline - end)
        hidden = Linear()
        for device, more in enumerate(own):
            self._lines.add(step - (pipeline + more) + hidden)
            hidden = hidden + forward[device] + alone[device]
            hidden = hidden + sends[device] + sends[device]

    def _send(self, stage: int) -> Linear:
        """Crossing the boundary behind a stage."""
        if stage + 1 == self._S or not self._many.crossing_us[stage].any():
            return Linear()
        crossing = self._many.crossing_us[stage] / self._unit_us
        # What it grows by where the cut moves on by one layer.
        return self._defined(self._before(stage + 1, np.diff(crossing)) + float(crossing[0]))

    def _later(self, one: Linear, other: Linear) -> Linear:
        if not one or not other:
            return one or other
        column = self._column()
        for clock in (one, other):
            self._lines.add(Linear({column: 1.0}) - clock)
        return Linear({column: 1.0})

    # ---- memory

    def _layers_again(self, near: IntArray) -> "list[dict[int, int]] | None":
        """Per stage the columns r of its layers; None where memory counts for nothing."""
        many = self._many
        if many.case.costs.ties or self._L > _MOST_LAYERS:
            return None
        if (many.over_bytes(near[None], np.zeros((1, self._S), dtype=np.int64)) <= 0).all():
            return None
        layers: list[dict[int, int]] = []
        for s in range(self._S):
            layers.append({n: self._column(1.0) for n in range(s, s + self._W + 1)})
            for n, column in layers[s].items():
                only = np.zeros(self._L)
                only[n] = 1.0
                self._lines.add(self._of_stage(s, only) + Linear({column: -1.0}))
        whole = Many(many.case, many.num_devices, width=self._W + 1)
        for device, moments in enumerate(whole.moments):
            for moment in self._fullest(whole, device, near):
                room = Linear({}, many.case.caps_bytes[device])
                for chunk, s in enumerate(many.chunks[device]):
                    counts = moments[moment, chunk]
                    handed_over = most_handed_over_bytes(many.case.costs, counts) * (s - 1 in many.chunks[device])
                    room = room - self._held(whole, counts, layers[s], s) + handed_over
                self._lines.add(room.times(1 / many.case.caps_bytes[device]))
        return layers

    def _fullest(self, whole: Many, device: int, near: IntArray) -> IntArray:
        """The moments at which a device holds most without recomputation."""
        chunks = list(whole.chunks[device])
        alive = np.zeros(len(whole.moments[device]))
        for chunk, s in enumerate(chunks):
            place = 0, near[s + 1], max(0, near[s] - near[s + 1] + whole.width)
            alive += whole.moments[device][:, chunk] @ whole.parts[place][1:]
        return np.argsort(-alive, kind="stable")[:_MOMENTS]

    def _held(self, whole: Many, counts: FloatArray, layers: dict[int, int], stage: int) -> Linear:
        """What a stage holds at least with so many of each part."""
        allowed, tables = self._many.allowed, whole.held_bytes(counts)
        kept_table, saved = tables[0], np.full(self._L, -np.inf)
        if self._many.case.policy == "layers":
            least, saved = whole.least_by_layers(counts)
            kept_table = np.minimum(kept_table, least)
        kept, kept_least = _linear(kept_table)
        dropped, dropped_least = _linear(np.min(tables[allowed[1:]], axis=0))
        # With its stage or by itself, whichever takes off more.
        most_saved = np.maximum(kept - dropped, saved)
        changed = Linear({column: -float(most_saved[n]) for n, column in layers.items()})
        return self._of_stage(stage, kept) + changed + min(kept_least, dropped_least)


def _added(some: list[Linear], others: list[Linear]) -> list[Linear]:
    return [one + other for one, other in zip(some, others, strict=True)]


def _linear(table: FloatArray) -> tuple[FloatArray, float]:
    """Weights of layers, and a constant, whose sum is at most what the table says of any stage; shape (L+1, width)."""
    width = table.shape[1]
    num = len(table) - 1
    first = np.arange(num + 1)[:, None] - width + np.arange(width)[None]
    is_stage = (first >= 0) & np.isfinite(table)
    # What the first layer of a stage adds to it, on average over its ends.
    weights = np.zeros(num)
    for n in range(num):
        ends = np.arange(n + 2, min(n + width, num) + 1)
        columns = n - ends + width
        some = table[ends, columns] - table[ends, columns + 1]
        some = some[np.isfinite(some)]
        weights[n] = max(0.0, float(some.mean())) if len(some) else 0.0
    before = np.concatenate([[0.0], np.cumsum(weights)])
    least = table - (before[:, None] - before[np.maximum(first, 0)])
    return weights, float(least[is_stage].min())
