"""Cuts improved step by step where single layers may be recomputed, from the best plan that recomputes whole stages.

Moves are those of `planner.solve.cut_search`. They are simulated some at a time as if every layer stayed what it is,
recomputed or not, whichever stage it comes to lie in; of the fastest, what to recompute is chosen anew on the devices
that they change (`planner.solve.device_layers`). Where a device has several ways to keep its cap, these are moves, too.

As long as nothing fits, better means fewer bytes over the caps, from then on faster.

Complexity: O(V K M) for each batch of moves, and for each that is picked the layers of the devices that it changes.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from planner.core.cost.evaluate import Partition, stages_of
from planner.core.cost.stage_time import CHOICES, LAYERS
from planner.solve.arrays import BoolArray, FloatArray, IntArray
from planner.solve.cut_search import moves
from planner.solve.device_layers import Devices, Recomputation
from planner.solve.many import Many
from planner.solve.progress import Progress

_ROWS = 128
"""Moves that are simulated at once."""

_PICKED = 4
"""So many of these, the fastest, have their recomputation chosen."""

_SAME = 1e-12
"""Times closer than this are equal."""

_FRUITLESS = 8
"""Restarts in a row without a better plan, after which there are no more."""

_BATCH, _SOLVED = 400, 600
"""Actions that take as long as choosing a batch, and as a walk through the layers of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A partition: where a search stands."""

    cuts: IntArray
    """Shape (S+1,)."""
    choices: IntArray
    """Indices into `CHOICES`, or `LAYERS`; shape (S,)."""
    recomputed: tuple[tuple[int, ...], ...]
    """Per stage its single layers that are recomputed."""
    layers_us: FloatArray
    """Their forward on the profiled device, shape (S,)."""
    over_bytes: float = 0.0
    step_us: float = inf

    def beats(self, other: "Place") -> bool:
        """Whether it is over by fewer bytes, or else faster."""
        return (self.over_bytes, self.step_us) < (other.over_bytes, other.step_us * (1 - _SAME))


def raced(progress: Progress, many: Many, places: Sequence[Place]) -> list[Place]:
    """The places with their step times, as far as they fit; the fastest becomes the best if it beats that."""
    fitting = [place for place in places if place.over_bytes <= 0]
    if not fitting:
        return list(places)
    cuts, choices, layers_us = (
        np.stack([getattr(place, name) for place in fitting]) for name in ("cuts", "choices", "layers_us")
    )
    step_us = progress.simulated(many, cuts, choices, layers_us)
    timed = [replace(place, step_us=float(time)) for place, time in zip(fitting, step_us, strict=True)]
    best = min(timed, key=lambda place: place.step_us)
    # Equal times differ by rounding: the first of equal partitions stays.
    if best.step_us < progress.upper_us * (1 - _SAME):
        partition = _partition(many, best)
        # Memory was counted as far as it depends on layers: the law itself decides.
        if _fits(many, partition):
            progress.upper_us, progress.best = best.step_us, partition
    return timed + [place for place in places if place.over_bytes > 0]


def _partition(many: Many, place: Place) -> Partition:
    case = many.case
    recomputed = tuple(place.recomputed) if any(place.recomputed) else ()
    return Partition(
        schedule=case.schedule.name,
        micro_batches=case.micro_batches,
        balance=tuple(int(n) for n in np.diff(place.cuts)),
        recompute=tuple((*CHOICES, "layers")[choice] for choice in place.choices),
        recomputed=recomputed,
        chunks=case.chunks,
        order=case.schedule.texts,
        replicas=case.replicas,
    )


def _fits(many: Many, partition: Partition) -> bool:
    cluster = many.case.cluster
    stages = stages_of(many.case.costs, partition, cluster)
    return all(
        sum(stages[s].memory.total for s in chunks) <= cluster.memory_bytes[device]
        for device, chunks in enumerate(many.chunks)
    )


class LayerSearch:
    """A search over cuts, and what to recompute in them, for one number of devices.

    Args:
        progress: Of the case.
        many: Its partitions on so many devices.
        devices: What they may recompute.
    """

    def __init__(self, progress: Progress, many: Many, devices: Devices) -> None:
        self._progress, self._many, self._devices = progress, many, devices
        self._ends = 0
        # Nothing but the question decides what is drawn.
        self._random = random.Random(0)  # noqa: S311
        self._moves = moves(many.num_stages)[: None if many.case.rules.balance is None else 0]
        costs = many.case.costs
        self._forward_us = np.where(costs.has_backward, costs.forward_us, 0.0)

    def search(self, starts: Sequence[IntArray], most_actions: int, near: Partition | None = None) -> None:
        """Searches from each of some cuts, of shape (S+1,), and then from the best of them anew.

        Args:
            starts: The cuts.
            most_actions: How many actions it may simulate.
            near: A partition that recomputes whole stages: the search begins with its cuts, and what it recomputes.
        """
        self._ends = self._progress.effort.spent + most_actions
        best: Place | None = None
        for place in self._begun(starts, near):
            lowest = self._downhill(place)
            if best is None or lowest.beats(best):
                best = lowest
            if self._is_over:
                break
        fruitless = 0
        while best is not None and fruitless < _FRUITLESS and not self._is_over and len(self._moves):
            place = self._downhill(self._shaken(best))
            fruitless = 0 if place.beats(best) else fruitless + 1
            best = place if not best.beats(place) else best

    def placed(self, every_cuts: Sequence[IntArray]) -> list[Place]:
        """Partitions with what takes their devices the least time to compute again; shape (S+1,) each."""
        return self._raced([self._place(cuts, [ways[0] for ways in self._ways(cuts)]) for cuts in every_cuts])

    @property
    def _is_over(self) -> bool:
        effort = self._progress.effort
        return effort.spent >= self._ends or effort.left <= 0

    def _begun(self, starts: Sequence[IntArray], near: Partition | None) -> Iterator[Place]:
        if near is not None:
            cuts = np.cumsum([0, *near.balance])
            choices = [CHOICES.index(choice) for choice in near.recompute]
            devices = [
                self._devices.near(device, cuts, [choices[s] for s in chunks])
                for device, chunks in enumerate(self._many.chunks)
            ]
            least = [ways[0] for ways in self._ways(cuts)]
            yield min(
                self._raced([self._place(cuts, devices), self._place(cuts, least)]),
                key=lambda place: (place.over_bytes, place.step_us),
            )
        for cuts in (some for some in starts if self._wanted(some[None])[0]):
            yield self.placed([cuts])[0]

    def _downhill(self, place: Place) -> Place:
        """The nearest partition of which no neighbour is better."""
        while not self._is_over:
            better = next((n for n in self._neighbours(place) if n.beats(place)), None)
            if better is None:
                break
            place = better
        return place

    def _neighbours(self, place: Place) -> Iterator[Place]:
        """The best of each batch of moves, as long as the effort lasts."""
        order = list(range(len(self._moves)))
        self._random.shuffle(order)
        for first in range(0, len(order), _ROWS):
            cuts: IntArray = place.cuts + self._moves[order[first : first + _ROWS]]
            cuts = cuts[(np.diff(cuts, axis=1) > 0).all(axis=1)]
            cuts = cuts[self._wanted(cuts)]
            if len(cuts):
                yield self._best_of(place, cuts)
            if self._is_over:
                return
        other_ways = self._other_ways(place)
        if other_ways:
            yield min(self._raced(other_ways), key=lambda other: (other.over_bytes, other.step_us))

    def _best_of(self, place: Place, cuts: IntArray) -> Place:
        if place.over_bytes > 0:
            self._progress.effort.spent += self._many.num_actions
            least = np.full((len(cuts), self._many.num_stages), self._many.allowed[-1])
            order = np.argsort(self._many.over_bytes(cuts, least).sum(axis=1), kind="stable")
        else:
            before = np.cumsum([0.0, *np.where(self._is_recomputed(place), self._forward_us, 0.0)])
            layers_us: FloatArray = before[cuts[:, 1:]] - before[cuts[:, :-1]]
            choices = np.full(layers_us.shape, LAYERS)
            order = np.argsort(self._progress.simulated(self._many, cuts, choices, layers_us), kind="stable")
        return min(self.placed(list(cuts[order[:_PICKED]])), key=lambda other: (other.over_bytes, other.step_us))

    def _is_recomputed(self, place: Place) -> BoolArray:
        """Whether each layer is, shape (L,)."""
        whole = (place.choices > 0) & (place.choices != LAYERS)
        is_recomputed = np.repeat(whole, np.diff(place.cuts))
        is_recomputed[[layer for layers in place.recomputed for layer in layers]] = True
        return is_recomputed

    def _other_ways(self, place: Place) -> list[Place]:
        """The same cuts with another way to keep the cap on one device."""
        every = list(self._ways(place.cuts))
        places = []
        for device, ways in enumerate(every):
            chunks = list(self._many.chunks[device])
            for way in ways:
                changed = self._changed(place, chunks, way)
                if changed.recomputed != place.recomputed or (changed.choices != place.choices).any():
                    places.append(changed)
        return places

    def _changed(self, place: Place, chunks: list[int], way: Recomputation) -> Place:
        choices, layers_us, recomputed = place.choices.copy(), place.layers_us.copy(), list(place.recomputed)
        choices[chunks], layers_us[chunks] = way.choices, way.layers_us
        for s, layers in zip(chunks, way.recomputed, strict=True):
            recomputed[s] = layers
        return replace(place, choices=choices, layers_us=layers_us, recomputed=tuple(recomputed))

    def _place(self, cuts: IntArray, devices: Sequence[Recomputation]) -> Place:
        num = self._many.num_stages
        place = Place(
            cuts=cuts,
            choices=np.zeros(num, dtype=np.int64),
            recomputed=((),) * num,
            layers_us=np.zeros(num),
            over_bytes=sum(device.over_bytes for device in devices),
        )
        for chunks, device in zip(self._many.chunks, devices, strict=True):
            place = self._changed(place, list(chunks), device)
        return place

    def _ways(self, cuts: IntArray) -> Iterator[tuple[Recomputation, ...]]:
        """What each device may recompute."""
        for device in range(self._many.num_devices):
            # To choose layers may take long.
            self._progress.deadline.check()
            before = self._devices.num_solved
            yield self._devices.ways(device, cuts)
            self._progress.effort.spent += _SOLVED * (self._devices.num_solved - before)

    def _raced(self, places: Sequence[Place]) -> list[Place]:
        self._progress.effort.spent += _BATCH
        return raced(self._progress, self._many, places)

    def _shaken(self, place: Place) -> Place:
        """The partition after a few moves at random."""
        cuts = place.cuts
        for _ in range(self._random.randint(2, 4)):
            other = cuts + self._moves[self._random.randrange(len(self._moves))]
            if (np.diff(other) > 0).all() and self._wanted(other[None])[0]:
                cuts = other
        return self.placed([cuts])[0]

    def _wanted(self, cuts: IntArray) -> BoolArray:
        return ~np.asarray(self._many.case.rules.forbids(cuts[:, :-1], cuts[:, 1:]).any(axis=1))
