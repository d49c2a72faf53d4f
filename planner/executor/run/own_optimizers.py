"""Refuse optimizers of the pipeline's parameters that `pipeline.optimizer` has not made.

The steps of such an optimizer are not checked. It may clip by the norm of one rank's gradients, for example.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from planner.core.errors import UsageError


class OwnOptimizers:
    """Check of every `step()` in the script: the optimizer must be made by `pipeline.optimizer`.

    Args:
        parameters: Parameters that no other optimizer may have.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._ids = {id(parameter) for parameter in parameters}
        self._is_paused = False
        held = ref(self)

        def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            own = held()
            if own is not None:
                own._check(optimizer)

        self.remove = register_optimizer_step_pre_hook(check).remove
        """Function that ends the check."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Allow the steps of all optimizers in the `with` block.

        The block runs layers, or builds or steps an optimizer of `pipeline.optimizer`. Layers may have optimizers,
        which the equivalence check has compared. An optimizer of `pipeline.optimizer` may call other optimizers.
        """
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_paused or not any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"]):
            return
        raise UsageError(
            f"`pipeline.optimizer` has not made this {type(optimizer).__name__}: each rank has only some of the "
            "parameters, and steps of this optimizer are not checked",
            hint="build the optimizer, with all optimizers in it, in the function passed to `pipeline.optimizer` "
            f"(`optimizer = pipeline.optimizer(lambda parameters: {type(optimizer).__name__}(parameters))`), and call "
            "only its `step()`",
        )
