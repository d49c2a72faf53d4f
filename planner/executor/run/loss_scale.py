"""Dynamic loss scaling for float16, equal on all stages.

Small gradients become zero in float16. The loss is therefore multiplied by a large scale, and the gradients are divided
by the scale. If any gradient of any stage is infinite or NaN, the scale was too large: no stage changes its parameters,
and all stages halve the scale. After many good steps in a row, they double it. The constants are those of
`torch.amp.GradScaler`, which handles one process only.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

_FIRST, _GROWTH, _BACKOFF = 2.0**16, 2.0, 0.5
_GOOD_STEPS = 2000


class LossScale:
    """Scale of the loss, with the same value on all ranks."""

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self._parameters = list(parameters)
        self._device = device
        self._good_steps = 0
        self.value = _FIRST

    def scale_existing_gradients(self) -> None:
        """Multiply existing gradients by the scale, because a backward will add scaled gradients to them."""
        for gradients in self._gradients_by_dtype():
            torch._foreach_mul_(gradients, self.value)

    def unscale_and_update(self) -> bool:
        """Divide the gradients by the scale, adapt the scale, and return True if all gradients are finite.

        Every rank must call this method. If a gradient of any stage is not finite, all stages drop all gradients, so
        that the optimizer does nothing.

        Returns:
            True if all gradients are finite; False if they were dropped.
        """
        bad = torch.zeros((), device=self._device)
        inverse = torch.full((), 1 / self.value, device=self._device)
        for gradients in self._gradients_by_dtype():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, bad, inverse)
        if dist.get_world_size() > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if float(bad):
            for parameter in self._parameters:
                parameter.grad = None
            self.value *= _BACKOFF
            self._good_steps = 0
            return False
        self._good_steps += 1
        if self._good_steps == _GOOD_STEPS:
            self.value *= _GROWTH
            self._good_steps = 0
        return True

    def state_dict(self) -> dict[str, float]:
        """Return the scale, and the number of steps since it last changed, for a checkpoint."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state that `state_dict` returned."""
        self.value, self._good_steps = float(state["value"]), int(state["good_steps"])

    def _gradients_by_dtype(self) -> Iterable[list[Tensor]]:
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self._parameters:
            if parameter.grad is not None:
                kinds.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        return kinds.values()
