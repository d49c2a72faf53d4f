"""Find state that a checkpoint does not contain: Python numbers and random generators of the model and its optimizer.

A plain loop that saves `state_dict()` loses this state as well. A resumed run would then differ from an uninterrupted
run, so a warning names it.
"""

from collections.abc import Sequence

import torch

from planner.executor.run.stage_module import StageModule
from planner.model.python_state import NUMBERS, numbers_in_attributes, without_leftover_tensors


class UnsavedState:
    """Numbers in plain attributes of this rank's modules and optimizer.

    Create it before the first step.
    """

    def __init__(self, modules: Sequence[StageModule], optimizer: torch.optim.Optimizer) -> None:
        self._modules = {path: module for stage in modules for path, module in stage.finished_modules().items()}
        self._optimizer = optimizer
        self._at_start = numbers_in_attributes(self._modules)
        self._numbers: dict[str, float] | None = None

    def changed(self) -> list[str]:
        """Return the names of numbers that changed since the previous call; nothing at the first call.

        The first forward may fill caches, so call this method after the first step and after a later step.
        """
        own = vars(self._optimizer).items()
        numbers = without_leftover_tensors(numbers_in_attributes(self._modules), self._at_start)
        numbers |= {f"{type(self._optimizer).__name__}.{name}": n for name, n in own if isinstance(n, NUMBERS)}
        before, self._numbers = self._numbers, numbers
        if before is None:
            return []
        return [name for name, number in numbers.items() if number != before.get(name)]
