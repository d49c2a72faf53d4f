"""List scheduling: compute an action order for given stages, by dispatch rules or from a preferred order.

Actions are F (forward), I (input-gradient backward), W (weight-gradient backward) and B (whole backward, instead of I
and W). The devices are simulated. A free device runs the first of these actions that is allowed:

    I, B    as soon as the gradient has arrived, because other stages wait for the result; after F if `forward_first`
    F       if fewer than `most_waiting` micro-batches are between F and I (or B) on the stage, and memory suffices
    W       if no other action can begin within `patience` times the duration of the W, or memory is needed

Otherwise the device waits. Good values depend on times and memory, so `order_search.py` tries several.

Example with K = 2 devices, M = 2 micro-batches and F = I = W = 1; the cell 1F0 is stage 1, action F, micro-batch 0:

                                           time    0   1   2   3   4   5   6
                                           dev. 0  0F0 0F1     0I0 0W0 0I1 0W1
                                           dev. 1      1F0 1I0 1F1 1I1 1W0 1W1

Memory is approximate: a micro-batch occupies one number of bytes between F and I, and another one between I and W, and
the running action occupies more. The caller checks the resulting order with the exact memory model.

Source: the heuristic of Qi et al. 2023 (arXiv:2401.10241), section 3.1, extended to any placement, times and limits.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from planner.core.schedule import Action, Letter
from planner.solve.orders.order_problem import OrderProblem

Act = tuple[int, Letter, int]

_ROUNDING = 1e-9
"""Relative rounding error of sums of times."""


class ActionOrder(NamedTuple):
    """Action order of every device, and its step time."""

    rows: list[list[Act]]
    """Stage, kind and micro-batch of each action, for each device."""
    period_us: float
    """Step time in microseconds if no transfer keeps the receiving device busy."""

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of each device, in order."""
        return tuple(tuple(Action(*act) for act in row) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRules:
    """Rules by which a free device chooses its next action."""

    most_waiting: tuple[int, ...]
    """For each stage, the largest number of micro-batches between their F and their I."""
    patience: tuple[float, ...]
    """For each device, the longest wait for another action before it runs a W, in durations of the W."""
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

    Complexity: O(S M (V + log S M)) for S stages, V per device, and M micro-batches.
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
    """Return an action order close to a preferred one, as far as dependencies and memory allow.

    A free device looks at its next `lookahead` preferred actions and runs the first one that can run. It waits instead
    if an earlier one of these actions can run soon.

    Args:
        problem: The stages with their times and memory.
        preferred: All actions of each device, in the preferred order; micro-batches of a stage ascend. A stage may run
            B for some micro-batches, and I and W for others.
        lookahead: Number of remaining preferred actions to choose from.
        patience: Time that an action waits for an earlier one, as a multiple of its own duration.
        limit_us: Longest allowed step time; the simulation stops when the order must exceed it.

    Returns:
        The order; None if it is too slow, or if memory does not suffice for all micro-batches.

    Complexity: O(S M (lookahead + log S M)) for S stages and M micro-batches.
    """
    return _OrderFollower(problem, preferred, lookahead=lookahead, patience=patience, limit_us=limit_us).run()


class _TooSlowError(Exception): ...


class _Route(NamedTuple):
    """Receiver and link of a stage's results, for one direction."""

    device: int
    """Device of the receiving stage."""
    link: int
    """Index of the link; -1 if the receiving stage is on the sender's device."""
    send_us: float
    blocking: bool


class _ListScheduler(ABC):
    """Simulation of all devices in one step. Subclasses choose the next action of a free device."""

    def __init__(self, problem: OrderProblem, limit_us: float) -> None:
        self.problem, self.times, self.footprints = problem, problem.times, problem.footprints
        num_stages, self.num = len(problem.times), problem.micro_batches
        self.rows: list[list[Act]] = [[] for _ in problem.stages_by_device]
        device = {stage: device for device, chunks in enumerate(problem.stages_by_device) for stage in chunks}
        self.free_us = [0.0] * len(problem.stages_by_device)
        self.begins_us = [0.0] * len(problem.stages_by_device)
        self.link_us = [0.0] * len(problem.stages_by_device) ** 2
        self.down = [self._route(device[s], device[s + 1], s) for s in range(num_stages - 1)]
        self.up = [self._route(device[s], device[s - 1], s - 1) for s in range(1, num_stages)]
        # Arrival times of the inputs of each stage's next F and next I, in the order of micro-batches.
        self.forwards: list[deque[float]] = [deque() for _ in range(num_stages)]
        self.gradients: list[deque[float]] = [deque() for _ in range(num_stages)]
        self.forwards[0].extend([0.0] * self.num)
        self.num_forwards, self.num_backwards = [0] * num_stages, [0] * num_stages
        self.waiting: list[deque[tuple[int, int]]] = [deque() for _ in problem.stages_by_device]
        """For each device, stage and micro-batch of every W that can run, oldest first."""
        footprints = problem.footprints
        # Memory for the largest running action and for one micro-batch of each later chunk is reserved. Otherwise the
        # first chunk could fill the device with micro-batches that can never continue.
        self.size = [max(footprint.held, footprint.between) for footprint in footprints]
        self.left = [
            limit - sum(footprints[s].always for s in chunks) - max(footprints[s].above for s in chunks)
            for limit, chunks in zip(problem.limits_bytes, problem.stages_by_device, strict=True)
        ]
        self.spare = [0.0] * num_stages
        for chunks in problem.stages_by_device:
            for place, stage in enumerate(chunks):
                self.spare[stage] = self.size[stage] + sum(self.size[s] for s in chunks[place + 1 :])
        self.idle_us = [inf] * len(problem.stages_by_device)
        """Time that each device may still wait within the limit on the step time."""
        if limit_us < inf:
            self.idle_us = [
                limit_us * (1 + _ROUNDING) - problem.busy_us(device) for device in range(len(problem.stages_by_device))
            ]
        self.turns: list[tuple[float, int]] = []

    def _route(self, device: int, other: int, boundary: int) -> _Route:
        times = self.times[boundary]
        link = -1 if device == other else device * len(self.problem.stages_by_device) + other
        return _Route(other, link, times.send_us, times.blocking)

    def run(self) -> ActionOrder | None:
        turns, free_us = self.turns, self.free_us
        turns.append((0.0, next(device for device, chunks in enumerate(self.problem.stages_by_device) if 0 in chunks)))
        try:
            while turns:
                now_us, device = heappop(turns)
                # A busy device has another turn when it becomes free.
                if now_us >= free_us[device]:
                    self.turn(device, now_us)
        except _TooSlowError:
            return None
        if min(self.num_backwards) < self.num or any(self.waiting):
            return None
        spans = zip(free_us, self.begins_us, self.problem.own_us, strict=True)
        return ActionOrder(self.rows, max(free_us - begin_us + own_us for free_us, begin_us, own_us in spans))

    @abstractmethod
    def turn(self, device: int, now_us: float) -> None: ...

    def forward(self, device: int, stage: int, now_us: float) -> None:
        micro_batch = self.num_forwards[stage]
        self.num_forwards[stage] += 1
        self.forwards[stage].popleft()
        self.left[device] -= self.size[stage]
        end_us = self.start(device, (stage, "F", micro_batch), now_us, self.times[stage].forward_us)
        if stage < len(self.down):
            self.send(self.down[stage], end_us, self.forwards[stage + 1])
        else:
            self.gradients[stage].append(end_us)

    def backward(self, device: int, stage: int, now_us: float, *, is_whole: bool) -> None:
        times, micro_batch = self.times[stage], self.num_backwards[stage]
        is_last = micro_batch == self.num - 1
        self.num_backwards[stage] += 1
        self.gradients[stage].popleft()
        self.left[device] += self.size[stage]
        input_us = times.last_input_backward_us if is_last else times.input_backward_us
        if is_whole:
            duration_us = times.last_backward_us if is_last else times.backward_us
            if not self.problem.is_whole[stage]:
                self.idle_us[device] += input_us + times.weight_backward_us - duration_us
            end_us = self.start(device, (stage, "B", micro_batch), now_us, duration_us)
        else:
            self.left[device] -= self.footprints[stage].between
            self.waiting[device].append((stage, micro_batch))
            end_us = self.start(device, (stage, "I", micro_batch), now_us, input_us)
        if stage > 0:
            self.send(self.up[stage - 1], end_us, self.gradients[stage - 1])

    def weight_backward(self, device: int, stage: int, micro_batch: int, now_us: float) -> None:
        self.left[device] += self.footprints[stage].between
        self.start(device, (stage, "W", micro_batch), now_us, self.times[stage].weight_backward_us)

    def start(self, device: int, act: Act, now_us: float, duration_us: float) -> float:
        row, waited_us = self.rows[device], now_us - self.free_us[device]
        if not row:
            self.begins_us[device] = now_us
        elif waited_us > 0:
            self.idle_us[device] -= waited_us
            if self.idle_us[device] < 0:
                raise _TooSlowError
        row.append(act)
        end_us = self.free_us[device] = now_us + duration_us
        heappush(self.turns, (end_us, device))
        return end_us

    def send(self, route: _Route, end_us: float, arrivals: deque[float]) -> None:
        other, link, send_us, blocking = route
        if link < 0:
            arrivals.append(end_us)
            return  # the sender itself needs the result, and has a turn when its action ends
        # A blocking link would keep the receiver busy. This simulation only delays the arrival.
        begin_us = end_us if blocking or end_us > self.link_us[link] else self.link_us[link]
        arrival_us = self.link_us[link] = begin_us + send_us
        arrivals.append(arrival_us)
        if arrival_us >= self.free_us[other]:
            heappush(self.turns, (arrival_us, other))  # otherwise the receiver has a turn when it becomes free


class _RuleScheduler(_ListScheduler):
    def __init__(self, problem: OrderProblem, rules: DispatchRules, limit_us: float) -> None:
        super().__init__(problem, limit_us)
        self.forward_first, self.most_waiting, self.patience = rules.forward_first, rules.most_waiting, rules.patience
        step = -1 if rules.later_chunk_first else 1
        self.forward_order = [stages[::step] for stages in problem.stages_by_device]

    def turn(self, device: int, now_us: float) -> None:
        gradient, gradient_us = -1, inf
        for stage in self.problem.stages_by_device[device]:
            gradients = self.gradients[stage]
            if gradients and gradients[0] < gradient_us:
                gradient, gradient_us = stage, gradients[0]
        is_ready = gradient_us <= now_us
        if is_ready and not self.forward_first:
            self.backward(device, gradient, now_us, is_whole=self.problem.is_whole[gradient])
            return
        forward, forward_us, is_full = self._next_forward(device, now_us)
        if forward_us <= now_us:
            self.forward(device, forward, now_us)
        elif is_ready:
            self.backward(device, gradient, now_us, is_whole=self.problem.is_whole[gradient])
        elif self.waiting[device]:
            waiting, next_us = self.waiting[device], min(gradient_us, forward_us)
            patience_us = self.patience[device] * self.times[waiting[0][0]].weight_backward_us
            if is_full or next_us - now_us >= patience_us:
                self.weight_backward(device, *waiting.popleft(), now_us)

    def _next_forward(self, device: int, now_us: float) -> tuple[int, float, bool]:
        # Return a stage of the device that may run a forward next, and the time at which its input arrives; -1 and
        # infinity if there is none. The third value is True if an input has arrived whose forward lacks memory.
        best, best_us, is_full = -1, inf, False
        for stage in self.forward_order[device]:
            forwards = self.forwards[stage]
            if not forwards or self.num_forwards[stage] - self.num_backwards[stage] >= self.most_waiting[stage]:
                continue
            if self.left[device] < self.spare[stage]:
                is_full = is_full or forwards[0] <= now_us
            elif best_us > now_us and forwards[0] < best_us:
                best, best_us = stage, forwards[0]
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

    def turn(self, device: int, now_us: float) -> None:
        preferred, next_us = self.remaining[device], inf
        for place in range(min(self.lookahead, len(preferred))):
            stage, kind, micro_batch = preferred[place]
            arrival_us = self._arrival_us(device, stage, kind, micro_batch)
            if arrival_us > now_us:
                next_us = min(next_us, arrival_us)
                continue
            if next_us < inf and next_us - now_us < self._patience_us(stage, kind):
                return
            del preferred[place]
            if kind == "F":
                self.forward(device, stage, now_us)
            elif kind == "W":
                self.waiting[device].remove((stage, micro_batch))
                self.weight_backward(device, stage, micro_batch, now_us)
            else:
                self.backward(device, stage, now_us, is_whole=kind == "B")
            return

    def _patience_us(self, stage: int, kind: Letter) -> float:
        times = self.times[stage]
        duration_us = {"F": times.forward_us, "W": times.weight_backward_us}.get(kind, times.input_backward_us)
        return self.patience * duration_us if duration_us else 0.0

    def _arrival_us(self, device: int, stage: int, kind: Letter, micro_batch: int) -> float:
        if kind == "W":
            return 0.0 if (stage, micro_batch) in self.waiting[device] else inf
        if kind == "F":
            arrivals, done = self.forwards[stage], self.num_forwards[stage]
            if self.left[device] < self.spare[stage]:
                return inf
        else:
            arrivals, done = self.gradients[stage], self.num_backwards[stage]
        return arrivals[0] if arrivals and micro_batch == done else inf


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
