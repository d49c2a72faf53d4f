"""Differences between a stage of a pipeline and the reference (the model in a plain training loop)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from planner.core.values.precision import Precision
from planner.model.reference_state import ReferenceState, dense_values, largest_magnitude

LIMIT = 1e-4
"""Relative differences above this limit are errors, unless the model amplifies rounding errors (see
`largest_unexplained_difference`)."""

NUMBER = "the number"
"""Prefix of the names of compared Python numbers, such as numbers in attributes of modules."""

_LATE = " in step "
"""Text between the name of a value and the number of the step in which the value differs."""

_WORST = 1e-2
"""Largest relative difference of a tensor that an amplified rounding error may cause."""

_PIECE = 2**18
"""Number of tensor elements that are compared at a time."""

_NOISE: Mapping[Precision, float] = {"": 1e-7, "fp32": 1e-7, "bf16": 4e-3, "bf16-mixed": 4e-3, "fp16-mixed": 5e-4}
"""Relative size of a rounding error, by precision."""


@dataclass
class StageDifferences:
    """Differences between a stage and the reference (the model in a plain training loop)."""

    relative: dict[str, float] = field(default_factory=dict)
    """Largest relative difference of each compared tensor or Python number, by its name in messages."""
    own_values: dict[str, str] = field(default_factory=dict)
    """Digests of the tensors whose initial values differ from the reference, by tensor name."""
    late_step: int = 0
    """Number of the step, if it is one of `ReferenceOptions.late_steps`; 0 in the first steps."""
    writes_state: bool = False
    """True if forwards write into parameters, buffers or tensors in attributes."""

    receives_gradients: bool = True
    """False if no backward reaches the stage, so that it was not recomputed."""

    def record(self, name: str, ratio: float) -> None:
        """Record `ratio`, the relative difference of the value `name`, unless a larger ratio is recorded already."""
        if self.late_step and not ratio <= LIMIT:
            name = f"{name}{_LATE}{self.late_step}"
        self.relative[name] = max(ratio if not math.isnan(ratio) else math.inf, self.relative.get(name, 0.0))

    def compare_number(self, name: str, value: float, expected: float) -> None:
        """Record the relative difference between a number of the stage and the same number of the reference.

        If two integers differ, their relative difference counts as at least 1, so that a large counter that is
        wrong by 1 is found.

        Args:
            name: Name of the number in messages.
            value: Number of the stage.
            expected: Number of the reference.
        """
        equal = value == expected or (math.isnan(value) and math.isnan(expected))
        least = 1.0 if isinstance(value, int) and isinstance(expected, int) else 0.0
        self.record(name, 0.0 if equal else max(abs(value - expected) / max(abs(expected), 1e-30), least))

    def compare_tensor(self, name: str, value: Tensor | None, expected: Tensor | None, least: float = 0.0) -> None:
        """Record the relative difference between a tensor of the stage and the same tensor of the reference.

        The largest difference at any position is divided by the largest magnitude in the reference. A missing tensor
        (None) counts as zeros.

        Args:
            name: Name of the tensor in messages.
            value: Tensor of the stage.
            expected: Tensor of the reference.
            least: Smallest divisor.
        """
        value, expected = (None if t is None else dense_values(t) for t in (value, expected))
        if value is None or expected is None:
            other = value if expected is None else expected
            self.record(name, 0.0 if other is None or not largest_magnitude(other) else math.inf)
        elif value.shape != expected.shape:
            self.record(name, math.inf)
        elif torch.equal(value, expected):
            self.record(name, 0.0)
        else:
            self.record(name, largest_difference(value, expected) / max(largest_magnitude(expected), least, 1e-30))


def compare_update(
    differences: StageDifferences, name: str, value: Tensor, *, expected: Tensor, before: Tensor
) -> None:
    """Compare a parameter after an optimizer's step, relative to the largest change of the reference's parameter.

    Args:
        differences: Record to which the difference is added.
        name: Name of the parameter in messages.
        value: Parameter of the stage.
        expected: Parameter of the reference.
        before: Parameter of the reference before the step.
    """
    if torch.equal(value, expected):
        differences.record(name, 0.0)
        return
    moved = largest_difference(expected, before)
    rounding = (
        4 * torch.finfo(expected.dtype).eps * largest_magnitude(expected) if expected.is_floating_point() else 0.0
    )
    difference = largest_difference(value, expected)
    differences.record(name, max(0.0, difference - rounding) / max(moved, rounding, 1e-30))


def largest_unexplained_difference(relative: Mapping[str, float], noise: Callable[[], Mapping[str, float]]) -> str:
    """Describe, in one line, the largest difference that is not a rounding error; empty if there is none.

    Args:
        relative: Relative differences of the compared values, by name.
        noise: Function that changes all parameters by a rounding error, and returns the relative changes of the
            compared values.
    """
    large = {what: size for what, size in relative.items() if not size <= LIMIT}
    if not large:
        return ""
    may_be_noise = any(size <= _WORST or what.startswith(NUMBER) for what, size in large.items())
    usual = noise() if may_be_noise else {}
    wrong = {
        what: size
        for what, size in large.items()
        if not size <= _largest_accepted(what, usual.get(what.partition(_LATE)[0], 0.0))
    }
    what = max(wrong, key=wrong.__getitem__, default="")
    return what and f"{what} differs by {wrong[what]:.1e}"


def _largest_accepted(name: str, usual: float) -> float:
    # A number that differs in every run is random.
    return 1e3 * usual if name.startswith(NUMBER) else min(_WORST, 10 * usual)


def compare_gradients(
    differences: StageDifferences, gradients: Mapping[str, Tensor | None], reference: ReferenceState
) -> None:
    """Compare the gradients of a stage with those of the reference, by parameter name.

    Args:
        differences: Record to which the differences are added.
        gradients: Gradients of the stage.
        reference: State of the reference.
    """
    # A gradient that consists of rounding errors only, as of a bias before a batch normalization, is compared relative
    # to the largest gradient of all. With 1e-5, a MaxViT lost cuts by the rounding errors of such a bias.
    least = 1e-4 * reference.largest_gradient
    for name, gradient in gradients.items():
        differences.compare_tensor(
            f'the gradient of "{name}"', gradient, reference.tensors.get(f"gradient:{name}"), least
        )


def rounding_perturbation(precision: Precision, seed: int) -> Callable[[nn.Module], None]:
    """Return a function that changes all parameter elements by a rounding error, randomly up or down."""

    def perturb(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    signs = torch.randint(2, parameter.shape, generator=generator, dtype=torch.int8)
                    parameter.mul_(1 + _NOISE[precision] * (2 * signs - 1))

    return perturb


def largest_difference(value: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference between two tensors of equal shape. NaN equals only NaN."""
    most = 0.0  # the tensors are compared in pieces, because a tensor of all differences would need too much memory
    pieces = zip(value.detach().reshape(-1).split(_PIECE), expected.detach().reshape(-1).split(_PIECE), strict=True)
    for one, other in pieces:
        is_exact = one.is_floating_point() or one.is_complex()
        numbers = one - other if is_exact else one.double() - other.double()
        difference = largest_magnitude(numbers)
        if not math.isfinite(difference):
            equal = (one == other) | (torch.isnan(one) & torch.isnan(other))
            difference = largest_magnitude(numbers.masked_fill_(equal, 0.0))
        most = max(most, math.inf if math.isnan(difference) else difference)
    return most
