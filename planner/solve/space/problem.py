"""Input of the dynamic program: all possible stages of a chain, and their times."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from planner.core.cost.arrays import ChoiceArray, FloatArray, IndexArray, IntArray
from planner.core.cost.stage_time import ChainSums, optimizer_slack_us
from planner.core.values.cluster import Link
from planner.solve.space.tables import NO_CHOICE


class StageTimeArrays(NamedTuple):
    """Times of stages as arrays: one row per cut at which the stages end, one column per first layer.

    Times are in microseconds, for one micro-batch. They include the executor's overhead, and the time to receive over
    blocking links. Entries without a stage are infinite.
    """

    first: IntArray
    """First layer of the stage."""
    end: IntArray
    """Cut at the end of the stage, shape (rows, 1)."""
    choice: ChoiceArray
    """Recomputation: index into `CHOICES`, or `LAYERS`, or `NO_CHOICE`."""
    forward: FloatArray
    backward: FloatArray
    """Backward time of micro-batches 0..M-2, with recomputation."""
    last_backward: FloatArray
    """Backward time of micro-batch M-1, with recomputation."""
    slack_us: FloatArray
    """Time of the next stage's optimizer step that overlaps with work of this stage."""
    link: FloatArray
    """Time on the link to the next stage, shape (rows, 1)."""
    between_steps_us: FloatArray
    """Time of the stage's all-reduce and optimizer step, U."""
    sent_bytes: FloatArray
    """Bytes sent to the next stage, shape (rows, 1)."""
    peak_bytes: FloatArray
    """Peak memory in bytes; zeros of shape (rows, 1) if it was not requested."""

    @classmethod
    def stacked(cls, options: Sequence["StageTimeArrays"]) -> "StageTimeArrays":
        """Stack the times of the same stages under several recompute options along a new first axis."""
        shape = options[0].first.shape
        each: list[Any] = [
            np.stack(field) if field[0].shape == shape else field[0] for field in zip(*options, strict=True)
        ]
        return cls(*each)

    def select(self, option: IndexArray, row: IndexArray, column: IndexArray) -> "StageTimeArrays":
        """Return the stages at some entries [option, row, column], in arrays of one dimension.

        Args:
            option: Recompute option of each stage: its position in the argument of `stacked`.
            row: Row of each stage.
            column: Column of each stage.
        """
        _, rows, most_layers = self.first.shape
        place = (option * rows + row) * most_layers + column
        each: list[Any] = [field.reshape(-1).take(place if field.ndim > 2 else row) for field in self]
        return StageTimeArrays(*each)


class Bottlenecks(NamedTuple):
    """Largest forward and backward times of a plan's stages and links, in microseconds."""

    forward_us: float
    backward_us: float


