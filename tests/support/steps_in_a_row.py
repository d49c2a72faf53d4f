"""Simulation of consecutive training steps, with which the period of a schedule is compared."""

from collections.abc import Sequence

from planner.core.cost.simulate import StageTimes
from planner.core.schedule import Action


def mean_period_us(
    actions: Sequence[Sequence[Action]],
    stages: Sequence[StageTimes],
    between_steps_us: Sequence[float],
    *,
    steps: int = 8,
) -> float:
    """Return the mean time from step to step in the second half of `steps` steps.

    A device begins its next step when its own work is done, whatever other devices do.

    Args:
        actions: Per device, its actions in order.
        stages: Per stage, its times.
        between_steps_us: Per device, what it does between two steps.
        steps: How many steps follow each other.
    """
    row = _Clocks(actions, stages, between_steps_us)
    ends = [row.run(step) for step in range(steps)]
    return (ends[-1] - ends[steps // 2 - 1]) / (steps - steps // 2)


class _Clocks:
    """Clocks of all devices and links."""

    def __init__(
        self, actions: Sequence[Sequence[Action]], stages: Sequence[StageTimes], between_steps_us: Sequence[float]
    ) -> None:
        self._actions, self._stages, self._between_steps_us = actions, stages, between_steps_us
        self._device_of = {action.stage: device for device, row in enumerate(actions) for action in row}
        self._last = max(action.micro_batch for row in actions for action in row)
        self._free = [0.0] * len(actions)
        self._link_free: dict[tuple[int, int], float] = {}
        self._sent: dict[tuple[int, bool, int, int], float] = {}

    def run(self, step: int) -> float:
        """Run one step; return when the last device has done its own work, too."""
        places = [0] * len(self._actions)
        while any(place < len(row) for place, row in zip(places, self._actions, strict=True)):
            before = list(places)
            for device, row in enumerate(self._actions):
                while places[device] < len(row) and self._runs(device, row[places[device]], step):
                    places[device] += 1
            assert places != before, "the lists wait for each other"
        self._free = [free + own for free, own in zip(self._free, self._between_steps_us, strict=True)]
        return max(self._free)

    def _runs(self, device: int, action: Action, step: int) -> bool:
        """Run an action; return False if what it waits for has not been sent."""
        is_forward = action.kind == "F"
        source = action.stage - 1 if is_forward else action.stage + 1
        if action.kind == "W" or not 0 <= source < len(self._stages):
            start = self._free[device]
        elif (step, is_forward, source, action.micro_batch) not in self._sent:
            return False
        else:
            boundary = self._stages[min(source, action.stage)]
            start = max(self._free[device], self._sent[step, is_forward, source, action.micro_batch])
            if boundary.blocking and self._device_of[source] != device:
                start += boundary.send_us
        self._free[device] = start + self._duration_us(action)
        if action.kind != "W":
            self._send(device, action, step)
        return True

    def _send(self, device: int, action: Action, step: int) -> None:
        target = action.stage + 1 if action.kind == "F" else action.stage - 1
        end = self._free[device]
        if 0 <= target < len(self._stages) and self._device_of[target] != device:
            boundary, link = self._stages[min(target, action.stage)], (device, self._device_of[target])
            if not boundary.blocking:
                end = max(end, self._link_free.get(link, 0.0)) + boundary.send_us
                self._link_free[link] = end
        self._sent[step, action.kind == "F", action.stage, action.micro_batch] = end

    def _duration_us(self, action: Action) -> float:
        stage, is_last = self._stages[action.stage], action.micro_batch == self._last
        match action.kind:
            case "F":
                return stage.forward_us
            case "B":
                return stage.last_backward_us if is_last else stage.backward_us
            case "I":
                return stage.last_input_backward_us if is_last else stage.input_backward_us
            case _:
                return stage.weight_backward_us
