"""What every device does, one thing after the other, made for these stages: list scheduling by a few rules.

Devices are followed through time. Whenever one is free it takes, of what has arrived, the first that is allowed:

    I    as soon as its gradient is there: others wait for it (but under `forward_first` after a forward)
    F    if fewer micro-batches than `most_waiting` wait on the stage, and memory is left for it
    W    if nothing else arrives within `patience` of what it takes, or memory is needed

Until then it waits. Which rules are good depends on times and memory: `order_search.py` tries them out.

    K = 2, M = 2, F = I = W = 1            time    0   1   2   3   4   5   6
                                           dev. 0  0F0 0F1     0I0 0W0 0I1 0W1
                                           dev. 1      1F0 1I0 1F1 1I1 1W0 1W1

Memory is counted as the law has it (`planner.core.cost.moments`), roughly: a micro-batch takes what is held between F
and I, then what is held between I and W, and what runs takes what is above that at most. The lists are held against the
law itself afterwards.

Source: the heuristic of Qi et al. 2023 (arXiv:2401.10241), section 3.1, for any placement, times and caps.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from planner.core.cost.moments import BACKWARDS, FORWARDS, INPUT_BACKWARDS, PARTS, WEIGHT_BACKWARDS
from planner.core.cost.simulate import StageTimes
from planner.core.schedule import Action, Letter
from planner.solve.space.arrays import FloatArray

Act = tuple[int, Letter, int]


class StageFootprint(NamedTuple):
    """What a stage takes of its device's memory, in bytes, roughly."""

    always: float
    """Whatever runs: parameters, gradients, buffers of transfers."""
    held: float
    """A micro-batch between F and I."""
    between: float
    """A micro-batch between I and W."""
    above: float
    """What runs, at most above what its micro-batch holds otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderProblem:
    """Stages on their devices, of which every micro-batch passes each by F, I and W, or by F and B."""

    chunks: tuple[tuple[int, ...], ...]
    """Per device its stages, in the order of the chain."""
    micro_batches: int
    """M."""
    times: tuple[StageTimes, ...]
    """Per stage."""
    footprints: tuple[StageFootprint, ...]
    """Per stage."""
    is_whole: tuple[bool, ...]
    """Per stage, whether its backwards run in one piece: then nothing is held between halves."""
    limits_bytes: tuple[float, ...]
    """Per device."""
    own_us: tuple[float, ...]
    """Per device, what it does between two steps; all that replicas sum counts here."""


class ActionOrder(NamedTuple):
    """What every device does, and how long it takes."""

    rows: list[list[Act]]
    """Per device: stage, kind, micro-batch."""
    period_us: float
    """From step to step, as `planner.core.cost.simulate.period_us`, but that no link blocks."""

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """The rows as a schedule has them."""
        return tuple(tuple(Action(*act) for act in row) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRules:
    """How a device chooses."""

    most_waiting: tuple[int, ...]
    """Per stage, how many micro-batches may be between its F and its I."""
    patience: tuple[float, ...]
    """Per device, for how much of its own time a W waits for something better."""
    forward_first: bool
    """Whether a forward comes before an I that has arrived, too."""
    later_chunk_first: bool
    """Which of a device's forwards comes first."""


def footprint_of(always: float, parts: FloatArray, *, is_whole: bool) -> StageFootprint:
    """What a stage takes.

    Args:
        always: Bytes that are there whatever runs.
        parts: Bytes of each of `planner.core.cost.moments.PARTS`.
        is_whole: Whether its backwards run in one piece.
    """
    part = dict(zip(PARTS, parts.tolist(), strict=True))
    held = max(part["held"], part["kept"])
    between = 0.0 if is_whole else part["weight_held"]
    backwards = (*BACKWARDS, "message") if is_whole else INPUT_BACKWARDS
    running = max(part[name] for name in (*FORWARDS, *backwards))
    weight = 0.0 if is_whole else max(part[name] for name in (*WEIGHT_BACKWARDS, "weight_message"))
    transfers = part["input"] + part["output_gradient"] + part["input_gradient"]
    return StageFootprint(
        always=always + part["gradients"] + part["casts"] + transfers,
        held=held,
        between=between,
        above=max(0.0, running - held, weight - between),
    )


