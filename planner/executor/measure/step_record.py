"""What a step took, as whoever keeps a record of the training is told it: TensorBoard, say."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from planner.executor.run.random_state import HostStates, OwnStates


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of the whole job."""

    step: int
    """Counted from 0 since training began, also in an earlier process."""
    loss: float
    """Mean over the mini-batch, that of all replicas."""
    step_us: float
    """From the first forward to the end of the optimizer's step, by the clock of rank 0."""
    samples: int
    """How many the mini-batch had, over all replicas."""
    learning_rates: tuple[float, ...]
    """One per parameter group of the optimizers that `Pipeline.optimizer` made, as the step was taken with."""
    skipped: bool
    """Whether gradients overflowed (`fp16-mixed`), so that the step changed nothing."""

    @property
    def seconds(self) -> float:
        """The step's time in seconds."""
        return self.step_us / 1e6

    @property
    def samples_per_s(self) -> float:
        """Samples per second, over all replicas."""
        return self.samples / self.seconds


OnStep = Callable[[StepRecord], None]


class StepHook:
    """What the script gave to be called after every step, on one rank.

    What it draws must not part that rank's random states from those of the others: it draws from states of its own.
    """

    def __init__(self, on_step: OnStep, seed: int) -> None:
        self._on_step, self._states = on_step, OwnStates(HostStates.seeded(seed))

    def call(self, record: StepRecord) -> None:
        """Tells it a step."""
        with self._states:
            self._on_step(record)


def learning_rates(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[float, ...]:
    """The learning rates of all parameter groups, as they are now."""
    return tuple(float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group)
