"""A descent over cuts where single layers may be recomputed, from the best plan that recomputes whole stages.

Moves are simulated as if every layer stayed what it is, recomputed or not, whichever stage it comes to lie in; of the
fastest, what to recompute is chosen anew on the devices that they change (`devices.py`). Where a
device has several ways to keep its cap, these are moves, too.

Complexity: O(V K M) for each batch of moves, and for each that is picked the layers of the devices that it changes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.cost.stage_time import LAYERS
from planner.solve.chunks.descent import BATCH, Descent, Place
from planner.solve.layers.devices import Devices, Recomputation
from planner.solve.progress import SAME, Progress
from planner.solve.space.arrays import BoolArray, FloatArray, IntArray
from planner.solve.space.case import Case, cuts_and_choices
from planner.solve.space.partitions import Evaluator

_PICKED = 4
"""How many moves of a batch, the fastest, have their recomputation chosen."""

_FRUITLESS = 8
"""Restarts in a row without a better plan, after which there are no more."""

_SOLVED = 600
"""Actions that take as long as a walk through the layers of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlace(Place):
    """A partition with single layers recomputed."""

    recomputed: tuple[tuple[int, ...], ...]
    """Per stage its single layers that are recomputed."""
    layers_us: FloatArray
    """Their forward on the profiled device, shape (S,)."""

    def partition(self, case: Case) -> Partition:
        """Return the partition as the cost model takes it."""
        return case.partition(self.cuts, self.choices, recomputed=self.recomputed if any(self.recomputed) else ())


def simulate_candidates(progress: Progress, evaluator: Evaluator, places: Sequence[LayerPlace]) -> list[LayerPlace]:
    """The places with their step times, as far as they fit; the fastest becomes the best if it beats that."""
    fitting = [place for place in places if place.over_bytes <= 0]
    if not fitting:
        return list(places)
    cuts, choices, layers_us = (
        np.stack([getattr(place, name) for place in fitting]) for name in ("cuts", "choices", "layers_us")
    )
    step_us = progress.simulate(evaluator, cuts, choices, layers_us)
    timed = [replace(place, step_us=float(time)) for place, time in zip(fitting, step_us, strict=True)]
    best = min(timed, key=attrgetter("step_us"))
    # Equal times differ by rounding: the first of equal partitions stays.
    if best.step_us < progress.upper_us * (1 - SAME):
        partition = best.partition(evaluator.case)
        # Memory was counted as far as it depends on layers: the law itself decides.
        if _fits(evaluator, partition):
            progress.upper_us, progress.best = best.step_us, partition
    return timed + [place for place in places if place.over_bytes > 0]


def _fits(evaluator: Evaluator, partition: Partition) -> bool:
    cluster = evaluator.case.cluster
    memory = Evaluation(evaluator.case.costs, partition, cluster).memory
    return all(
        sum(memory[s].total for s in chunks) <= cluster.memory_bytes[device]
        for device, chunks in enumerate(evaluator.chunks)
    )


