"""The oracle: every plan of a small problem, judged by the cost model and the simulator, with nothing of the solver.

All replicas, M, schedules, chunks, stage counts, cuts and recomputation choices that a question
leaves open are laid out as arrays (`Block`), and their step times are simulated, GPipe's too: that the closed form
agrees is a result, not an assumption. `Space.judged` puts single plans to the cost model's own evaluation.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, combinations, pairwise, product

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.costs import costs_at, covers_size
from planner.core.cost.device_memory import chunk_memory, shared_bytes, subtract_shared
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.memory import peak_bytes_of_stages, stage_memory
from planner.core.cost.partition import Partition
from planner.core.cost.peak_points import ALLOCATIONS, PeakPoints, peak_allocation_counts, stage_peak_points
from planner.core.cost.simulate import makespans
from planner.core.errors import UsageError
from planner.core.schedule import SCHEDULES, Action
from planner.core.values.plan import Inputs, Recompute, ScheduleName
from planner.core.values.profile import Profile

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

WHOLE: tuple[Recompute, ...] = ("never", "except-last", "always")
CHUNKS = (1, 2, 3, 4)
"""What the solver tries where chunks are open."""

EQUAL = 1e-9
"""Relative; step times that differ by less are equal."""


def partitions(num_layers: int, max_stages: int) -> Iterator[tuple[int, ...]]:
    """Yield every balance that cuts `num_layers` layers into 1 to `max_stages` stages."""
    for num_stages in range(1, max_stages + 1):
        for cuts in _cuts(num_layers, num_stages):
            yield tuple(b - a for a, b in pairwise(cuts))


def best_step_us(profile: Profile, inputs: Inputs, micro_batches: int | None = None) -> float | None:
    """Return the smallest step time over all choices of the solver, or None if nothing fits."""
    best = Space(profile, inputs, micro_batches=micro_batches).best()
    return None if best is None else best.step_us


@dataclass(frozen=True, kw_only=True)
class Best:
    """The fastest plan; of equally fast ones, the first."""

    partition: Partition
    step_us: float
    micro_batch_size: int


@dataclass(frozen=True, kw_only=True)
class Way:
    """One choice of recomputation for a stage."""

    recompute: Recompute
    recomputed: tuple[int, ...] = ()


class Tables:
    """Costs of every stage by choice of recomputation: arrays of shape (L+1, L+1, choices), by first and end.

    Choices that a stage does not have are infinite.
    """

    def __init__(self, costs: ChainCosts, inputs: Inputs, micro_batches: int) -> None:
        self.costs = costs
        self.micro_batches = micro_batches
        self.ways = {
            (first, end): list(_ways(inputs, first, end))
            for first in range(costs.num_layers)
            for end in range(first + 1, costs.num_layers + 1)
        }
        self._shape = (costs.num_layers + 1, costs.num_layers + 1, max(map(len, self.ways.values())))
        self.counts = {interval: len(ways) for interval, ways in self.ways.items()}
        self.forward = self._filled(lambda first, end, _: self._forward_us(first, end))
        self.backward = self._filled(lambda first, end, _: float(costs.backward_us[first:end].sum()))
        self.again = self._filled(lambda first, end, way: self._recompute_us(first, end, way, last=False))
        self.last_again = self._filled(lambda first, end, way: self._recompute_us(first, end, way, last=True))
        self._totals: dict[PeakPoints, FloatArray] = {}

    def _filled(self, value: Callable[[int, int, Way], float]) -> FloatArray:
        table = np.full(self._shape, np.inf)
        for (first, end), ways in self.ways.items():
            table[first, end, : len(ways)] = [value(first, end, way) for way in ways]
        return table

    def _recompute_us(self, first: int, end: int, way: Way, *, last: bool) -> float:
        if way.recompute == "layers":
            return float(sum(self.costs.forward_us[n] for n in way.recomputed if self._is_trained(n + 1)))
        if not self._is_trained(end):
            return 0.0
        if way.recompute == "never" or (last and way.recompute == "except-last"):
            return 0.0
        return self._forward_us(first, end)

    def _forward_us(self, first: int, end: int) -> float:
        return float(self.costs.forward_us[first:end].sum() + self.costs.entry_us[first])

    def _is_trained(self, end: int) -> bool:
        """Return True if any layer before `end` is trained; in a profile without gradients, all are."""
        trained = self.costs.gradients + self.costs.state.idle
        return bool(trained[:end].any() or not trained.any())

    def bytes(self, points: PeakPoints) -> FloatArray:
        """Return the peak of each stage on a device with these points in the step, without the reserve."""
        if points not in self._totals:
            num = self.costs.num_layers
            choices = sorted({way.recompute for ways in self.ways.values() for way in ways} - {"layers"})
            totals = peak_bytes_of_stages(self.costs, np.arange(num), slice(0, num), points, choices=choices)
            whole = dict(zip(choices, totals, strict=True))

            def total(first: int, end: int, way: Way) -> float:
                if way.recompute != "layers":
                    return float(whole[way.recompute][first, end - 1])
                memory = stage_memory(self.costs, first, end, points, recompute="layers", recomputed=way.recomputed)
                return memory.total

            self._totals[points] = self._filled(total)
        return self._totals[points]

    @cached_property
    def chunks(self) -> tuple[FloatArray, FloatArray]:
        """Constant bytes of each stage as a chunk, and its components along a last axis."""
        always = np.full(self._shape, np.inf)
        allocation_bytes = np.full((*self._shape, len(ALLOCATIONS)), np.inf)
        for (first, end), ways in self.ways.items():
            for n, way in enumerate(ways):
                chunk = chunk_memory(
                    self.costs,
                    first,
                    end,
                    micro_batches=self.micro_batches,
                    recompute=way.recompute,
                    recomputed=way.recomputed,
                )
                always[first, end, n], allocation_bytes[first, end, n] = chunk.always.total, chunk.allocation_bytes
        return always, allocation_bytes


@dataclass(frozen=True, kw_only=True)
class Block:
    """All plans with the same schedule, R, M, V and devices; arrays with one row per plan."""

    tables: Tables
    inputs: Inputs
    schedule: ScheduleName
    chunks: int
    replicas: int
    num_devices: int
    """K."""
    cuts: IntArray
    """Shape (N, S+1)."""
    choices: IntArray
    """Shape (N, S): positions in `tables.ways`."""

    @property
    def micro_batches(self) -> int:
        """M."""
        return self.tables.micro_batches

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Action order of each device."""
        return SCHEDULES[self.schedule].actions(self.num_devices, self.micro_batches, self.chunks)

    def _at(self, table: FloatArray) -> FloatArray:
        return table[self.cuts[:, :-1], self.cuts[:, 1:], self.choices]

    @cached_property
    def peaks(self) -> FloatArray:
        """Peak of each used device with the reserve; shape (N, K)."""
        reserve = self.inputs.reserve_bytes
        if self.schedule != "interleaved":
            every = [
                stage_peak_points(
                    SCHEDULES[self.schedule], micro_batches=self.micro_batches, num_later=self.num_devices - 1 - k
                )
                for k in range(self.num_devices)
            ]
            peaks = [self._at(self.tables.bytes(points))[:, k] for k, points in enumerate(every)]
            return np.stack(peaks, axis=1) + reserve
        costs = self.tables.costs
        shared = shared_bytes(costs, self.cuts, self.num_devices)
        always, allocation_bytes = subtract_shared(*map(self._at, self.tables.chunks), shared, exact=costs.exact)
        devices = []
        for d, counts in enumerate(peak_allocation_counts(self.actions)):
            of = (slice(None), slice(d, None, self.num_devices))
            alive = np.einsum("nvp,tvp->nt", allocation_bytes[of], counts)
            devices.append(always[of].sum(axis=1) + alive.max(axis=1))
        return np.stack(devices, axis=1) + reserve

    @cached_property
    def _links(self) -> tuple[FloatArray, NDArray[np.bool_]]:
        cluster, costs = self.inputs.cluster, self.tables.costs
        stages = range(self.num_devices * self.chunks)
        links = [
            cluster.link_after(s % self.num_devices, num_devices=self.num_devices, replicas=self.replicas)
            for s in stages
        ]
        crossing = [
            [0.0, *(link.transfer_us(float(size)) for size in costs.boundaries.output[:-1]), 0.0] for link in links
        ]
        return np.array(crossing), np.array([link.blocking for link in links])

    @cached_property
    def pairs(self) -> FloatArray:
        """Forward + backward of each stage for a micro-batch that is not the last one; shape (N, S)."""
        forward, backward, _, _, _ = self._times
        return forward + backward

    @cached_property
    def _times(self) -> tuple[FloatArray, ...]:
        cluster, tables = self.inputs.cluster, self.tables
        speeds = np.array([cluster.speed(d) for d in range(self.num_devices)] * self.chunks)
        forward, backward, again, last_again = (
            self._at(table) / speeds for table in (tables.forward, tables.backward, tables.again, tables.last_again)
        )
        over = cluster.overhead_us
        sends = self._links[0][np.arange(len(speeds)), self.cuts[:, 1:]]
        return forward + over, backward + again + over, backward + last_again + over, backward + over, sends

    @cached_property
    def step_us(self) -> FloatArray:
        """Simulated step times with optimizer steps; shape (N,)."""
        forward, backward, last, alone, sends = self._times
        times = {"forward_us": forward, "backward_us": backward, "last_backward_us": last, "send_us": sends}
        pipeline = makespans(self.actions, times, blocking=self._links[1])
        cluster, costs, num = self.inputs.cluster, self.tables.costs, self.num_devices
        own = np.zeros((len(self.cuts), num))
        hidden = np.zeros(len(self.cuts))
        tail = np.zeros(len(self.cuts))
        for d in range(num):
            table = np.zeros(self.tables.forward.shape[:2])
            for first, end in self.tables.ways:
                twice = [tie for tie in costs.ties if first <= tie.first and tie.second < end]
                gradient_bytes = costs.gradients[first:end].sum() - sum(tie.gradient_bytes for tie in twice)
                optimizer_us = costs.optimizer_us[first:end].sum() - sum(tie.optimizer_us for tie in twice)
                table[first, end] = optimizer_us / cluster.speed(d)
                table[first, end] += cluster.allreduce_us(gradient_bytes, self.replicas)
            for s in range(d, num * self.chunks, num):
                own[:, d] += table[self.cuts[:, s], self.cuts[:, s + 1]]
            tail = np.maximum(tail, own[:, d] - hidden)
            hidden = hidden + forward[:, d] + alone[:, d] + 2 * sends[:, d]
        return pipeline + tail

    def fits(self, caps: Sequence[float]) -> NDArray[np.bool_]:
        """Return True for each plan that fits into the memory limits of the devices; shape (N,)."""
        return np.all(self.peaks <= np.array(caps[: self.num_devices], float), axis=1)

    def ranks(self) -> FloatArray:
        """Return highest peak, moved bytes and sum of squared stage times of each plan; shape (N, 3)."""
        outputs = np.array([0.0, *self.tables.costs.boundaries.output[:-1], 0.0])
        return np.stack(
            [self.peaks.max(axis=1), outputs[self.cuts[:, 1:]].sum(axis=1), (self.pairs**2).sum(axis=1)], axis=1
        )

    def partition(self, row: int) -> Partition:
        """Return one plan."""
        cuts = [int(cut) for cut in self.cuts[row]]
        ways = [self.tables.ways[i][int(c)] for i, c in zip(pairwise(cuts), self.choices[row], strict=True)]
        some = any(way.recomputed for way in ways)
        return Partition(
            schedule=self.schedule,
            micro_batches=self.micro_batches,
            balance=tuple(b - a for a, b in pairwise(cuts)),
            recompute=tuple(way.recompute for way in ways),
            recomputed=tuple(way.recomputed for way in ways) if some else (),
            chunks=self.chunks,
            replicas=self.replicas,
        )