def apply_rules(problem: OrderProblem, rules: DispatchRules) -> ActionOrder | None:
    """The lists that the rules make; None where memory does not let all micro-batches through.

    Complexity: O(S M (V + log S M)).
    """
    return _RuleScheduler(problem, rules).run()


def follow_order(
    problem: OrderProblem, preferred: Sequence[Sequence[Act]], *, lookahead: int, patience: float
) -> ActionOrder | None:
    """The lists of devices that follow wishes as far as arrivals and memory let them.

    A free device takes the first of its wishes that it can run: not only the next one, but for this it waits if it is
    known to arrive within `patience` of what would be run in its place.

    Args:
        problem: The stages.
        preferred: Per device all that it has to do, in an order; each stage's micro-batches one after the other.
        lookahead: Among how many of the wishes that are left it may choose.
        patience: For how much of its own time whatever would come first waits.

    Returns:
        None where memory does not let all micro-batches through.

    Complexity: O(S M (lookahead + log S M)).
    """
    return _OrderFollower(problem, preferred, lookahead, patience).run()


class _ListScheduler(ABC):
    """Devices as they go through a step."""

    def __init__(self, problem: OrderProblem) -> None:
        self.problem = problem
        num_stages, self.num = len(problem.times), problem.micro_batches
        self.rows: list[list[Act]] = [[] for _ in problem.chunks]
        self.num_done = 0
        self.device = [0] * num_stages
        for device, chunks in enumerate(problem.chunks):
            for stage in chunks:
                self.device[stage] = device
        self.free_us = [0.0] * len(problem.chunks)
        self.begins_us = [0.0] * len(problem.chunks)
        self.link_us: dict[tuple[int, int], float] = {}
        # When the next forward and gradient of each stage arrive, in the order of micro-batches.
        self.forwards: list[deque[float]] = [deque() for _ in range(num_stages)]
        self.gradients: list[deque[float]] = [deque() for _ in range(num_stages)]
        self.forwards[0].extend([0.0] * self.num)
        self.num_forwards, self.num_inputs, self.num_weights = [0] * num_stages, [0] * num_stages, [0] * num_stages
        self.waiting: list[deque[int]] = [deque() for _ in problem.chunks]
        """Per device the stages whose W may run, by age."""
        footprints = problem.footprints
        # Of what a device has, the most that may run is set aside, and a place for one micro-batch in each later chunk:
        # without it the first chunk could fill the device with micro-batches that can never go on.
        self.size = [max(each.held, each.between) for each in footprints]
        self.left = [
            limit - sum(footprints[s].always for s in chunks) - max(footprints[s].above for s in chunks)
            for limit, chunks in zip(problem.limits_bytes, problem.chunks, strict=True)
        ]
        self.spare = [0.0] * num_stages
        for chunks in problem.chunks:
            for place, stage in enumerate(chunks):
                self.spare[stage] = self.size[stage] + sum(self.size[s] for s in chunks[place + 1 :])
        self.turns: list[tuple[float, int]] = []

    def run(self) -> ActionOrder | None:
        """Follows all devices until nothing happens any more; None if something is left to do."""
        heappush(self.turns, (0.0, self.device[0]))
        while self.turns:
            now_us, device = heappop(self.turns)
            # Whoever has become busy meanwhile is woken when it is free.
            if now_us >= self.free_us[device]:
                self.turn(device, now_us)
        if self.num_done < self.num * sum(2 if whole else 3 for whole in self.problem.is_whole):
            return None
        spans = zip(self.free_us, self.begins_us, self.problem.own_us, strict=True)
        return ActionOrder(self.rows, max(free_us - begin_us + own_us for free_us, begin_us, own_us in spans))

    @abstractmethod
    def turn(self, device: int, now_us: float) -> None:
        """Runs something on a free device, or waits."""

    def forward(self, device: int, stage: int, now_us: float) -> None:
        """F of the stage's next micro-batch."""
        micro_batch = self.num_forwards[stage]
        self.num_forwards[stage] += 1
        self.forwards[stage].popleft()
        self.left[device] -= self.size[stage]
        end_us = self.start(device, (stage, "F", micro_batch), now_us, self.problem.times[stage].forward_us)
        if stage + 1 < len(self.device):
            self.send(stage, stage + 1, end_us, self.forwards)
        else:
            self.gradients[stage].append(end_us)

    def input_backward(self, device: int, stage: int, now_us: float) -> None:
        """I of the stage's next micro-batch."""
        if self.problem.is_whole[stage]:
            self.backward(device, stage, now_us)
            return
        times, micro_batch = self.problem.times[stage], self.num_inputs[stage]
        self.num_inputs[stage] += 1
        self.gradients[stage].popleft()
        self.left[device] += self.size[stage] - self.problem.footprints[stage].between
        is_last = micro_batch == self.num - 1
        duration_us = times.last_input_backward_us if is_last else times.input_backward_us
        self.waiting[device].append(stage)
        end_us = self.start(device, (stage, "I", micro_batch), now_us, duration_us)
        if stage > 0:
            self.send(stage, stage - 1, end_us, self.gradients)

    def backward(self, device: int, stage: int, now_us: float) -> None:
        """Both halves in one piece."""
        times, micro_batch = self.problem.times[stage], self.num_inputs[stage]
        self.num_inputs[stage] += 1
        self.num_weights[stage] += 1
        self.gradients[stage].popleft()
        self.left[device] += self.size[stage]
        duration_us = times.last_backward_us if micro_batch == self.num - 1 else times.backward_us
        end_us = self.start(device, (stage, "B", micro_batch), now_us, duration_us)
        if stage > 0:
            self.send(stage, stage - 1, end_us, self.gradients)

    def weight_backward(self, device: int, stage: int, now_us: float) -> None:
        """W of the stage's next micro-batch."""
        micro_batch = self.num_weights[stage]
        self.num_weights[stage] += 1
        self.left[device] += self.problem.footprints[stage].between
        self.start(device, (stage, "W", micro_batch), now_us, self.problem.times[stage].weight_backward_us)

    def start(self, device: int, act: Act, now_us: float, duration_us: float) -> float:
        """Puts an act into the device's list; when it ends."""
        if not self.rows[device]:
            self.begins_us[device] = now_us
        self.rows[device].append(act)
        self.num_done += 1
        end_us = self.free_us[device] = now_us + duration_us
        heappush(self.turns, (end_us, device))
        return end_us

    def send(self, stage: int, target: int, end_us: float, arrivals: Sequence[deque[float]]) -> None:
        """Moves what a stage made to where it is needed."""
        device, other = self.device[stage], self.device[target]
        arrival_us = end_us
        if device != other:
            times = self.problem.times[min(stage, target)]
            # A link that blocks keeps its receiver busy; here it is taken to be a late arrival.
            begin_us = end_us if times.blocking else max(end_us, self.link_us.get((device, other), 0.0))
            arrival_us = self.link_us[device, other] = begin_us + times.send_us
        arrivals[target].append(arrival_us)
        heappush(self.turns, (arrival_us, other))


