"""Dynamic program for the best cuts of a chain of layers, for a given number of micro-batches.

The search adds stages from the last to the first. A partial plan has stages for the layers i..L-1. The dynamic program
has a state for each partial plan: a few values such as its longest backward time (`recurrences.py`). Under 1F1B, the
search minimizes a lower bound of the step time. It drops dominated plans among partial plans with the same first layer
and number of stages. Three rules keep the number of partial plans small, and never drop the best plan:

- A partial plan is dropped if its lower bound does not beat the best complete plan. The bound consists of the times of
  its stages, the work of the earlier layers, and the smallest possible bottlenecks of the earlier layers.
- A bottleneck is the largest forward or backward time of any stage or link. If the bottleneck of a partial plan is
  below the lower bound for all complete plans, the search replaces it by this bound. More partial plans are then equal.
- The tables leave out stages that are too long for a plan that beats the best complete plan (`max_stage_layers`).


    later stages    partial plans, drawn as their stages                 K = 3, L = 8
      0                            [ 7 ]    [ 6 7 ]    [ 5 6 7 ]        one stage
      1               [ 4 5 6 ][ 7 ]    [ 5 ][ 6 7 ]   …                two stages
      2     [ 0 1 2 3 ][ 4 5 6 ][ 7 ]   …                               plans that begin at layer 0 are complete

Complexity: O(K L W) time for the bounds and O(K L W · P) for the search, with K stages, L layers, W layers in the
longest stage, and P partial plans that begin at the same layer; memory is O(K L + L W). W is about L/K on long chains.
P is small on real chains.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from planner.core.cost.arrays import BoolArray, ChoiceArray, FloatArray, IndexArray, IntArray
from planner.solve.chain.recurrences import EarlierLayerBounds, Recurrence
from planner.solve.deadline import NEVER, Deadline
from planner.solve.space.prefixes import MOST_CANDIDATES, PrefixBounds
from planner.solve.space.problem import ChainProblem, StageTimeArrays

RELATIVE = 1e-12
"""Relative difference above which a number counts as better. Rounding errors are smaller."""

LIMIT_FACTORS = (1.01, 1.05, 1.1, 1.25)
"""Limits on the step time of a first plan, as multiples of its lower bound."""

_MORE_LABELS = 8
"""Number of partial plans per first layer that `find_best` keeps in its quick run, before the exact run."""


class ChainCuts(NamedTuple):
    """Cuts and recomputation of a partition: stage k runs the layers cuts[k] to cuts[k+1] - 1."""

    step_us: float
    cuts: tuple[int, ...]
    choices: tuple[int, ...]
    sort_key: tuple[float, ...]
    """Values by which partitions are sorted, such as the step time, the most important first; smaller is better."""


class _PartialPlans(NamedTuple):
    """Partial plans with the same number of stages. The last axis of each array has one entry per partial plan."""

    first: IntArray
    parent: IntArray
    """Index of the partial plan without its first stage, among the partial plans with one stage less."""
    choice: ChoiceArray
    states: FloatArray
    """States of the dynamic program, one column per partial plan."""
    bound: FloatArray
    """Lower bound of the step time of every complete plan that contains the partial plan."""
    sort_key: FloatArray
    """Lower bounds of `ChainCuts.sort_key` of all complete plans with the partial plan, shape (values, plans)."""

    def take(self, index: IndexArray) -> "_PartialPlans":
        fields: list[Any] = [field.take(index, axis=-1) for field in self]
        return _PartialPlans(*fields)


class _StepToBeat(NamedTuple):
    upper_us: float
    best_key: tuple[float, ...] | None = None


class CutDynamicProgram:
    """Dynamic program that finds the best cuts of a chain for one schedule."""

    def __init__(self, problem: ChainProblem, recurrence: Recurrence, *, deadline: Deadline = NEVER) -> None:
        self.problem = problem
        self.recurrence = recurrence
        self.is_exhaustive = True
        """False if the last search dropped partial plans that may lead to the best partition."""
        self._deadline = deadline
        self._work = (problem.sums.forward_us + problem.sums.backward_us) / problem.highest_speed
        self._between_steps_us = float(
            problem.sums.between_steps_us(np.array([0]), np.array([1]), problem.highest_speed)[0]
        )
        self.prefixes = PrefixBounds(problem, recurrence.needs, deadline=deadline)
        self._least = self.prefixes.least

    def lower_bound_us(self) -> float:
        """Return a lower bound of the step time of all partitions, in microseconds; infinite if none fits."""
        empty = self._root()
        earlier = self._earlier_layers(empty.first, self.problem.num_stages)
        return float(self.recurrence.bound_us(tuple(empty.states), earlier)[0])

    def lower_bounds(self) -> dict[str, float]:
        """Return lower bounds that hold for all partitions, for example of the longest forward time (key `forward`)."""
        return {name: float(tables[-1][self.problem.num_layers]) for name, tables in self._least.items()}

    def find_best(self, *, upper_us: float = np.inf) -> ChainCuts | None:
        """Return the partition with the smallest step time; None if none is faster than `upper_us`."""
        root_us = self.lower_bound_us()
        if not root_us < just_below(upper_us):
            return None
        best = self.find_first(root_us, upper_us, LIMIT_FACTORS)
        if best is None:
            return self.run(upper_us=upper_us)
        # A run with few partial plans first lowers the step time that the exact run must beat.
        best = self.run(upper_us=best.step_us, most_plans=_MORE_LABELS) or best
        return self.run(upper_us=best.step_us) or best

    def find_first(self, bound_us: float, upper_us: float, limit_factors: Sequence[float]) -> ChainCuts | None:
        """Return a partition faster than `upper_us` from a short search; None if it finds none.

        Args:
            bound_us: Lower bound of the step time, in microseconds.
            upper_us: Step time to beat, in microseconds.
            limit_factors: Limits on the step time, as multiples of `bound_us`. They are tried in turn.
        """
        for factor in limit_factors:
            allowed_us = min(upper_us, bound_us * factor)
            first = self.run(upper_us=allowed_us, most_plans=1) if bound_us < just_below(allowed_us) else None
            if first is not None or allowed_us == upper_us:
                return first
        return None

    def run(
        self,
        *,
        upper_us: float,
        most_plans: int | None = None,
        best_key: tuple[float, ...] | None = None,
        limit_per_stage_count: float = np.inf,
        limit_in_total: float = 0,
    ) -> ChainCuts | None:
        """Return the partition of smallest `ChainCuts.sort_key` that is faster than `upper_us`; None if there is none.

        The search stops early if the number of partial plans exceeds both `limit_per_stage_count` and `limit_in_total`.
        It then returns the best partition found so far, and `is_exhaustive` is False.

        Args:
            upper_us: Step time to beat, in microseconds.
            most_plans: Largest number of partial plans to keep that begin at the same layer; None to keep all. With a
                number, the search may miss the best partition.
            best_key: Value of `ChainCuts.sort_key` to beat, or None.
            limit_per_stage_count: Limit on the partial plans with the same number of stages.
            limit_in_total: Limit on all partial plans together.
        """
        levels = [self._root()]
        best: ChainCuts | None = None
        self.is_exhaustive = most_plans is None
        in_all = 0
        for num_later in range(self.problem.num_stages):
            plans = self._next_level(levels[-1], num_later, _StepToBeat(upper_us, best_key))
            # Finding the undominated partial plans takes longest, so it is skipped if there are far too many.
            is_hopeless = len(plans.first) > max(20 * limit_per_stage_count, limit_in_total)
            if not is_hopeless:
                levels.append(self._reduced(plans, most_plans))
                in_all += len(levels[-1].first)
            if is_hopeless or (len(levels[-1].first) > limit_per_stage_count and in_all > limit_in_total):
                self.is_exhaustive = False
                break
            sort_key, index = self._first_of_complete(levels[-1])
            if sort_key is not None and (best_key is None or sort_key < best_key):
                best_key = sort_key
                best = ChainCuts(float(levels[-1].bound[index]), *self._trace(levels, num_later + 1, index), sort_key)
                # If ranks break ties between equal times, the time to beat does not change.
                if self.recurrence.rank_is_time:
                    upper_us = best.step_us
        return best

    def partition_of_bound(self, name: str) -> ChainCuts | None:
        """Return a partition that attains the lower bound with the key `name`; None if no partition fits.

        If devices differ and the number of stages is not fixed, the partition may not attain the bound, or the result
        may be None.
        """
        states, firsts, choices = tuple(self._root().states), [], []
        for num_later, stage in enumerate(self.prefixes.stages_of_bound(name)):
            states = self.recurrence.extend(states, stage, num_later)
            firsts.append(int(stage.first[0]))
            choices.append(int(stage.choice[0]))
        if not firsts or firsts[-1]:
            return None
        step_us = float(self.recurrence.bound_us(states, self._earlier_layers(np.array([0]), 0))[0])
        return ChainCuts(step_us, (*firsts[::-1], self.problem.num_layers), tuple(choices[::-1]), (step_us,))

    def partitions_below(self, upper_us: float, most: int) -> tuple[list[ChainCuts], bool]:
        """Return partitions whose lower bound is below `upper_us`, and True if the list is complete.

        The search keeps at most `most` partial plans for each number of stages.
        """
        levels = [self._root()]
        partitions: list[ChainCuts] = []
        are_all = True
        for num_later in range(self.problem.num_stages):
            plans = self._next_level(levels[-1], num_later, _StepToBeat(upper_us))
            # Dominated partial plans are kept: a worse bound does not imply a worse simulated time.
            if len(plans.first) > most:
                plans, are_all = plans.take(np.argsort(plans.bound, kind="stable")[:most]), False
            levels.append(plans)
            partitions += [
                ChainCuts(float(plans.bound[n]), *self._trace(levels, num_later + 1, int(n)), ())
                for n in np.flatnonzero(plans.first == 0)
            ]
        return partitions, are_all

    def _first_of_complete(self, plans: "_PartialPlans") -> tuple[tuple[float, ...] | None, int]:
        # Partial plans are sorted by first layer, so complete partial plans (first layer 0) come first.
        if not len(plans.first) or plans.first[0] > 0:
            return None, -1
        complete = int(np.searchsorted(plans.first, 1))
        index = int(np.lexsort(tuple(plans.sort_key[::-1, :complete]))[0])
        return tuple(plans.sort_key[:, index].tolist()), index

    # ---- bounds

    def _earlier_layers(self, first: IntArray, stages_left: int) -> EarlierLayerBounds:
        return EarlierLayerBounds(
            work_us=self._work[first],
            between_steps_us=self._between_steps_us,
            exist=first > 0,
            least={name: tables[stages_left][first] for name, tables in self._least.items()},
        )

    def _raise_to_chain_bounds(self, earlier: EarlierLayerBounds) -> EarlierLayerBounds:
        end = self.problem.num_layers
        largest = {
            name: np.maximum(least, self._least[name][-1][end])
            for name, least in earlier.least.items()
            if self.recurrence.needs[name].combine is np.maximum
        }
        return replace(earlier, least={**earlier.least, **largest})

    # ---- partial plans

    def _root(self) -> _PartialPlans:
        # One empty partial plan, which has no stage.
        nowhere, zero = np.array([-1]), np.zeros((1, 1))
        end = np.array([self.problem.num_layers])
        return _PartialPlans(end, nowhere, nowhere.astype(np.int8), np.zeros((self.recurrence.size, 1)), zero[0], zero)

    def _next_level(self, plans: _PartialPlans, num_later: int, target: _StepToBeat) -> _PartialPlans:
        parts = [self._extended(plans, block, num_later, target) for block in self._blocks(plans)]
        # All partial plans are complete.
        if not parts:
            return plans.take(np.empty(0, dtype=np.intp))
        if len(parts) == 1:
            return parts[0]
        return _PartialPlans(*(np.concatenate(fields, axis=-1) for fields in zip(*parts, strict=True)))

    def _blocks(self, plans: _PartialPlans) -> Iterator[IndexArray]:
        # A partial plan that begins at layer 0 is complete.
        open_ = np.flatnonzero(plans.first > 0)
        size = max(1, MOST_CANDIDATES // self.problem.most_layers)
        for start in range(0, len(open_), size):
            self._deadline.check()
            yield open_[start : start + size]

    def _extended(self, plans: _PartialPlans, block: IndexArray, num_later: int, target: _StepToBeat) -> _PartialPlans:
        stages_left = self.problem.num_stages - num_later - 1
        stages, row = self._previous_stages(num_later, plans.first[block])
        # Skip first layers that the remaining stages cannot reach.
        some = np.isfinite(next(iter(self._least.values()))[stages_left])
        variant, label, column = np.nonzero(np.isfinite(stages.forward[:, row]) & some[stages.first[:, row]])
        at, parent = stages.select(variant, row[label], column), block[label]
        states = self.recurrence.extend(tuple(plans.states.take(parent, axis=1)), at, num_later)
        earlier = self._earlier_layers(at.first, stages_left)
        bound = self.recurrence.bound_us(states, earlier)
        sort_key = np.stack(self.recurrence.ranking_bounds(states, earlier, bound))
        is_kept = bound < just_below(target.upper_us)
        if target.best_key is not None:
            is_kept &= _before(sort_key, target.best_key)
        kept = np.flatnonzero(is_kept)
        first = at.first.take(kept)
        # Bounds use the states as they are. In kept plans the states are raised, so that more plans are dominated.
        whole = self._raise_to_chain_bounds(self._earlier_layers(first, stages_left))
        raised = np.stack(self.recurrence.raise_to_lower_bounds(tuple(number.take(kept) for number in states), whole))
        return _PartialPlans(
            first, parent.take(kept), at.choice.take(kept), raised, bound.take(kept), sort_key.take(kept, axis=1)
        )

    def _previous_stages(self, num_later: int, first: IntArray) -> tuple[StageTimeArrays, IntArray]:
        if self.prefixes.shared_stages is not None:
            return self.prefixes.shared_stages, first
        # Partial plans with the same first layer have the same previous stages, which are computed once.
        is_end = np.zeros(self.problem.num_layers + 1, dtype=bool)
        is_end[first] = True
        return self.prefixes.stages(num_later, np.flatnonzero(is_end)), (np.cumsum(is_end) - 1)[first]

    def _reduced(self, plans: _PartialPlans, most_plans: int | None) -> _PartialPlans:
        if len(plans.first) == 1:
            return plans
        # If only a few partial plans are kept, keep those with the smallest bounds.
        keys = (*plans.sort_key, *plans.states) if most_plans is None else (plans.bound, *plans.sort_key)
        # In this order, no partial plan is dominated by a later partial plan, as `_undominated_partial_plans` requires.
        plans = plans.take(np.lexsort((*keys[::-1], plans.first)))
        return plans.take(_undominated_partial_plans(plans.first, plans.states, most_plans))

    def _trace(
        self, levels: list[_PartialPlans], num_later: int, index: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        # Go from the first stage back to the empty partial plan, whose first layer is L.
        cuts, choices = [], []
        while num_later >= 0:
            cuts.append(int(levels[num_later].first[index]))
            if num_later:
                choices.append(int(levels[num_later].choice[index]))
            index = int(levels[num_later].parent[index])
            num_later -= 1
        return tuple(cuts), tuple(choices)


def just_below(upper_us: float) -> float:
    """Return `upper_us` minus a tolerance for rounding errors."""
    return upper_us * (1 - RELATIVE) if np.isfinite(upper_us) else upper_us


def _before(sort_key: FloatArray, best: tuple[float, ...]) -> BoolArray:
    # Compare lexicographically, from the last number to the first.
    before = np.zeros(sort_key[0].shape, dtype=bool)
    for number, of_best in zip(sort_key[::-1], best[::-1], strict=True):
        before = (number < of_best * (1 - RELATIVE)) | ((number <= of_best * (1 + RELATIVE)) & before)
    return before


def _undominated_partial_plans(group: IntArray, states: FloatArray, most: int | None = None) -> IndexArray:
    # Partial plans are sorted by group, so that a plan is dominated only by an earlier or an equal plan. Complexity:
    # O(n) per round, and as many rounds as the largest group has undominated plans, but at most `most` rounds.
    left = np.arange(len(group))
    kept: list[IndexArray] = []
    while len(left) and (most is None or len(kept) < most):
        # The first remaining partial plan of each group is undominated; remove the partial plans that it dominates.
        is_head = np.ones(len(left), dtype=bool)
        np.not_equal(group[1:], group[:-1], out=is_head[1:])
        kept.append(left[is_head])
        heads = states.take(np.flatnonzero(is_head), axis=1).take(np.cumsum(is_head) - 1, axis=1)
        stays = np.flatnonzero((heads > states * (1 + RELATIVE)).any(axis=0))
        # Copy the remaining partial plans: indexing into the full arrays in every round would be slower.
        left, group, states = left[stays], group[stays], states.take(stays, axis=1)
    return np.sort(np.concatenate(kept)) if kept else left