class Space:
    """All plans for a request. Memory limits decide which of them fit, and may be changed later.

    An interleaved schedule requires at least two devices and enough layers for them, though it may use one device.
    """

    def __init__(
        self,
        profile: Profile,
        inputs: Inputs,
        *,
        micro_batches: int | None = None,
        balance: tuple[int, ...] | None = None,
    ) -> None:
        self.profile = profile
        self.inputs = inputs
        self.caps: Sequence[float] = inputs.memory_bytes
        self._balance = balance
        names = [layer.name for layer in profile.layers]
        self._together = [{names.index(name) for name in group} for group in inputs.together]
        self._apart = [{names.index(name) for name in group} for group in inputs.apart]
        self.blocks = [
            block
            for replicas in ([inputs.replicas] if inputs.replicas else range(1, inputs.devices + 1))
            if inputs.batch % replicas == 0
            for m in range(1, inputs.batch // replicas + 1)
            if micro_batches in (None, m) and inputs.batch % (replicas * m) == 0
            for block in self._blocks(replicas, m)
        ]

    def _blocks(self, replicas: int, micro_batches: int) -> Iterator[Block]:
        inputs = self.inputs
        size = inputs.batch // (replicas * micro_batches)
        if not covers_size(self.profile, size, extrapolate=inputs.extrapolate):
            return
        costs = costs_at(self.profile, size, extrapolate=inputs.extrapolate).of_replicas(replicas)
        tables = Tables(costs, inputs, micro_batches)
        num_layers, most = len(self.profile.layers), inputs.devices // replicas
        for schedule, chunks in _schedules(inputs):
            if schedule == "interleaved" and (most < 2 or num_layers < 2 * chunks):
                continue
            for num in range(1, most + 1):
                cuts = [c for c in _cuts(num_layers, num * chunks) if self._wanted(c)]
                if not cuts:
                    continue
                try:
                    SCHEDULES[schedule].actions(num, micro_batches, chunks)
                except UsageError:
                    continue
                every = _with_choices(tuple(cuts), tuple(tuple(tables.counts[i] for i in pairwise(c)) for c in cuts))
                yield Block(
                    tables=tables,
                    inputs=inputs,
                    schedule=schedule,
                    chunks=chunks,
                    replicas=replicas,
                    num_devices=num,
                    cuts=every[0],
                    choices=every[1],
                )

    def _wanted(self, cuts: tuple[int, ...]) -> bool:
        if self._balance is not None and tuple(b - a for a, b in pairwise(cuts)) != self._balance:
            return False
        stages = [set(range(a, b)) for a, b in pairwise(cuts)]
        whole = all(any(group <= stage for stage in stages) for group in self._together)
        return whole and not any(len(group & stage) > 1 for group in self._apart for stage in stages)

    def under(self, caps: Sequence[float]) -> "Space":
        """Return the same plans under other memory limits."""
        other = copy(self)
        other.caps = caps
        other.inputs = replace(self.inputs, memory_bytes=tuple(int(cap) for cap in caps))
        return other

    def only(self, *, micro_batches: int | None = None, replicas: int | None = None) -> "Space":
        """Return the plans with these M and R, if given."""
        other = copy(self)
        other.blocks = [
            block
            for block in self.blocks
            if micro_batches in (None, block.micro_batches) and replicas in (None, block.replicas)
        ]
        return other

    def best(self) -> Best | None:
        """Return the fastest plan that fits."""
        best: tuple[float, Block, int] | None = None
        for block in self.blocks:
            times = np.where(block.fits(self.caps), block.step_us, np.inf)
            row = int(times.argmin())
            if np.isfinite(times[row]) and (best is None or times[row] < best[0]):
                best = float(times[row]), block, row
        if best is None:
            return None
        time_us, block, row = best
        return Best(
            partition=block.partition(row), step_us=time_us, micro_batch_size=block.tables.costs.micro_batch_size
        )

    def any_fits(self) -> bool:
        """Return True if a plan fits."""
        return any(block.fits(self.caps).any() for block in self.blocks)

    def smallest_cap_bytes(self) -> float:
        """Return the smallest equal memory limit of all devices with which a plan fits; infinite if none fits."""
        return min((float(block.peaks.max(axis=1).min()) for block in self.blocks), default=np.inf)

    def first_by_rank(self, partition: Partition, step_us: float) -> tuple[float, ...]:
        """Return the best rank of plans with the same schedule, R, M and V that fit and take `step_us`."""
        ranks = [
            block.ranks()[block.fits(self.caps) & (block.step_us <= step_us * (1 + EQUAL))]
            for block in self.blocks
            if _alike(block, partition)
        ]
        every = np.concatenate(ranks)
        for n in range(every.shape[1]):
            every = every[every[:, n] <= every[:, n].min() * (1 + EQUAL)]
        return tuple(float(number) for number in every[0])

    def rank_of(self, partition: Partition) -> tuple[float, ...]:
        """Return the rank of one plan."""
        for block in self.blocks:
            if not _alike(block, partition) or block.num_devices != partition.num_devices:
                continue
            cuts = [0, *(end for _, end in partition.intervals())]
            for row in np.flatnonzero((block.cuts == cuts).all(axis=1)):
                if _plain(block.partition(int(row))) == _plain(partition):
                    return tuple(float(number) for number in block.ranks()[row])
        raise AssertionError(f"brute force does not know {partition}")

    def judged(self, block: Block, row: int) -> tuple[float, tuple[int, ...]]:
        """Return a plan's step time and the peak of each device by the cost model's own evaluation."""
        partition, cluster = block.partition(row), self.inputs.cluster
        evaluation, num = Evaluation(block.tables.costs, partition, cluster), block.num_devices
        peaks = tuple(sum(memory.total for memory in evaluation.memory[d::num]) for d in range(num))
        return evaluation.step_us, peaks


def _alike(block: Block, partition: Partition) -> bool:
    """Return True if schedule, R, M and V are equal."""
    return (block.schedule, block.replicas, block.micro_batches, block.chunks) == (
        partition.schedule,
        partition.replicas,
        partition.micro_batches,
        partition.chunks,
    )


def _plain(partition: Partition) -> Partition:
    """Use one name for equal choices: a single micro-batch is the last one, which `except-last` spares."""
    if partition.micro_batches > 1:
        return partition
    return replace(partition, recompute=tuple("never" if r == "except-last" else r for r in partition.recompute))


def _schedules(inputs: Inputs) -> Iterator[tuple[ScheduleName, int]]:
    for schedule in ("gpipe", "1f1b"):
        if inputs.schedule in (schedule, "auto"):
            yield schedule, 1
    if inputs.schedule in ("interleaved", "auto"):
        yield from (("interleaved", chunks) for chunks in ([inputs.chunks] if inputs.chunks else CHUNKS))


def _ways(inputs: Inputs, first: int, end: int) -> Iterator[Way]:
    allowed = [recompute for recompute in WHOLE if inputs.recompute in ("auto", "layers", recompute)]
    yield from (Way(recompute=recompute) for recompute in allowed)
    if inputs.recompute == "layers":
        layers = range(first, end)
        subsets = chain.from_iterable(combinations(layers, n) for n in range(1, len(layers) + 1))
        yield from (Way(recompute="layers", recomputed=some) for some in subsets)


@lru_cache(maxsize=256)
def _cuts(num_layers: int, num_stages: int) -> tuple[tuple[int, ...], ...]:
    return tuple((0, *inner, num_layers) for inner in combinations(range(1, num_layers), num_stages - 1))


@lru_cache(maxsize=512)
def _with_choices(cuts: tuple[tuple[int, ...], ...], counts: tuple[tuple[int, ...], ...]) -> tuple[IntArray, IntArray]:
    """Return every choice of recomputation in every stage, for all cuts."""
    rows = [(cut, choice) for cut, num in zip(cuts, counts, strict=True) for choice in product(*map(range, num))]
    return np.array([cut for cut, _ in rows]), np.array([choice for _, choice in rows])
