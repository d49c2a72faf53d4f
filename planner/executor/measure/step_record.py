"""Record of one step, for loggers such as TensorBoard."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from planner.executor.run.random_state import HostStates, OwnStates


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Step of the whole job."""

    step: int
    """Index since training began, including earlier processes; from 0."""
    loss: float
    """Mean over the mini-batch of all replicas."""
    step_us: float
    """Time in microseconds from the first forward to the end of the optimizer's step, by the clock of rank 0."""
    samples: int
    """Samples of the mini-batch, over all replicas."""
    learning_rates: tuple[float, ...]
    """Learning rate of the step, for each parameter group of the optimizers that `Pipeline.optimizer` made."""
    skipped: bool
    """True if gradients overflowed (`fp16-mixed`), so that the step changed nothing."""

    @property
    def seconds(self) -> float:
        """Time of the step in seconds."""
        return self.step_us / 1e6

    @property
    def samples_per_s(self) -> float:
        """Samples per second, over all replicas."""
        return self.samples / self.seconds


OnStep = Callable[[StepRecord], None]


class StepHook:
    """Callback of the script after every step, on one rank.

    It draws from separate random states, so that this rank's states stay equal to those of other ranks.
    """

    def __init__(self, on_step: OnStep, seed: int) -> None:
        self._on_step, self._states = on_step, OwnStates(HostStates.seeded(seed))

    def call(self, record: StepRecord) -> None:
        """Call the script's function with a record."""
        with self._states:
            self._on_step(record)


def learning_rates(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[float, ...]:
    """Return the current learning rates of all parameter groups."""
    return tuple(float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group)