class _RuleScheduler(_ListScheduler):
    """Devices that choose by rules."""

    def __init__(self, problem: OrderProblem, rules: DispatchRules) -> None:
        super().__init__(problem)
        self.rules = rules
        self.forward_order = [chunks[::-1] if rules.later_chunk_first else chunks for chunks in problem.chunks]

    def turn(self, device: int, now_us: float) -> None:
        gradient, gradient_us = self._next_gradient(device)
        forward, forward_us, is_full = self._next_forward(device, now_us)
        if gradient_us <= now_us and not (self.rules.forward_first and forward_us <= now_us):
            self.input_backward(device, gradient, now_us)
        elif forward_us <= now_us:
            self.forward(device, forward, now_us)
        else:
            next_us = min(gradient_us, forward_us)
            waiting = self.waiting[device]
            if waiting:
                patience_us = self.rules.patience[device] * self.problem.times[waiting[0]].weight_backward_us
                if is_full or next_us - now_us >= patience_us:
                    self.weight_backward(device, waiting.popleft(), now_us)
                    return
            if next_us < inf:
                heappush(self.turns, (next_us, device))

    def _next_gradient(self, device: int) -> tuple[int, float]:
        best, best_us = -1, inf
        for stage in self.problem.chunks[device]:
            gradients = self.gradients[stage]
            if gradients and gradients[0] < best_us:
                best, best_us = stage, gradients[0]
        return best, best_us

    def _next_forward(self, device: int, now_us: float) -> tuple[int, float, bool]:
        """Stage and arrival of the next forward that may run, and whether one is held back by memory alone."""
        best, best_us, is_full = -1, inf, False
        for stage in self.forward_order[device]:
            forwards = self.forwards[stage]
            if not forwards or self.num_forwards[stage] - self.num_inputs[stage] >= self.rules.most_waiting[stage]:
                continue
            if self.left[device] < self.spare[stage]:
                is_full = is_full or forwards[0] <= now_us
            elif best_us > now_us and forwards[0] < best_us:
                best, best_us = stage, forwards[0]
        return best, best_us, is_full