NO_LIMIT: Final = Bottlenecks(np.inf, np.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkTimes:
    """Transfer times of one link for every possible cut, in microseconds; 0 at both ends of the chain."""

    on_link_us: FloatArray
    """Transfer time of a link whose transfers overlap with compute; else 0."""
    receive_us: FloatArray
    """Transfer time of a link whose transfers keep the receiving stage busy; else 0."""

    @property
    def transfer_us(self) -> FloatArray:
        """Transfer time of the link at each cut."""
        return self.on_link_us + self.receive_us

    @classmethod
    def of(cls, link: Link | None, sums: ChainSums) -> "LinkTimes":
        """Return the times to send the tensors at each cut over `link`; zeros if `link` is None."""
        nothing = np.zeros(len(sums.crossing_bytes))
        if link is None:
            return cls(on_link_us=nothing, receive_us=nothing)
        times = nothing.copy()
        times[1:-1] = link.transfer_us(sums.crossing_bytes[1:-1])
        return cls(on_link_us=nothing, receive_us=times) if link.blocking else cls(on_link_us=times, receive_us=nothing)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageChoiceTable:
    """Recompute choice and peak memory of every possible stage of one device.

    In each array, entry [end, most_layers - n] is for the stage of the n layers before layer `end`. The largest n is
    `most_layers`.
    """

    speed: float
    choice: ChoiceArray
    """Recomputation: index into `CHOICES`, or `LAYERS`, or `NO_CHOICE`; shape (layers + 1, most_layers)."""
    recompute_us: FloatArray | None = None
    """Recomputation time on the profiled device where the choice is `LAYERS`; shape (layers + 1, most_layers)."""
    bytes: FloatArray | None = None
    """Peak memory in bytes, shape (layers + 1, most_layers); None if it was not requested."""

    @property
    def most_layers(self) -> int:
        """Number of layers of the longest stage in the table."""
        return int(self.choice.shape[1])

    def narrowed(self, most_layers: int) -> "StageChoiceTable":
        """Return the table without stages of more than `most_layers` layers."""
        begin = self.most_layers - most_layers
        recompute_us, peaks = (None if table is None else table[:, begin:] for table in (self.recompute_us, self.bytes))
        return StageChoiceTable(speed=self.speed, choice=self.choice[:, begin:], recompute_us=recompute_us, bytes=peaks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainProblem:
    """Problem of cutting a chain into at most, or exactly, `num_stages` stages.

    Tables and links begin with the last stage: entry n is for the stage with n later stages.
    """

    num_stages: int
    is_count_exact: bool
    """True for exactly `num_stages` stages; False for at most `num_stages` stages."""
    sums: ChainSums
    tables: tuple[tuple[StageChoiceTable, ...], ...]
    """Entry n: one table per recompute option, for all possible stages with n later stages."""
    links: tuple[LinkTimes, ...]
    """Entry n: link between the stages with n and n - 1 later stages. The first and the last entry transfer nothing."""
    most: Bottlenecks = NO_LIMIT
    """Upper limits on the forward and backward times of stages and links."""

    @property
    def num_layers(self) -> int:
        """Number of layers, L."""
        return len(self.sums.forward_us) - 1

    @property
    def is_uniform(self) -> bool:
        """Return True if all devices and links are equal."""
        return all(variants is self.tables[0] for variants in self.tables) and all(
            link is self.links[0] for link in self.links
        )

    @property
    def most_layers(self) -> int:
        """Number of layers of the longest stage in `tables`."""
        return self.tables[0][0].most_layers

    @property
    def highest_speed(self) -> float:
        """Highest speed of a device, relative to the profiled device."""
        return max(table.speed for variants in self.tables for table in variants)

    def without_slower_stages(self, most: Bottlenecks) -> "ChainProblem":
        """Return the problem without stages whose times exceed `most`."""
        ends = np.arange(1, self.num_layers + 1)
        # Rounding depends on the order of sums: the tables may be a layer too wide, never too narrow.
        limits = [limit_us * self.highest_speed * (1 + 1e-9) for limit_us in most]
        firsts = [
            np.searchsorted(sums, sums[1:] - limit)
            for sums, limit in zip((self.sums.forward_us, self.sums.backward_us), limits, strict=True)
        ]
        most_layers = int(np.clip((ends - np.maximum(*firsts)).max(), 1, self.most_layers))
        narrowed = {id(variants): tuple(table.narrowed(most_layers) for table in variants) for variants in self.tables}
        return replace(self, most=most, tables=tuple(narrowed[id(variants)] for variants in self.tables))

    def stages(self, num_later: int, option: int, ends: IntArray) -> StageTimeArrays:
        """Return the stages with recompute option `option` and `num_later` later stages that end at the cuts `ends`.

        Args:
            num_later: Number of later stages.
            option: Recompute option: an index into `tables[num_later]`.
            ends: Cuts at the ends of the stages, shape (n,).
        """
        table, behind, before = self.tables[num_later][option], self.links[num_later], self.links[num_later + 1]
        end = ends[:, None]
        first = end + np.arange(-table.most_layers, 0)
        choice = table.choice[ends]
        fits = choice != NO_CHOICE
        first = np.where(fits, first, 0)
        busy = self.sums.busy_times(
            first,
            end,
            choice,
            speed=table.speed,
            recomputed_layers_us=0.0 if table.recompute_us is None else table.recompute_us[ends],
        )
        receive, receive_back = before.receive_us[first], behind.receive_us[end]
        link = behind.on_link_us[end]
        if np.isfinite(min(self.most)):
            fits = fits & (np.maximum(busy.forward_us + receive, link) <= self.most.forward_us)
            fits &= np.maximum(busy.backward_us + receive_back, link) <= self.most.backward_us
        nowhere = np.where(fits, 0.0, np.inf)
        receive, receive_back = receive + nowhere, receive_back + nowhere
        return StageTimeArrays(
            first=first,
            end=end,
            choice=choice,
            forward=busy.forward_us + receive,
            backward=busy.backward_us + receive_back,
            last_backward=busy.last_backward_us + receive_back,
            slack_us=optimizer_slack_us(busy, behind.transfer_us[end]),
            link=link,
            between_steps_us=self.sums.between_steps_us(first, end, table.speed),
            sent_bytes=self.sums.crossing_bytes[end],
            peak_bytes=np.zeros(end.shape) if table.bytes is None else table.bytes[ends],
        )
