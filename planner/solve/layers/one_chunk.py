"""1F1B with one stage on each device where single layers may be recomputed, jointly with the cuts.

As `planner.solve.chain.one_forward_one_backward`, with the bounds of `gpipe.py`: the label programme runs with
lower bounds of what single layers take, and again with the exact values of the stages that it chose, until it chooses
none but such. Its optimum is a bound for all partitions. What lies below the best partition that is known is simulated,
each with the exact layers of its stages, where these are few enough to be solved.

Complexity: as `planner.solve.chain.one_forward_one_backward`; and a walk through the layers of each stage that is
solved exactly.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.core.cost.partition import Partition
from planner.core.cost.stage_time import LAYERS
from planner.solve.chain.chain_dp import ChainCuts, LabelSearch
from planner.solve.chain.gpipe import Windows
from planner.solve.chain.laws import OneForwardOneBackwardLaw
from planner.solve.chunks.search import most_of_one
from planner.solve.layers.exact_stages import LayerTimes
from planner.solve.layers.layer_search import LayerPlace, LayerSearch, raced
from planner.solve.layers.one_stage import DevicesOfOneStage
from planner.solve.progress import BLOCK, Progress
from planner.solve.space.partitions import Many

_ROUNDS, _FEW_ROUNDS = 40, 4
"""Times that the programme runs for one bound: as long as it takes, or where effort is bounded."""

_ORDER, _CELLS = 3, 5
"""What it costs to find the order of a schedule's actions, and stages in tables that take as long as one action."""

_MOST_SOLVED, _FEW_SOLVED = 400, 40
"""Stages that are solved exactly to simulate what lies below the best: as long as it takes, or bounded."""


def search_one_chunk_by_layers(progress: Progress, near: Partition | None) -> None:
    """Searches all stage counts, until the deadline (`OutOfTimeError`) or for as long as the effort lasts.

    Args:
        progress: Of the case.
        near: Its best partition that recomputes whole stages, if one is known.
    """
    layers = LayerTimes(progress.case.costs)
    case = replace(progress.case, least_again_us=layers.table)
    for num_stages in range(case.num_devices, 0, -1):
        # Fewer stages take longer still.
        if progress.case.least_us(num_stages) >= progress.upper_us:
            return
        near_here = near if near is not None and len(near.balance) == num_stages else None
        if not _Search(progress, Many(case, num_stages), layers).run(near_here):
            return


class _Search:
    """The search for one stage count."""

    def __init__(self, progress: Progress, many: Many, layers: LayerTimes) -> None:
        self._progress, self._many, self._layers = progress, many, layers
        self._case = many.case
        self._law = OneForwardOneBackwardLaw(self._case.micro_batches)
        self._cuts = LayerSearch(progress, many, DevicesOfOneStage(many, layers))

    def run(self, near: Partition | None) -> bool:
        """Searches; whether there was effort enough."""
        progress, effort, case = self._progress, self._progress.effort, self._case
        if near is not None:
            self._cuts.search([], most_of_one(progress, self._many), near)
        windows = Windows(case)
        # The bound is that of stages within the window, which has to be as wide as the best so far allows.
        while windows.widen(progress.upper_us):
            cells = self._many.num_stages * (case.costs.num_layers + 1) * windows.width
            if not effort.pays((_ORDER + 1) * self._many.num_actions, cells // _CELLS):
                progress.leave_out(max(progress.case.least_us(self._many.num_stages), case.bound_us))
                return False
            least, search = self._least(windows.width)
            if least is None:
                continue
            starts = {least.cuts, search.prefixes.min_max("work"), search.prefixes.min_max("backward")}
            some = [np.array(start) for start in sorted(filter(None, starts)) if min(np.diff(start)) > 0]
            self._cuts.search(some, most_of_one(progress, self._many))
            is_open = least.step_us < progress.upper_us * (1 - 1e-9)
            if is_open and not self._simulate_below(search):
                progress.leave_out(least.step_us)
        return True

    def _least(self, width: int) -> tuple[ChainCuts | None, LabelSearch]:
        """The programme's optimum, its own stages solved exactly; and the search that knows as much of all stages."""
        least: ChainCuts | None = None
        for _ in range(_FEW_ROUNDS if self._progress.effort.is_bounded else _ROUNDS):
            problem = self._case.problem(self._many.num_stages, width=width, exact=True)
            search = LabelSearch(problem, self._law, deadline=self._progress.deadline)
            least = search.best(upper_us=self._progress.upper_us)
            solved = self._layers.num_exact
            if least is None:
                break
            place = self._place(least)
            if place is not None:
                raced(self._progress, self._many, [place])
            if self._layers.num_exact == solved:
                break
        return least, search

    def _place(self, cuts: ChainCuts) -> LayerPlace | None:
        """The partition with the cheapest layers of its stages; None if one does not fit after all."""
        choices = list(cuts.choices)
        recomputed: list[tuple[int, ...]] = [()] * len(choices)
        layers_us = np.zeros(len(choices))
        for k, choice in enumerate(cuts.choices):
            if choice != LAYERS:
                continue
            self._progress.deadline.check()
            moments = self._case.moments(len(choices) - 1 - k)
            exact = self._layers.exact(cuts.cuts[k], cuts.cuts[k + 1], self._case.caps_bytes[k], moments)
            if exact is None:
                return None
            recomputed[k], layers_us[k] = exact.recomputed, exact.again_us
            choices[k] = LAYERS if exact.recomputed else 0
        return LayerPlace(
            cuts=np.array(cuts.cuts), choices=np.array(choices), recomputed=tuple(recomputed), layers_us=layers_us
        )

    def _simulate_below(self, search: LabelSearch) -> bool:
        """Simulates every partition whose bound is below the best; False if they are too many."""
        progress = self._progress
        most = progress.effort.affordable(self._many)
        if not most:
            return False
        partitions, are_all = search.all_below(progress.upper_us, most)
        if self._num_unsolved(partitions) > (_FEW_SOLVED if progress.effort.is_bounded else _MOST_SOLVED):
            return False
        for start in range(0, len(partitions), BLOCK):
            places = [self._place(cuts) for cuts in partitions[start : start + BLOCK]]
            raced(progress, self._many, [place for place in places if place is not None])
        return are_all

    def _num_unsolved(self, partitions: Sequence[ChainCuts]) -> int:
        """How many different stages of theirs recompute single layers."""
        return len(
            {
                (k, *each.cuts[k : k + 2])
                for each in partitions
                for k, choice in enumerate(each.choices)
                if choice == LAYERS
            }
        )