class LayerSearch(Descent[LayerPlace]):
    """A search over cuts, and what to recompute in them, for one number of devices.

    Args:
        progress: Of the case.
        evaluator: Its partitions on so many devices.
        devices: What they may recompute.
    """

    def __init__(self, progress: Progress, evaluator: Evaluator, devices: Devices) -> None:
        super().__init__(progress, evaluator)
        self._devices = devices
        costs = evaluator.case.costs
        self._forward_us = np.where(costs.has_backward, costs.forward_us, 0.0)

    def search(self, starts: Sequence[IntArray], most_actions: int, near: Partition | None = None) -> None:
        """Searches from each of some cuts, of shape (S+1,), and then from the best of them anew.

        Args:
            starts: The cuts.
            most_actions: How many actions it may simulate.
            near: A partition that recomputes whole stages: the search begins with its cuts, and what it recomputes.
        """
        self.descend(self._begun(starts, near), most_actions, fruitless=_FRUITLESS if len(self.moves) else 0)

    def placed(self, every_cuts: Sequence[IntArray]) -> list[LayerPlace]:
        """Partitions with what takes their devices the least time to compute again; shape (S+1,) each."""
        return self._raced([self._place(cuts, [ways[0] for ways in self._ways(cuts)]) for cuts in every_cuts])

    def _begun(self, starts: Sequence[IntArray], near: Partition | None) -> Iterator[LayerPlace]:
        if near is not None:
            cuts, choices = cuts_and_choices(near)
            devices = [
                self._devices.near(device, cuts, [choices[s] for s in chunks])
                for device, chunks in enumerate(self.evaluator.chunks)
            ]
            least = [ways[0] for ways in self._ways(cuts)]
            yield min(self._raced([self._place(cuts, devices), self._place(cuts, least)]), key=attrgetter("rank"))
        for cuts in starts:
            if self.evaluator.case.rules.allows(cuts[None])[0]:
                yield self.placed([cuts])[0]

    def best_of(self, place: LayerPlace, cuts: IntArray) -> LayerPlace:
        """The best of those that are the fastest, or hold least, if every layer stays what it is."""
        if place.over_bytes > 0:
            self.progress.effort.spent += self.evaluator.num_actions
            least = np.full((len(cuts), self.evaluator.num_stages), self.evaluator.allowed[-1])
            order = np.argsort(self.evaluator.over_bytes(cuts, least).sum(axis=1), kind="stable")
        else:
            before = np.cumsum([0.0, *np.where(self._is_recomputed(place), self._forward_us, 0.0)])
            layers_us: FloatArray = before[cuts[:, 1:]] - before[cuts[:, :-1]]
            choices = np.full(layers_us.shape, LAYERS)
            order = np.argsort(self.progress.simulate(self.evaluator, cuts, choices, layers_us), kind="stable")
        return min(self.placed(list(cuts[order[:_PICKED]])), key=attrgetter("rank"))

    def others(self, place: LayerPlace) -> Iterator[LayerPlace]:
        """The best of the other ways to keep the cap on one device."""
        other_ways = self._other_ways(place)
        if other_ways:
            yield min(self._raced(other_ways), key=attrgetter("rank"))

    def shaken(self, place: LayerPlace) -> LayerPlace:
        """The partition after a few moves at random."""
        return self.placed([self.drawn(place.cuts)])[0]

    def _is_recomputed(self, place: LayerPlace) -> BoolArray:
        """Whether each layer is, shape (L,)."""
        whole = (place.choices > 0) & (place.choices != LAYERS)
        is_recomputed = np.repeat(whole, np.diff(place.cuts))
        is_recomputed[[layer for layers in place.recomputed for layer in layers]] = True
        return is_recomputed

    def _other_ways(self, place: LayerPlace) -> list[LayerPlace]:
        """The same cuts with another way to keep the cap on one device."""
        every = list(self._ways(place.cuts))
        places = []
        for device, ways in enumerate(every):
            chunks = list(self.evaluator.chunks[device])
            for way in ways:
                changed = self._changed(place, chunks, way)
                if changed.recomputed != place.recomputed or (changed.choices != place.choices).any():
                    places.append(changed)
        return places

    def _changed(self, place: LayerPlace, chunks: list[int], way: Recomputation) -> LayerPlace:
        choices, layers_us, recomputed = place.choices.copy(), place.layers_us.copy(), list(place.recomputed)
        choices[chunks], layers_us[chunks] = way.choices, way.layers_us
        for s, layers in zip(chunks, way.recomputed, strict=True):
            recomputed[s] = layers
        return replace(place, choices=choices, layers_us=layers_us, recomputed=tuple(recomputed))

    def _place(self, cuts: IntArray, devices: Sequence[Recomputation]) -> LayerPlace:
        num = self.evaluator.num_stages
        place = LayerPlace(
            cuts=cuts,
            choices=np.zeros(num, dtype=np.int64),
            recomputed=((),) * num,
            layers_us=np.zeros(num),
            over_bytes=sum(device.over_bytes for device in devices),
        )
        for chunks, device in zip(self.evaluator.chunks, devices, strict=True):
            place = self._changed(place, list(chunks), device)
        return place

    def _ways(self, cuts: IntArray) -> Iterator[tuple[Recomputation, ...]]:
        """What each device may recompute."""
        for device in range(self.evaluator.num_devices):
            # To choose layers may take long.
            self.progress.deadline.check()
            before = self._devices.num_solved
            yield self._devices.ways(device, cuts)
            self.progress.effort.spent += _SOLVED * (self._devices.num_solved - before)

    def _raced(self, places: Sequence[LayerPlace]) -> list[LayerPlace]:
        self.progress.effort.spent += BATCH
        return simulate_candidates(self.progress, self.evaluator, places)
