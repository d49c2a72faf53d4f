"""Data of the interactive report: memory and times of stages and cuts, action orders, and choices of the controls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.chain_costs import ChainCosts, TiedParameters
from planner.core.cost.costs import CostTable
from planner.core.cost.partition import Partition
from planner.core.cost.peak_points import ALLOCATIONS
from planner.core.cost.stage_time import CHOICES
from planner.core.cost.width import tensor_parallel_profile
from planner.core.judge.certainty import SLACK_BYTES, certainty_of
from planner.core.schedule import KINDS, Schedule
from planner.core.values.placement import Placement
from planner.core.values.plan import ITEMS, Plan
from planner.core.values.printable import printable
from planner.core.values.profile import Profile
from planner.show.explore.columns import (
    ALONE,
    ALONE_ONCE,
    ALWAYS,
    IN_PLACE,
    SHARED,
    add_memory_columns,
    add_time_columns,
    add_transfer_columns,
)
from planner.show.explore.orders import LETTERS, OfferedSchedule, ScheduleMenu, schedule_menu
from planner.show.explore.request import ExplorerRequest
from planner.show.explore.tables import NumberTable
from planner.show.explore.windows import DeviceGroup, StageLayout, even_balance, run_length_encode, stages_near
from planner.show.html.timeline import kinds_data

FloatArray = NDArray[np.float64]

MOST_BYTES: Final = 1_200_000
"""Size limit of all tables together, in bytes."""

_MOST_STAGES: Final = 50_000
"""Approximate limit on stages times micro-batch sizes in the tables; reduced while the tables exceed `MOST_BYTES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageData:
    """Data of the interactive report, and the limits of its controls."""

    text: str
    """JSON that is safe inside a script element."""
    is_complete: bool
    """True if all action orders fit into the interactive report."""
    widths: Mapping[int, int]
    """Largest number of layers by which a cut can be moved, by number of stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExplorerChain:
    """Layers of the model with their times and memory, and the devices of the plan's pipeline."""

    request: ExplorerRequest
    costs: Mapping[int, ChainCosts]
    """Times and memory of the layers, by number of micro-batches."""
    pipeline: DeviceGroup

    @classmethod
    def of(cls, request: ExplorerRequest) -> "_ExplorerChain":
        plan, table = request.plan, CostTable(tensor_parallel_profile(request.profile, request.plan.cluster))
        sizes = {m: plan.inputs.batch // plan.replicas // m for m in request.micro_batches}
        costs = {m: table.at(size, extrapolate=plan.inputs.extrapolate) for m, size in sizes.items()}
        partition = Partition.of(plan, costs[plan.micro_batches].names)
        places = [partition.device_of(stage) for stage in range(plan.num_devices)]
        return cls(request=request, costs=costs, pipeline=DeviceGroup(plan.cluster, places, plan.replicas))

    @property
    def one(self) -> ChainCosts:
        return self.costs[self.request.plan.micro_batches]


def page_data(request: ExplorerRequest) -> PageData:
    """Return the data of the interactive report; for a long chain, only with stages near the initial cuts."""
    chain, menu = _ExplorerChain.of(request), schedule_menu(request)
    nearby = _NearbyStages.of(chain, menu)
    widths = nearby.max_cut_moves(_MOST_STAGES // len(chain.costs))
    tables = nearby.tables(widths)
    while (size := len(_text(tables))) > MOST_BYTES:
        optional = [chunks for chunks in menu.chunks if chunks != request.plan.chunks]
        if max(widths.values()) > 1:
            fewer = nearby.max_cut_moves(tables["num_stages"] * MOST_BYTES // size)
            # Stages near different cuts are partly the same, so a smaller width may leave out fewer than estimated.
            widths = {s: max(1, min(max(fewer[s], width // 2), width - 1)) for s, width in widths.items()}
        elif optional:
            menu = menu.without(optional[-1])
            nearby = _NearbyStages.of(chain, menu)
            widths = nearby.max_cut_moves(0)
        else:
            break
        tables = nearby.tables(widths)
    data = {**_devices(chain), **tables, **nearby.layouts_data(), **_choices(nearby)}
    return PageData(text=_text(data).replace("<", "\\u003c"), is_complete=menu.is_complete, widths=widths)


def _text(data: Mapping[str, object]) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _NearbyStages:
    """Stages that result if each initial cut of the interactive report moves by a few layers."""

    chain: _ExplorerChain
    menu: ScheduleMenu
    layouts: Mapping[tuple[int, Placement], StageLayout]
    """Layouts of stages on devices, by number of chunks per device and placement."""
    balances: Mapping[int, tuple[int, ...]]
    """Initial number of layers of each stage, by number of stages."""

    @classmethod
    def of(cls, chain: _ExplorerChain, menu: ScheduleMenu) -> "_NearbyStages":
        used = sorted({(chunks, one.schedule.placement) for one in menu.schedules for chunks in one.orders})
        layouts = {key: StageLayout.of(chain.pipeline, *key) for key in used}
        plan = chain.request.plan
        even = {s: even_balance(chain.one, s) for s in {layout.num_stages for layout in layouts.values()}}
        return cls(chain=chain, menu=menu, layouts=layouts, balances={**even, len(plan.balance): plan.balance})

    def max_cut_moves(self, max_stages: int) -> dict[int, int]:
        """Return how many layers a cut may move to either side, for each number of stages of a partition.

        Args:
            max_stages: Approximate limit on the number of different stages in the interactive report if cuts move this
                far.
        """
        num_layers, own = self.chain.one.num_layers, len(self.chain.request.plan.balance)
        if len(self.chain.pipeline.speeds) * num_layers * (num_layers + 1) // 2 <= max_stages:
            return dict.fromkeys(self.balances, num_layers)
        # Half of the stages are for the plan's own number of stages.
        shares = {s: max_stages // 2 // (len(self.balances) - 1) for s in self.balances if s != own}
        shares[own] = max_stages - sum(shares.values())
        # If each cut moves by w layers to either side, there are (2 w + 1)^2 stages between two successive cuts.
        return {s: max(1, min(num_layers, (isqrt(share // s) - 1) // 2)) for s, share in shares.items()}

    def tables(self, max_cut_moves: Mapping[int, int]) -> dict[str, Any]:
        chain, pipeline = self.chain, self.chain.pipeline
        cells, crossings = stages_near(self.layouts.values(), self.balances, max_cut_moves)
        sizes, bytes_, times = {}, NumberTable(len(cells.first)), NumberTable(len(cells.first))
        sends = NumberTable(len(crossings.cut))
        for micro_batches, costs in chain.costs.items():
            replicated, allocations = costs.of_replicas(pipeline.replicas), self._allocations(micro_batches)
            sizes[micro_batches] = {
                "size": costs.micro_batch_size,
                "bytes": add_memory_columns(
                    bytes_, replicated, cells, micro_batches=micro_batches, allocations=allocations
                ),
                **add_time_columns(times, costs, cells, pipeline),
                **add_transfer_columns(sends, costs, crossings, pipeline),
                "columns": [_heights(costs.forward_us, costs), _heights(costs.backward_us, costs)],
            }
        return {
            "num_stages": len(cells.first),
            "cells": run_length_encode(*cells),
            "crossings": run_length_encode(*crossings),
            "sizes": sizes,
            "bytes": bytes_.json_data(),
            "times": times.json_data(),
            "sends": sends.json_data(),
        }

    def _allocations(self, micro_batches: int) -> list[set[int]]:
        allocations: list[set[int]] = [set() for _ in range(IN_PLACE + 1)]
        cases = ((one.schedule, chunks, by_m) for one in self.menu.schedules for chunks, by_m in one.orders.items())
        for schedule, chunks, by_m in cases:
            for mode in set(self.sharing_modes(schedule, chunks, micro_batches)) if micro_batches in by_m else ():
                allocations[mode] |= by_m[micro_batches].allocations
        return allocations

    def sharing_modes(self, schedule: Schedule, chunks: int, micro_batches: int) -> list[int]:
        layout = self.layouts[chunks, schedule.placement]
        if not schedule.has_known_peak_points:
            return [SHARED, *(IN_PLACE if a == b else SHARED for a, b in pairwise(layout.devices))]
        if self.chain.one.memory_model is None:
            return [ALONE] * layout.num_stages
        in_flight = (schedule.in_flight(k, layout.num_stages, micro_batches) for k in range(layout.num_stages))
        return [ALONE if most > 1 else ALONE_ONCE for most in in_flight]

    def layouts_data(self) -> dict[str, object]:
        links, layouts = self.chain.pipeline.indexed_links, list(self.layouts)
        return {
            "blocking": [link.blocking for link in links],
            "layouts": [layout.json_data() for layout in self.layouts.values()],
            "balances": self.balances,
            "ties": [_tie(tie, is_exact=self.chain.one.exact) for tie in self.chain.one.ties if tie.is_pair_known],
            "steps": [[code, *change] for code, change in self.menu.entries],
            "schedules": [self._schedule(one, layouts) for one in self.menu.schedules],
        }

    def _schedule(self, one: OfferedSchedule, layouts: Sequence[tuple[int, Placement]]) -> dict[str, object]:
        schedule = one.schedule
        return {
            "name": schedule.name,
            "title": schedule.title,
            "is_own": bool(schedule.order_texts),
            "splits": schedule.splits_backward,
            "forward": [LETTERS.index("F")],
            "backward": [LETTERS.index(letter) for letter in ("IW" if schedule.splits_backward else "B")],
            "layouts": {chunks: layouts.index((chunks, schedule.placement)) for chunks in one.orders},
            "orders": {
                chunks: {m: [self.sharing_modes(schedule, chunks, m), of_m.devices] for m, of_m in orders.items()}
                for chunks, orders in one.orders.items()
            },
        }


def _heights(times_us: FloatArray, costs: ChainCosts) -> list[int]:
    longest_us = float((costs.forward_us + costs.backward_us).max())
    heights: list[int] = np.rint(times_us / longest_us * 1000 if longest_us else times_us).astype(int).tolist()
    return heights


def _tie(tie: TiedParameters, *, is_exact: bool) -> list[object]:
    # Without a `MemoryDetail` of each layer, gradients exist during the whole step.
    sizes = {
        (ALWAYS, "parameters"): tie.parameter_bytes,
        (ALWAYS, "optimizer"): tie.optimizer_bytes,
        (ALLOCATIONS.index("gradients") if is_exact else ALWAYS, "gradients"): tie.gradient_bytes,
        (ALLOCATIONS.index("casts"), "casts"): tie.cast_bytes,
    }
    # The page's scripts expect: later layer, earlier layers (nearest first), list of allocation, component and bytes.
    shared = [
        number for (allocation, item), size in sizes.items() for number in (allocation, ITEMS.index(item), round(size))
    ]
    return [tie.second, [tie.first, *reversed(tie.earlier)], shared]


def _choices(nearby: _NearbyStages) -> dict[str, object]:
    request, plan = nearby.chain.request, nearby.chain.request.plan
    names = [each.schedule.name for each in nearby.menu.schedules]
    return {
        "start": {
            "schedule": names.index(plan.schedule),
            "chunks": plan.chunks,
            "micro_batches": plan.micro_batches,
            "balance": plan.balance,
        },
        # The page supports only whole stages, and says so.
        "policy": "auto" if plan.inputs.recompute == "layers" else plan.inputs.recompute,
        "recompute": [stage.recompute for stage in plan.stages],
        "may_recompute": request.may_recompute,
        "step_us": plan.predicted.step_us,
        **_error_ranges(plan, request.profile),
        "command": request.command,
        "place": request.place,
        "caveats": request.caveats,
    }


def _error_ranges(plan: Plan, profile: Profile) -> dict[str, object]:
    # The page applies the error ranges of the plan to all partitions.
    certainty, step_us = certainty_of(plan, profile), plan.predicted.step_us
    step = certainty.step_us
    bound = certainty.peak_ratio and [certainty.peak_ratio * certainty.allocator_ratio, SLACK_BYTES]
    return {"step_ratios": step and step_us and [time_us / step_us for time_us in step], "peak_bound": bound}


def _devices(chain: _ExplorerChain) -> dict[str, object]:
    request, plan = chain.request, chain.request.plan
    partition = Partition.of(plan, chain.one.names)
    return {
        "timeline": kinds_data(),
        "names": [printable(layer.name) for layer in request.profile.layers],
        "kinds": list(KINDS),
        "redone": [place for place, kind in enumerate(KINDS.values()) if kind.direction < 0],
        "num_allocations": len(ALLOCATIONS),
        "items": ITEMS,
        "recomputes": CHOICES,
        "devices": plan.num_devices,
        "places": [partition.device_of(stage) for stage in range(plan.num_devices)],
        "memory_bytes": plan.inputs.memory_bytes,
        "reserve_bytes": chain.pipeline.cluster.reserve_bytes,
        "batch": plan.inputs.batch,
        "halves_assumed": chain.one.is_split_backward_assumed,
    }
