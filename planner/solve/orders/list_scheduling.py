"""List scheduling: compute an action order for given stages, by dispatch rules or from a preferred order.

Actions are F (forward), I (input-gradient backward), W (weight-gradient backward) and B (whole backward, instead of I
and W). The devices are simulated. A free device runs the first of these actions that is allowed:

    I, B    as soon as the gradient has arrived, because other stages wait for the result; after F if `forward_first`
    F       if fewer than `most_waiting` micro-batches are between F and I (or B) on the stage, and memory suffices
    W       if no other action can begin within `patience` times the duration of the W, or memory is needed

Otherwise the device waits. Good values of `forward_first`, `most_waiting` and `patience` depend on times and memory, so
`order_search.py` tries several.

Example with K = 2 devices, M = 2 micro-batches and F = I = W = 1; the cell 1F0 is stage 1, action F, micro-batch 0:

                                           time    0   1   2   3   4   5   6
                                           dev. 0  0F0 0F1     0I0 0W0 0I1 0W1
                                           dev. 1      1F0 1I0 1F1 1I1 1W0 1W1

Memory is approximate. The caller checks the resulting order with the exact memory model.

Source: the heuristic of Qi et al. 2023 (arXiv:2401.10241), section 3.1, extended to any placement, times and limits.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import starmap
from math import inf
from typing import NamedTuple

from planner.core.schedule import Action, Letter
from planner.solve.orders.order_problem import OrderProblem

Act = tuple[int, Letter, int]

_action = lru_cache(maxsize=1 << 15)(Action)
"""Function that returns an action; much faster than the constructor if the action was made before."""

_ROUNDING = 1e-9
"""Relative rounding error of sums of times."""


class ActionOrder(NamedTuple):
    """Action order of every device, and its step time."""

    rows: list[list[Act]]
    """Stage, kind and micro-batch of each action, for each device."""
    period_us: float
    """Step time in microseconds, simulated as if transfers never kept the receiving device busy."""
    waits: list[list[bool]]
    """For each action of `rows`: true if the device waited before it."""
    slowest: int
    """Index of the device with the longest time from its first action to the start of the next step."""

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of each device, in order."""
        return tuple(tuple(starmap(_action, row)) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRules:
    """Rules by which a free device chooses its next action."""

    most_waiting: tuple[int, ...]
    """For each stage, the largest number of micro-batches between their F and their I."""
    patience: tuple[float, ...]
    """For each device, the longest wait for another action before it runs a W, as a multiple of the W's duration."""
    forward_first: bool
    """True to run F before I if both can run."""
    later_chunk_first: bool
    """True to prefer forwards of the device's last chunk; False to prefer forwards of its first chunk."""


def apply_rules(problem: OrderProblem, rules: DispatchRules, *, limit_us: float = inf) -> ActionOrder | None:
    """Return the action order that results from dispatch rules; None if it is too slow, or memory does not suffice.

    Args:
        problem: The stages with their times and memory.
        rules: The dispatch rules.
        limit_us: Longest allowed step time; the simulation stops when the order must exceed it.

    Complexity: O(S M (V + log S M)) for S stages, V stages per device, and M micro-batches.
    """
    return _RuleScheduler(problem, rules, limit_us).run()


def follow_order(
    problem: OrderProblem,
    preferred: Sequence[Sequence[Act]],
    *,
    lookahead: int,
    patience: float,
    limit_us: float = inf,
) -> ActionOrder | None:
    """Return an action order close to a preferred one; `patience` limits how long a device waits to keep that order.

    A free device runs the first of its next `lookahead` preferred actions that dependencies and memory allow, or waits.

    Args:
        problem: The stages with their times and memory.
        preferred: All actions of each device, in the preferred order; micro-batches of a stage ascend. A stage may run
            B for some micro-batches, and I and W for others.
        lookahead: Number of remaining preferred actions to choose from.
        patience: Limit on the time that a device waits for the input of an earlier preferred action, although it could
            run a later one. The limit is a multiple of the duration of the later action (for B: of the duration of I).
        limit_us: Longest allowed step time; the simulation stops when the order must exceed it.

    Returns:
        The order; None if it is too slow, or if memory does not suffice for all micro-batches.

    Complexity: O(S M (lookahead + log S M)) for S stages and M micro-batches.
    """
    return _OrderFollower(problem, preferred, lookahead=lookahead, patience=patience, limit_us=limit_us).run()


class _ListScheduler(ABC):
    """Simulation of all devices in one step. Subclasses choose the next action of a free device."""

    def __init__(self, problem: OrderProblem, limit_us: float) -> None:
        self.problem, self.num = problem, problem.micro_batches
        self.tables = tables = problem.tables
        num_stages, num_devices = len(problem.times), len(problem.stages_by_device)
        # Arrival times of the inputs of each stage's forwards and backwards, in the order of micro-batches.
        self.forwards: list[list[float]] = [[] for _ in range(num_stages)]
        self.gradients: list[list[float]] = [[] for _ in range(num_stages)]
        self.forwards[0] = [0.0] * self.num
        self.num_forwards, self.num_backwards = [0] * num_stages, [0] * num_stages
        self.left = [*tables.free_bytes]
        """Memory that is left on each device."""
        self.idle_us = [inf] * num_devices
        """Time that each device may still wait without exceeding the limit on the step time."""
        if limit_us < inf:
            self.idle_us = [limit_us * (1 + _ROUNDING) - busy_us for busy_us in tables.busy_us]

    def run(self) -> ActionOrder | None:
        choose, start, idle_us = self.choose, self.start, self.idle_us
        rows: list[list[Act]] = [[] for _ in idle_us]
        waits: list[list[bool]] = [[] for _ in idle_us]
        free_us, begins_us, links_us = [0.0] * len(rows), [0.0] * len(rows), [0.0] * len(rows) ** 2
        # The last stage sends the results of its forwards to itself.
        down = [*zip(self.tables.down, [*self.forwards[1:], self.gradients[-1]], strict=True)]
        up = [*zip(self.tables.up, [[], *self.gradients[:-1]], strict=True)]
        turns = [(0.0, self.tables.first_device)]
        while turns:
            now_us, device = heappop(turns)
            # A busy device gets another turn when it becomes free.
            act = choose(device, now_us) if now_us >= free_us[device] else None
            if act is None:
                continue
            stage, kind, _ = act
            end_us = now_us + start(device, act)
            row, waited_us = rows[device], now_us - free_us[device]
            if not row:
                begins_us[device] = now_us
            elif waited_us > 0:
                idle_us[device] -= waited_us
                if idle_us[device] < 0:
                    return None
            row.append(act)
            waits[device].append(waited_us > 0)
            free_us[device] = end_us
            heappush(turns, (end_us, device))
            if kind == "W":
                continue
            (other, link, send_us, blocking), arrivals = down[stage] if kind == "F" else up[stage]
            if link < 0:
                arrivals.append(end_us)
                continue  # the result stays on this device, which gets a turn when the action ends
            # A blocking link would keep the receiver busy. This simulation only delays the arrival.
            begin_us = end_us if blocking or end_us > links_us[link] else links_us[link]
            arrival_us = links_us[link] = begin_us + send_us
            arrivals.append(arrival_us)
            if arrival_us >= free_us[other]:
                heappush(turns, (arrival_us, other))  # otherwise the receiver gets a turn when it becomes free
        if not self.is_complete():
            return None
        spans_us = [
            end_us - begin_us + between_steps_us
            for end_us, begin_us, between_steps_us in zip(
                free_us, begins_us, self.problem.between_steps_us, strict=True
            )
        ]
        period_us = max(spans_us)
        return ActionOrder(rows, period_us, waits, spans_us.index(period_us))

    @abstractmethod
    def choose(self, device: int, now_us: float) -> Act | None:
        """Return the next action of a free device; None if the device waits."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Return True if all actions have run."""

    def start(self, device: int, act: Act) -> float:
        """Record the start of an action and its effect on memory; return the action's duration in microseconds."""
        tables, (stage, kind, micro_batch) = self.tables, act
        if kind == "F":
            self.num_forwards[stage] = micro_batch + 1
            self.left[device] -= tables.held_bytes[stage]
            return tables.durations_us["F"][stage]
        if kind == "W":
            self.left[device] += tables.deferred_bytes[stage]
            return tables.durations_us["W"][stage]
        self.num_backwards[stage] = micro_batch + 1
        self.left[device] += tables.held_bytes[stage]
        is_last = micro_batch == self.num - 1
        if kind == "I":
            self.left[device] -= tables.deferred_bytes[stage]
        else:
            self.idle_us[device] += (tables.last_saved_us if is_last else tables.saved_us)[stage]
        return (tables.last_durations_us if is_last else tables.durations_us)[kind][stage]


class _RuleScheduler(_ListScheduler):
    def __init__(self, problem: OrderProblem, rules: DispatchRules, limit_us: float) -> None:
        super().__init__(problem, limit_us)
        self.forward_first, self.most_waiting, self.patience = rules.forward_first, rules.most_waiting, rules.patience
        step = -1 if rules.later_chunk_first else 1
        self.forward_order = [stages[::step] for stages in problem.stages_by_device]
        self.waiting: list[deque[tuple[int, int]]] = [deque() for _ in problem.stages_by_device]
        """One queue per device: the pairs (stage, micro-batch) of all W that can run, oldest first."""

    def is_complete(self) -> bool:
        return min(self.num_backwards) == self.num and not any(self.waiting)

    def choose(self, device: int, now_us: float) -> Act | None:
        gradient, gradient_us = -1, inf
        for stage in self.problem.stages_by_device[device]:
            gradients, done = self.gradients[stage], self.num_backwards[stage]
            if done < len(gradients) and gradients[done] < gradient_us:
                gradient, gradient_us = stage, gradients[done]
        is_ready = gradient_us <= now_us
        if is_ready and not self.forward_first:
            return self._backward(device, gradient)
        forward, forward_us, is_full = self._next_forward(device, now_us)
        if forward_us <= now_us:
            return forward, "F", self.num_forwards[forward]
        if is_ready:
            return self._backward(device, gradient)
        if self.waiting[device]:
            (stage, micro_batch), next_us = self.waiting[device][0], min(gradient_us, forward_us)
            patience_us = self.patience[device] * self.tables.durations_us["W"][stage]
            if is_full or next_us - now_us >= patience_us:
                self.waiting[device].popleft()
                return stage, "W", micro_batch
        return None

    def _backward(self, device: int, stage: int) -> Act:
        micro_batch = self.num_backwards[stage]
        if self.problem.is_whole[stage]:
            return stage, "B", micro_batch
        self.waiting[device].append((stage, micro_batch))
        return stage, "I", micro_batch

    def _next_forward(self, device: int, now_us: float) -> tuple[int, float, bool]:
        # Return a stage of the device that may run a forward next, and the time at which its input arrives; -1 and
        # infinity if there is none. The third value is True if an input has arrived whose forward lacks memory.
        best, best_us, is_full = -1, inf, False
        for stage in self.forward_order[device]:
            forwards, done = self.forwards[stage], self.num_forwards[stage]
            if done == len(forwards) or done - self.num_backwards[stage] >= self.most_waiting[stage]:
                continue
            if self.left[device] < self.tables.spare_bytes[stage]:
                is_full = is_full or forwards[done] <= now_us
            elif best_us > now_us and forwards[done] < best_us:
                best, best_us = stage, forwards[done]
        return best, best_us, is_full


class _OrderFollower(_ListScheduler):
    def __init__(
        self,
        problem: OrderProblem,
        preferred: Sequence[Sequence[Act]],
        *,
        lookahead: int,
        patience: float,
        limit_us: float,
    ) -> None:
        super().__init__(problem, limit_us)
        self.remaining = [*map(list, preferred)]
        self.lookahead, self.patience = lookahead, patience

    def is_complete(self) -> bool:
        return not any(self.remaining)

    def choose(self, device: int, now_us: float) -> Act | None:
        preferred, next_us = self.remaining[device], inf
        for place, act in enumerate(preferred[: self.lookahead]):
            stage, kind, micro_batch = act
            if kind == "W":
                if micro_batch >= self.num_backwards[stage]:
                    continue
            else:
                is_forward = kind == "F"
                arrivals = (self.forwards if is_forward else self.gradients)[stage]
                done = (self.num_forwards if is_forward else self.num_backwards)[stage]
                if micro_batch != done or micro_batch >= len(arrivals):
                    continue
                if is_forward and self.left[device] < self.tables.spare_bytes[stage]:
                    continue
                arrival_us = arrivals[micro_batch]
                if arrival_us > now_us:
                    next_us = min(next_us, arrival_us)
                    continue
            if next_us < inf and next_us - now_us < self._patience_us(stage, kind):
                return None
            del preferred[place]
            return act
        return None

    def _patience_us(self, stage: int, kind: Letter) -> float:
        duration_us = self.tables.durations_us["I" if kind == "B" else kind][stage]
        return self.patience * duration_us if duration_us else 0.0


def split_backwards(row: Sequence[Act], is_whole: Sequence[bool]) -> list[Act]:
    """Return a device's actions with backwards split into I and W, except on stages for which `is_whole` is true."""
    actions: list[Act] = []
    for stage, kind, micro_batch in row:
        if kind == "F":
            actions.append((stage, kind, micro_batch))
        elif is_whole[stage] and kind != "W":
            actions.append((stage, "B", micro_batch))
        elif not is_whole[stage]:
            actions += [(stage, each, micro_batch) for each in (("I", "W") if kind == "B" else (kind,))]
    return actions
