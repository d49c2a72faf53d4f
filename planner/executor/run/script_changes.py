"""Find changes of weights or gradients that depend on the parameters of one rank.

If a script computes the norm of the gradients, each rank gets only the norm over its own parameters, so the ranks would
do different things. Each rank therefore records what the script did in a step, and the next rank compares the record
with its own (`agreement`). To save time and memory, only a few elements of a few parameters are compared.

A script must not draw random numbers while it changes weights or gradients: a plain loop would draw other numbers.
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from planner.core.errors import TrainingError, UsageError
from planner.executor.run.random_state import checksum_of_generators
from planner.model.layout import in_memory_order

_NUM_PARAMETERS = 8
"""Number of parameters that are compared."""
_NUM_ELEMENTS = 8
"""Number of elements of a parameter that are compared."""
_ROUNDING = 1e-4
"""Largest relative rounding error of a factor in float32."""
_ROUNDING_OF_SUMS = 1e-2
"""Largest relative rounding error of `ScriptChanges.added_factor`, which is computed from differences of weights."""
_SMALL = 1e-3
"""Elements below this share of the largest element are ignored when a factor of `ScriptChanges` is computed."""

_HINT = (
    "decide by values that all ranks have: the loss, or the norm that `pipeline.clip_gradients(max_norm)` returns "
    "(with `math.inf`, it does not clip)"
)


class ScriptChanges(NamedTuple):
    """Changes that the training script has made to weights, gradients and learning rates on one rank."""

    optimizer_steps: int = 0
    """Number of calls of `step()` of all optimizers."""
    options: int = 0
    """Checksum of the learning rates and other options in the calls of `step()`."""
    gradient_factor: float = 0.0
    """Number c if the script computed `gradient *= c` for all parameters in the last step; else 0."""
    added_factor: float = 0.0
    """Number c if the script computed `weight += c * gradient` for all parameters in the last step; else 0."""
    weight_factor: float = 0.0
    """Number c if the script computed `weight *= c` for all parameters after the last step; else 0."""


NO_CHANGES: Final = ScriptChanges()

_FACTORS = {
    "gradient_factor": "multiplied the gradients of its parameters by another number",
    "added_factor": "added another multiple of the gradients to its parameters",
    "weight_factor": "multiplied its parameters by another number",
}


class ScriptChangeRecorder:
    """Recorder of the script's changes to weights, gradients and learning rates of this rank's parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._compared: list[Tensor] = []
        self._at_begin = self._at_mark = _Elements.of([])
        self._at_optimizer_step: _Elements | None = None
        self._at_optimizer_end: _Elements | None = None
        self._random = 0
        self._has_batch = False  # from `Pipeline.batches`, for the next step
        self._ratios: dict[str, float] = {}
        """Ratio of this rank's factor to the previous rank's, for each factor in `ScriptChanges`.

        A ratio is computed once, in the first step in which both factors are not 0.
        """
        self.changes = NO_CHANGES

    def begin_block(self) -> None:
        """Store weights and gradients before the script can change them."""
        trained = [parameter for parameter in self._parameters if parameter.grad is not None]
        self._compared = trained[:: len(trained) // _NUM_PARAMETERS + 1]
        self._at_optimizer_step = self._at_optimizer_end = None
        self.ignore_random_draws()
        self._at_begin = self._at_mark

    def begin_optimizer_step(self, options: Sequence[float]) -> None:
        """Record a step of an optimizer. Its `options`, such as learning rates, must be equal on all ranks."""
        self.check_random_draws()
        if self._at_optimizer_step is None:
            self._at_optimizer_step = _Elements.of(self._compared)
        count, checksum = self.changes.optimizer_steps + 1, zlib.crc32(repr(options).encode(), self.changes.options)
        self.changes = self.changes._replace(optimizer_steps=count, options=checksum)

    def end_optimizer_step(self) -> None:
        """Store weights and gradients after the step of an optimizer."""
        self.ignore_random_draws()
        self._at_optimizer_end = self._at_mark

    def end_block(self) -> None:
        """End the script's `with pipeline.step(...)` block."""
        self.check_random_draws()
        self.ignore_random_draws()

    def begin_batch(self) -> None:
        """Store weights and random states for `check_before_step`. Call this before the script gets a mini-batch."""
        self.ignore_random_draws()
        self._has_batch = True

    def check_before_step(self) -> None:
        """Raise a `UsageError` if the script has drawn random numbers and changed weights since `begin_batch`."""
        if self._has_batch:
            self.check_random_draws(weights_only=True)
        self._has_batch = False

    def end_step(self) -> None:
        """Record how the script changed gradients and weights before and after the optimizer's step."""
        before, after = self._at_begin, self._at_optimizer_step or _Elements.of(self._compared)
        self.changes = self.changes._replace(
            gradient_factor=before.common_factor(before.gradients, after.gradients),
            added_factor=before.common_factor(
                before.gradients, after.weights - before.weights, rounding=_ROUNDING_OF_SUMS
            ),
        )
        if self._at_optimizer_end is not None:
            before, after = self._at_optimizer_end, _Elements.of(self._compared)
            self.changes = self.changes._replace(weight_factor=before.common_factor(before.weights, after.weights))
            self._at_optimizer_end = None

    def ignore_random_draws(self) -> None:
        """Let the next `check_random_draws` ignore the random numbers that the script has drawn so far."""
        self._at_mark = _Elements.of(self._compared)
        self._random = checksum_of_generators()

    def check_random_draws(self, *, weights_only: bool = False) -> None:
        """Raise a `UsageError` if the script has drawn random numbers and changed weights or gradients."""
        random, self._random = self._random, checksum_of_generators()
        if random == self._random:
            return
        now = _Elements.of(self._compared)
        if self._at_mark.is_equal(now._replace(gradients=self._at_mark.gradients) if weights_only else now):
            return
        hint = (
            "draw the numbers for a parameter from a generator of its own: "
            '`torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{step} {name}".encode()))`'
        )
        if weights_only:  # the script may draw the numbers for its data, and change weights by a rule
            hint = f"change weights in the block of `with pipeline.step(…)`. If it needs random numbers, {hint}"
        raise UsageError(
            "the script draws random numbers while it changes weights or gradients: each rank has only some of the "
            "parameters, and draws other numbers for them than a plain loop",
            hint=hint,
        )

    def compare(self, other: ScriptChanges, rank: int, previous: int) -> None:
        """Compare the record of this rank with that of the previous rank.

        Raises:
            TrainingError: The script has changed weights, gradients or learning rates differently on the two ranks.
        """
        own = self.changes
        if own.optimizer_steps != other.optimizer_steps:
            raise TrainingError(
                f"rank {rank} has called `optimizer.step()` {own.optimizer_steps} times, and rank {previous} "
                f"{other.optimizer_steps} times: the script skips steps depending on one rank's parameters",
                hint=_HINT,
            )
        if own.options != other.options:
            raise TrainingError(
                f"learning rates or other options of the optimizer differ between ranks {previous} and {rank} in "
                "`optimizer.step()`: the script seems to compute them from the parameters of one rank only",
                hint=_HINT,
            )
        rounding = max(_ROUNDING, *map(_rounding_of, (self._at_begin.weights, self._at_begin.gradients)))
        for name, action in _FACTORS.items():
            factor, others = getattr(own, name), getattr(other, name)
            if not factor or not others:
                continue
            # A ratio that does not change is no norm: a script may scale the gradients of the first layers by 0.1.
            first = self._ratios.setdefault(name, factor / others)
            largest = max(rounding, _ROUNDING_OF_SUMS) if name == "added_factor" else rounding
            if abs(factor / others - first) > 2 * largest * abs(first):
                raise TrainingError(
                    f"in the last step, the script on rank {rank} {action} than on rank {previous} ({factor:.4g} and "
                    f"{others:.4g}): it uses a norm over the parameters or gradients of one rank",
                    hint=_HINT,
                )


def numbers_in_options(groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[float]:
    """Return the numbers in the options `names` of parameter groups, without those in tensors of a GPU.

    Reading a tensor of a GPU would wait until the GPU has finished its work.
    """
    kinds = tuple, list  # a test with `tuple | list` takes several times as long
    options = [group.get(name) for name in names for group in groups]
    numbers = [n for option in options for n in (option if isinstance(option, kinds) else (option,))]
    return [float(n) for n in numbers if type(n) in (float, int) or _is_number(n)]


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.device.type == "cpu" and value.numel() == 1
    return isinstance(value, float | int)


class _Elements(NamedTuple):
    weights: Tensor
    gradients: Tensor
    num_of_each: tuple[int, ...]

    @classmethod
    def of(cls, parameters: Sequence[Tensor]) -> "_Elements":
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            weights = [_elements_of(parameter) for parameter in parameters]
            gradients = [
                torch.zeros_like(weight) if parameter.grad is None else _elements_of(parameter.grad)
                for parameter, weight in zip(parameters, weights, strict=True)
            ]
            empty = torch.empty(0)
            return cls(torch.cat(weights or [empty]), torch.cat(gradients or [empty]), tuple(map(len, weights)))

    def is_equal(self, other: "_Elements") -> bool:
        return torch.equal(self.weights, other.weights) and torch.equal(self.gradients, other.gradients)

    def common_factor(self, before: Tensor, after: Tensor, *, rounding: float = _ROUNDING) -> float:
        """Return the number c for which every element of `after` is c times that of `before`; 0 if there is none."""
        rounding = max(rounding, _rounding_of(before))
        limit = _SMALL * max(map(abs, before.tolist()), default=0.0)
        ratios: list[list[float]] = [[] for _ in self.num_of_each]
        owners = (n for n, count in enumerate(self.num_of_each) for _ in range(count))
        for owner, element, changed in zip(owners, before.tolist(), after.tolist(), strict=True):
            if abs(element) > limit:
                ratios[owner].append(changed / element)
        if sum(map(bool, ratios)) < 2:
            return 0.0  # too few parameters have elements that are large enough
        lowest, highest = min(map(min, filter(None, ratios))), max(map(max, filter(None, ratios)))
        return lowest if highest - lowest <= rounding * abs(lowest) and math.isfinite(lowest) else 0.0


def _rounding_of(tensor: Tensor) -> float:
    return 4 * torch.finfo(tensor.dtype).eps


def _elements_of(tensor: Tensor) -> Tensor:
    values = in_memory_order(torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous()
    length = min(_NUM_ELEMENTS, values.numel())
    return values.as_strided((length,), (max(1, values.numel() // _NUM_ELEMENTS),))