class _OrderFollower(_ListScheduler):
    """Devices that follow an order as far as they can."""

    def __init__(
        self, problem: OrderProblem, preferred: Sequence[Sequence[Act]], lookahead: int, patience: float
    ) -> None:
        super().__init__(problem)
        self.remaining = [list(_split_backwards(row, problem.is_whole)) for row in preferred]
        self.lookahead, self.patience = lookahead, patience

    def turn(self, device: int, now_us: float) -> None:
        preferred, next_us = self.remaining[device], inf
        for place in range(min(self.lookahead, len(preferred))):
            stage, kind, micro_batch = preferred[place]
            arrival_us = self._arrival_us(device, stage, kind, micro_batch)
            if arrival_us > now_us:
                next_us = min(next_us, arrival_us)
                continue
            times = self.problem.times[stage]
            durations = {"F": times.forward_us, "I": times.input_backward_us, "W": times.weight_backward_us}
            if next_us - now_us < self.patience * durations[kind]:
                break
            del preferred[place]
            if kind == "F":
                self.forward(device, stage, now_us)
            elif kind == "I":
                self.input_backward(device, stage, now_us)
            else:
                self.waiting[device].remove(stage)
                self.weight_backward(device, stage, now_us)
            return
        if next_us < inf:
            heappush(self.turns, (next_us, device))

    def _arrival_us(self, device: int, stage: int, kind: Letter, micro_batch: int) -> float:
        """When it can run; infinite as long as nobody knows."""
        if kind == "W":
            ready = micro_batch == self.num_weights[stage] and micro_batch < self.num_inputs[stage]
            return 0.0 if ready else inf
        if kind == "I":
            arrivals, done = self.gradients[stage], self.num_inputs[stage]
        else:
            arrivals, done = self.forwards[stage], self.num_forwards[stage]
            if self.left[device] < self.spare[stage]:
                return inf
        return arrivals[0] if arrivals and micro_batch == done else inf


def _split_backwards(row: Sequence[Act], is_whole: Sequence[bool]) -> Iterator[Act]:
    """Wishes with I for all that gradients wait for, and a W behind it where there was none; without W in one piece."""
    for stage, kind, micro_batch in row:
        if kind != "W" or not is_whole[stage]:
            yield stage, "I" if kind == "B" else kind, micro_batch
        if kind == "B" and not is_whole[stage]:
            yield stage, "W", micro_batch
