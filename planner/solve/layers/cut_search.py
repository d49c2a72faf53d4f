"""Local search over cuts, in which stages may recompute some of their layers.

The search starts from the best plan that recomputes whole stages. All moves of cuts are first simulated with the same
recomputed layers as before. For the fastest moves, `devices.py` then chooses the layers again.

Complexity: O(V K M) numpy operations for each batch of moves, with V chunks on each of K devices and M micro-batches,
and the choice of layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from planner.core.cost.arrays import BoolArray, FloatArray, IntArray
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.cost.stage_time import LAYERS
from planner.solve.answer import SAME
from planner.solve.chunks.descent import BATCH, Descent, PartitionCandidate
from planner.solve.layers.devices import Recomputation, RecomputeSearch
from planner.solve.search_state import SearchState
from planner.solve.space.case import Case, cuts_and_choices
from planner.solve.space.partitions import Evaluator

_MOST_PICKED = 4
"""Number of most promising moves of a batch whose recomputation is chosen again."""

_FRUITLESS = 8
"""Number of restarts in a row without a better plan, after which a search ends."""

_SOLVED = 600
"""Number of simulated actions that take as long as choosing the recomputed layers of one stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecomputeCandidate(PartitionCandidate):
    """Partition in a local search, in which stages may recompute some of their layers."""

    recomputed: tuple[tuple[int, ...], ...]
    """Indices of the layers that each stage recomputes; empty if its recompute choice is not `LAYERS`."""
    layers_us: FloatArray
    """Forward time of the layers in `recomputed` on the profiled device, in microseconds; shape (stages,)."""

    def partition(self, case: Case) -> Partition:
        """Return the candidate as a `Partition` of the cost model."""
        return case.partition(self.cuts, self.choices, recomputed=self.recomputed if any(self.recomputed) else ())


def simulate_candidates(
    state: SearchState, evaluator: Evaluator, candidates: Sequence[LayerRecomputeCandidate]
) -> list[LayerRecomputeCandidate]:
    """Simulate the candidates that fit into memory, and record the fastest one if it beats the best partition so far.

    Args:
        state: Best partition so far, and budget of the search.
        evaluator: Evaluator for the candidates' number of devices.
        candidates: Candidates to simulate.

    Returns:
        The candidates that fit, with their step times, then the candidates that do not fit.
    """
    fitting = [candidate for candidate in candidates if candidate.excess_bytes <= 0]
    if not fitting:
        return list(candidates)
    cuts, choices, layers_us = (
        np.stack([getattr(candidate, name) for candidate in fitting]) for name in ("cuts", "choices", "layers_us")
    )
    step_us = state.simulate(evaluator, cuts, choices, layers_us)
    timed = [replace(candidate, step_us=float(time)) for candidate, time in zip(fitting, step_us, strict=True)]
    best = min(timed, key=attrgetter("step_us"))
    # Rounding makes equal times differ slightly. Keep the first of equal partitions.
    if best.step_us < state.upper_us * (1 - SAME):
        partition = best.partition(evaluator.case)
        # The memory of a candidate is approximate, so check the exact memory.
        if _fits(evaluator, partition):
            state.upper_us, state.best = best.step_us, partition
    return timed + [candidate for candidate in candidates if candidate.excess_bytes > 0]


def _fits(evaluator: Evaluator, partition: Partition) -> bool:
    cluster = evaluator.case.cluster
    memory = Evaluation(evaluator.case.costs, partition, cluster).memory
    return all(
        sum(memory[s].total for s in chunks) <= cluster.memory_bytes[device]
        for device, chunks in enumerate(evaluator.stages_by_device)
    )


