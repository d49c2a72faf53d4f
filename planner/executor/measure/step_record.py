"""Record of one step, for callbacks of the script such as loggers for TensorBoard."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from planner.executor.run.random_state import HostRandomStates, SeparateRandomStates


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Loss, time and other values of one training step of the whole job."""

    step: int
    """Index of the step, from 0. A resumed run continues the count."""
    loss: float
    """Loss of the mini-batch, over all replicas."""
    step_us: float
    """Time in microseconds on rank 0, from the first forward to the end of the optimizer's step."""
    samples: int
    """Number of samples in the mini-batch, over all replicas."""
    learning_rates: tuple[float, ...]
    """Learning rate of the step, for each parameter group of the optimizers that `Pipeline.optimizer` made."""
    skipped: bool
    """True if gradients overflowed in float16 (`fp16-mixed`), so that the step changed no parameters."""

    @property
    def seconds(self) -> float:
        """Time of the step in seconds."""
        return self.step_us / 1e6

    @property
    def samples_per_s(self) -> float:
        """Samples per second, over all replicas."""
        return self.samples / self.seconds


OnStep = Callable[[StepRecord], None]


class StepCallback:
    """Callback of the script after every step, on one rank. Its random draws do not affect the run's."""

    def __init__(self, on_step: OnStep, seed: int) -> None:
        self._on_step, self._states = on_step, SeparateRandomStates(HostRandomStates.seeded(seed))

    def call(self, record: StepRecord) -> None:
        """Call the script's callback with the record of a step."""
        with self._states:
            self._on_step(record)


def learning_rates(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[float, ...]:
    """Return the current learning rates of all parameter groups."""
    return tuple(float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group)
