"""Combination of a schedule and numbers of micro-batches, chunks and replicas (`Case`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from planner.core.cost.arrays import BoolArray, FloatArray, IntArray
from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.costs import CostsAtSize
from planner.core.cost.partition import Partition
from planner.core.cost.peak_points import PeakPoints, stage_peak_points
from planner.core.cost.stage_time import CHOICES, LAYERS, ChainSums
from planner.core.schedule import ComputeTimeBounds, Schedule
from planner.core.values.cluster import Cluster
from planner.core.values.plan import RecomputePolicy
from planner.solve.space.problem import ChainProblem, LinkTimes, StageChoiceTable
from planner.solve.space.tables import NO_CHOICE, MemoryTable


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRules:
    """Stages that the options `--together` and `--apart`, and fixed cuts, forbid."""

    together: tuple[tuple[int, ...], ...] = ()
    """Groups of layers that must be in one stage."""
    apart: tuple[tuple[int, ...], ...] = ()
    """Groups of layers that must all be in different stages."""
    balance: tuple[int, ...] | None = None
    """Number of layers of each stage, if the cuts are fixed; None to allow all cuts."""

    def forbids(self, first: IntArray, end: IntArray) -> BoolArray:
        """Return True where a rule forbids the stage of the layers first..end-1; both arrays are broadcast."""
        no = np.zeros(np.broadcast_shapes(first.shape, end.shape), dtype=bool)
        for group in filter(None, self.together):
            low, high = min(group), max(group)
            no |= ((low < first) & (first <= high)) | ((low < end) & (end <= high))
        for group in self.apart:
            for low, high in pairwise(sorted(group)):
                no |= (first <= low) & (high < end)
        if self.balance is not None:
            cuts = np.cumsum([0, *self.balance])
            wanted = np.zeros_like(no)
            for low, high in pairwise(cuts):
                wanted |= (first == low) & (end == high)
            no |= ~wanted
        return no

    def allows(self, cuts: IntArray) -> BoolArray:
        """Return True for each partition without a forbidden stage; `cuts` has the shape (partitions, stages + 1)."""
        return ~np.asarray(self.forbids(cuts[:, :-1], cuts[:, 1:]).any(axis=1))


@dataclass(frozen=True, kw_only=True)
class Case:
    """Schedule and numbers of chunks, micro-batches and replicas, for which the solver searches the best cuts."""

    costs_at_size: CostsAtSize
    cluster: Cluster
    schedule: Schedule
    micro_batches: int
    num_devices: int
    replicas: int
    policy: RecomputePolicy
    rules: StageRules
    chunks: int = 1
    least_recompute_us: Callable[[int, float, PeakPoints], FloatArray] | None = None
    """Function that returns, for each stage, a lower bound of the recomputation time needed to fit into memory.

    Arguments: number of layers of the longest stage; memory limit minus the reserve, in bytes; points in the step at
    which the memory may peak. Result: array as from `RecomputeTimes.table`. If None, only whole stages are recomputed.
    """
    known_us: dict[bytes, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Step times of simulated partitions. All searches of a case share this cache.

    A key consists of the bytes of the cuts and of the recompute choices. Its length depends on the number of stages, so
    partitions with different numbers of stages have different keys.
    """
    moved_us: dict[bytes, FloatArray] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Step times of partitions after one move of a local search. All searches of a case share this cache.

    A key consists of the bytes of the cuts and of the recompute choices before the move. Entry n of the array is the
    step time after move n of `Descent.moves`; NaN if this move was not simulated yet.
    """
    _memory: dict[tuple[int, int], MemoryTable] = field(default_factory=dict, repr=False, compare=False)

    def partition(
        self, cuts: Sequence[int] | IntArray, choices: Sequence[int] | IntArray, **other_fields: Any
    ) -> Partition:
        """Return cuts and recompute choices as a `Partition`.

        Args:
            cuts: First layer of each stage, then the number of layers.
            choices: Recompute choice of each stage, as an index into `CHOICES` or as `LAYERS`.
            other_fields: Other fields of `Partition`.
        """
        return Partition(
            schedule=self.schedule.name,
            micro_batches=self.micro_batches,
            balance=tuple(np.diff(cuts).tolist()),
            recompute=tuple((*CHOICES, "layers")[choice] for choice in choices),
            chunks=self.chunks,
            order=self.schedule.order_texts,
            replicas=self.replicas,
            **other_fields,
        )

    @property
    def costs(self) -> ChainCosts:
        """Costs of the layers at the case's micro-batch size, computed on first use."""
        return self.costs_at_size.costs

    @cached_property
    def is_homogeneous(self) -> bool:
        """Return True if all devices are equal and all links are equal."""
        limits = set(self.cluster.memory_bytes[: self.num_devices])
        speeds = {self.cluster.speed(d) for d in range(self.num_devices)}
        nodes = self.cluster.inter_link is None or (
            0 < self.num_devices * self.replicas <= self.cluster.node_devices or self.cluster.node_devices == 0
        )
        return len(limits) == len(speeds) == 1 and nodes and len(set(self.cluster.links)) <= 1

    @cached_property
    def sums(self) -> ChainSums:
        """Prefix sums of layer times, from which stage times are computed."""
        return ChainSums.of(self.costs, self.cluster, self.replicas)

    @cached_property
    def limits_bytes(self) -> tuple[float, ...]:
        """Memory limit of each device minus its reserve, in bytes."""
        return tuple(limit - self.cluster.reserve_bytes for limit in self.cluster.memory_bytes[: self.num_devices])

    @cached_property
    def highest_speed(self) -> float:
        """Highest speed of a device, relative to the profiled device."""
        return max(self.cluster.speed(d) for d in range(self.num_devices))

    @property
    def work_us(self) -> float:
        """Forward plus backward time of one micro-batch through all layers on the fastest device."""
        return float(self.costs_at_size.forward_us.sum() + self.least_backward_us.sum()) / self.highest_speed

    @cached_property
    def least_backward_us(self) -> FloatArray:
        """Backward time of each layer. If the schedule splits backwards, the shorter of whole and split backward."""
        if not self.schedule.splits_backward:
            return self.costs_at_size.backward_us
        return np.minimum(
            self.costs.backward_us, self.costs.split_backward.input_us + self.costs.split_backward.weight_us
        )

    @property
    def is_too_large(self) -> bool:
        """Return True if the parameters, gradients and optimizer state of some layer fit on no device."""
        return float((self.costs.state.always + self.costs.gradients).max()) > max(self.limits_bytes)

    @cached_property
    def bound_us(self) -> float:
        """Lower bound of the step time. It ignores memory limits, links, overheads and recomputation."""
        forward_us, backward_us = self.costs_at_size.forward_us, self.least_backward_us
        bottlenecks = (self._bottleneck_us(times) for times in (forward_us, backward_us, forward_us + backward_us))
        return self.schedule.bound_us(ComputeTimeBounds(self.work_us, *bottlenecks), self.micro_batches, self.chunks)

    @cached_property
    def ideal_us(self) -> float:
        """Estimate of the step time for stages of equal work, without recomputation and transfers.

        It includes the bubble of 1F1B, or no bubble if the schedule splits backwards.
        """
        if self.schedule.splits_backward:
            return self.bound_us
        pair = self._bottleneck_us(self.costs_at_size.forward_us + self.least_backward_us)
        return self.micro_batches * pair + self.work_us * (1 - 1 / self.num_devices) / self.chunks

    def _bottleneck_us(self, times: FloatArray) -> float:
        speeds = sum(self.cluster.speed(d) for d in range(self.num_devices))
        return max(float(times.max(initial=0.0)) / self.highest_speed, float(times.sum()) / speeds)

    def stage_time_limit_us(self, upper_us: float) -> float:
        """Return an upper bound of a stage's forward plus backward time, in plans with a shorter step than `upper_us`.

        The time is for the profiled device.
        """
        if not np.isfinite(upper_us):
            return np.inf
        return self.schedule.stage_time_limit_us(upper_us, self.work_us, self.micro_batches) * self.highest_speed

    def least_step_us(self, num_stages: int) -> float:
        """Return a lower bound of the step time with `num_stages` stages. It never increases with more stages."""
        pair_us = self.costs.forward_us + self.least_backward_us
        speeds = sorted((self.cluster.speed(d) for d in range(self.num_devices)), reverse=True)
        share_us = max(float(pair_us.sum()) / sum(speeds[:num_stages]), float(pair_us.max()) / speeds[0])
        return self.micro_batches * share_us

    def peak_points(self, num_later: int) -> PeakPoints:
        """Return the points in the step at which a stage with `num_later` later stages may need most memory."""
        return stage_peak_points(self.schedule, micro_batches=self.micro_batches, num_later=num_later)

    def memory_table(self, most_layers: int, num_later: int) -> MemoryTable:
        """Return the peak memory of every stage of at most `most_layers` layers that has `num_later` later stages."""
        points = self.peak_points(num_later)
        key = most_layers, points.in_flight
        if key not in self._memory:
            wider = [
                table
                for (_, count), table in self._memory.items()
                if count == key[1] and table.most_layers > most_layers
            ]
            if wider:
                self._memory[key] = wider[0].narrowed(most_layers)
                return self._memory[key]
            table = MemoryTable.of(self.costs, points, most_layers=most_layers, policy=self.policy)
            if any(most_layers != other for other, _ in self._memory):
                self._memory.clear()  # Tables only widen during a search, so narrower tables are not needed again.
            self._memory[key] = table
        return self._memory[key]

    def chain_problem(
        self,
        num_stages: int,
        *,
        most_layers: int,
        most_bytes: float = np.inf,
        every_choice: bool = False,
        is_count_exact: bool = False,
    ) -> ChainProblem:
        """Return the input of the dynamic program: tables of all stages, with their recomputation and times.

        Args:
            num_stages: Largest number of stages if all devices and links are equal, else the exact number.
            most_layers: Number of layers of the longest stage to consider.
            most_bytes: Second limit on the peak memory of each device, in bytes. The smaller of both limits applies.
            every_choice: True to list each stage with every recompute choice that fits, and its peak memory; False to
                list each stage with the fastest choice that fits.
            is_count_exact: True to use exactly `num_stages` stages, even if all devices and links are equal.
        """
        return ChainProblem(
            num_stages=num_stages,
            is_count_exact=is_count_exact or not self.is_homogeneous,
            sums=self.sums,
            tables=self._tables(num_stages, most_layers, most_bytes, every_choice=every_choice),
            links=self._links(num_stages),
        )

    def _tables(
        self, num_stages: int, most_layers: int, most_bytes: float, *, every_choice: bool
    ) -> tuple[tuple[StageChoiceTable, ...], ...]:
        variants: dict[tuple[float, float, int], tuple[StageChoiceTable, ...]] = {}
        tables = []
        ends = np.arange(self.costs.num_layers + 1)[:, None]
        forbidden = self.rules.forbids(ends + np.arange(-most_layers, 0), ends)
        # Under 1F1B the first stage needs most memory. If every stage fits as first stage, all levels share one table.
        hardest = self.memory_table(most_layers, num_stages - 1)
        easy = (
            self.is_homogeneous
            and min(self.limits_bytes[0], most_bytes - self.cluster.reserve_bytes)
            >= hardest.most_bytes_without_recompute()
        )
        for num_later in range(num_stages):
            device = 0 if self.is_homogeneous else num_stages - 1 - num_later
            limit = min(self.limits_bytes[device], most_bytes - self.cluster.reserve_bytes)
            memory = hardest if easy else self.memory_table(most_layers, num_later)
            key = (limit, self.cluster.speed(device), id(memory))
            if key not in variants:
                # If every stage fits without recomputation, no layer needs it either.
                layers_us = (
                    None
                    if easy or not self.least_recompute_us
                    else self.least_recompute_us(most_layers, limit, self.peak_points(num_later))
                )
                variants[key] = self._device_tables(
                    memory,
                    limit,
                    self.cluster.speed(device),
                    forbidden,
                    every_choice=every_choice,
                    recompute_us=layers_us,
                )
            tables.append(variants[key])
        return tuple(tables)

    def _device_tables(
        self,
        memory: MemoryTable,
        limit: float,
        speed: float,
        forbidden: BoolArray,
        *,
        every_choice: bool,
        recompute_us: FloatArray | None,
    ) -> tuple[StageChoiceTable, ...]:
        if not every_choice:
            choice = memory.choices(limit)
            choice[forbidden] = NO_CHOICE
            variants = [StageChoiceTable(speed=speed, choice=choice)]
            if recompute_us is not None:
                some = np.where(np.isfinite(recompute_us) & (choice != 0) & ~forbidden, LAYERS, NO_CHOICE)
                variants.append(StageChoiceTable(speed=speed, choice=some.astype(np.int8), recompute_us=recompute_us))
            return tuple(variants)
        variants = []
        for n, totals in memory.totals.items():
            fits = (totals <= limit) & ~forbidden
            choice = np.where(fits, n, NO_CHOICE).astype(np.int8)
            variants.append(StageChoiceTable(speed=speed, choice=choice, bytes=totals + self.cluster.reserve_bytes))
        return tuple(variants)

    def _links(self, num_stages: int) -> tuple[LinkTimes, ...]:
        nothing = LinkTimes.of(None, self.sums)
        if self.is_homogeneous:
            # Cuts at the ends of the chain transfer nothing, whatever the link.
            link = self.cluster.links[0] if self.cluster.links else self.cluster.link
            return (LinkTimes.of(link, self.sums),) * (num_stages + 1)
        behind = [
            LinkTimes.of(
                self.cluster.link_after(num_stages - 1 - num_later, num_devices=num_stages, replicas=self.replicas),
                self.sums,
            )
            for num_later in range(1, num_stages)
        ]
        return (nothing, *behind, nothing)


def layer_indices(groups: Sequence[Sequence[str]], names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the index of each layer name, in the same groups.

    Raises:
        KeyError: A name is unknown.
    """
    places = {name: n for n, name in enumerate(names)}
    return tuple(tuple(places[name] for name in group) for group in groups)


def cuts_and_choices(partition: Partition) -> tuple[IntArray, IntArray]:
    """Return the cuts of a partition that recomputes whole stages, and the recompute choice of each stage."""
    return np.cumsum([0, *partition.balance]), np.array([CHOICES.index(choice) for choice in partition.recompute])