class CutAndLayerSearch(Descent[LayerRecomputeCandidate]):
    """Local search over cuts and recomputed layers for one number of devices."""

    def __init__(self, state: SearchState, evaluator: Evaluator, devices: RecomputeSearch) -> None:
        super().__init__(state, evaluator)
        self._devices = devices
        costs = evaluator.case.costs
        self._forward_us = np.where(costs.has_backward, costs.forward_us, 0.0)

    def search(self, starts: Sequence[IntArray], most_actions: int, initial: Partition | None = None) -> None:
        """Search from each start, then repeatedly from the best result.

        Args:
            starts: Cuts to start from, each of shape (stages + 1,).
            most_actions: Limit on simulated actions.
            initial: One more start, a partition that recomputes whole stages; or None.
        """
        self.descend(self._starts(starts, initial), most_actions, most_restarts=_FRUITLESS if len(self.moves) else 0)

    def evaluate(self, every_cuts: Sequence[IntArray]) -> list[LayerRecomputeCandidate]:
        """Simulate partitions with the given cuts and the fastest recomputation found for each device."""
        return self._simulate(
            [
                self._candidate_with(cuts, [recomputations[0] for recomputations in self._recomputations(cuts)])
                for cuts in every_cuts
            ]
        )

    def _starts(self, starts: Sequence[IntArray], initial: Partition | None) -> Iterator[LayerRecomputeCandidate]:
        if initial is not None:
            cuts, choices = cuts_and_choices(initial)
            devices = [
                self._devices.improve_from(device, cuts, [choices[s] for s in chunks])
                for device, chunks in enumerate(self.evaluator.stages_by_device)
            ]
            least = [recomputations[0] for recomputations in self._recomputations(cuts)]
            yield min(
                self._simulate([self._candidate_with(cuts, devices), self._candidate_with(cuts, least)]),
                key=attrgetter("sort_key"),
            )
        for cuts in starts:
            if self.evaluator.case.rules.allows(cuts[None])[0]:
                yield self.evaluate([cuts])[0]

    def pick_best(self, candidate: LayerRecomputeCandidate, moves: IntArray) -> LayerRecomputeCandidate:
        cuts = candidate.cuts + self.moves[moves]
        if candidate.excess_bytes > 0:
            self.state.budget.spent += self.evaluator.num_actions
            least = np.full((len(cuts), self.evaluator.num_stages), self.evaluator.allowed[-1])
            order = np.argsort(self.evaluator.excess_bytes(cuts, least).sum(axis=1), kind="stable")
        else:
            before = np.cumsum([0.0, *np.where(self._is_recomputed(candidate), self._forward_us, 0.0)])
            layers_us: FloatArray = before[cuts[:, 1:]] - before[cuts[:, :-1]]
            choices = np.full(layers_us.shape, LAYERS)
            order = np.argsort(self.state.simulate(self.evaluator, cuts, choices, layers_us), kind="stable")
        return min(self.evaluate(list(cuts[order[:_MOST_PICKED]])), key=attrgetter("sort_key"))

    def other_recomputations(self, candidate: LayerRecomputeCandidate) -> Iterator[LayerRecomputeCandidate]:
        changed = [
            self._with_recomputation(candidate, list(self.evaluator.stages_by_device[device]), recomputation)
            for device, recomputations in enumerate(list(self._recomputations(candidate.cuts)))
            for recomputation in recomputations
        ]
        others = [
            each
            for each in changed
            if each.recomputed != candidate.recomputed or (each.choices != candidate.choices).any()
        ]
        if others:
            yield min(self._simulate(others), key=attrgetter("sort_key"))

    def perturb(self, candidate: LayerRecomputeCandidate) -> LayerRecomputeCandidate:
        return self.evaluate([self.random_cuts(candidate.cuts)])[0]

    def _is_recomputed(self, candidate: LayerRecomputeCandidate) -> BoolArray:
        whole = (candidate.choices > 0) & (candidate.choices != LAYERS)
        is_recomputed = np.repeat(whole, np.diff(candidate.cuts))
        is_recomputed[[layer for layers in candidate.recomputed for layer in layers]] = True
        return is_recomputed

    def _with_recomputation(
        self, candidate: LayerRecomputeCandidate, chunks: list[int], recomputation: Recomputation
    ) -> LayerRecomputeCandidate:
        choices, layers_us = candidate.choices.copy(), candidate.layers_us.copy()
        recomputed = list(candidate.recomputed)
        choices[chunks], layers_us[chunks] = recomputation.choices, recomputation.layers_us
        for s, layers in zip(chunks, recomputation.recomputed, strict=True):
            recomputed[s] = layers
        return replace(candidate, choices=choices, layers_us=layers_us, recomputed=tuple(recomputed))

    def _candidate_with(self, cuts: IntArray, devices: Sequence[Recomputation]) -> LayerRecomputeCandidate:
        num = self.evaluator.num_stages
        candidate = LayerRecomputeCandidate(
            cuts=cuts,
            choices=np.zeros(num, dtype=np.int64),
            recomputed=((),) * num,
            layers_us=np.zeros(num),
            excess_bytes=sum(device.excess_bytes for device in devices),
        )
        for chunks, device in zip(self.evaluator.stages_by_device, devices, strict=True):
            candidate = self._with_recomputation(candidate, list(chunks), device)
        return candidate

    def _recomputations(self, cuts: IntArray) -> Iterator[tuple[Recomputation, ...]]:
        for device in range(self.evaluator.num_devices):
            # Choosing layers may take long.
            self.state.deadline.check()
            before = self._devices.num_solved
            yield self._devices.recomputations(device, cuts)
            self.state.budget.spent += _SOLVED * (self._devices.num_solved - before)

    def _simulate(self, candidates: Sequence[LayerRecomputeCandidate]) -> list[LayerRecomputeCandidate]:
        self.state.budget.spent += BATCH
        return simulate_candidates(self.state, self.evaluator, candidates)
