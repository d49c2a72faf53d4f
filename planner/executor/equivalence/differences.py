"""Compute differences between a stage of a pipeline and the reference, and decide which exceed rounding errors."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from planner.core.values.precision import Precision
from planner.model.reference_state import ReferenceState, dense_values, largest_magnitude

LIMIT = 1e-4
"""Larger relative differences are no rounding errors, unless the model amplifies these as much (`largest_problem`)."""

NUMBER = "the number"
"""Prefix of the names of numbers that modules hold, in messages."""

_WORST = 1e-2
"""Limit of any rounding error."""

_PIECE = 2**18
"""Numbers that are compared at a time."""

_NOISE: Mapping[Precision, float] = {"": 1e-7, "fp32": 1e-7, "bf16": 4e-3, "bf16-mixed": 4e-3, "fp16-mixed": 5e-4}
"""Relative size of a rounding error, by precision."""


@dataclass
class Differences:
    """Differences of a stage from the reference."""

    relative: dict[str, float] = field(default_factory=dict)
    """Largest relative difference of every tensor and number, by its name in messages."""
    own_values: dict[str, str] = field(default_factory=dict)
    """Digests of the tensors whose initial values differ from the reference's, by name."""
    writes_state: bool = False
    """True if forwards write into parameters, buffers or tensors in attributes."""

    def note(self, name: str, ratio: float) -> None:
        """Record the relative difference of a value; if it has several, the largest is kept."""
        self.relative[name] = max(ratio if not math.isnan(ratio) else math.inf, self.relative.get(name, 0.0))

    def compare_number(self, name: str, value: float, right: float) -> None:
        """Compare a number with the reference's; of integers, every difference counts.

        Args:
            name: Name in messages.
            value: Number of the stage.
            right: Number of the reference.
        """
        equal = value == right or (math.isnan(value) and math.isnan(right))
        least = 1.0 if isinstance(value, int) and isinstance(right, int) else 0.0
        self.note(name, 0.0 if equal else max(least, abs(value - right) / max(abs(right), 1e-30)))

    def compare_tensor(self, name: str, value: Tensor | None, right: Tensor | None, least: float = 0.0) -> None:
        """Compare a tensor with the reference's, relative to the largest number in it, at least `least`.

        None counts as zeros. If a missing gradient changes the optimizer's behavior, the comparison after the
        optimizer's step detects it.

        Args:
            name: Name in messages.
            value: Tensor of the stage.
            right: Tensor of the reference.
            least: Smallest scale.
        """
        value, right = (None if t is None else dense_values(t) for t in (value, right))
        if value is None or right is None:
            other = value if right is None else right
            self.note(name, 0.0 if other is None or not largest_magnitude(other) else math.inf)
        elif value.shape != right.shape:
            self.note(name, math.inf)
        elif torch.equal(value, right):
            self.note(name, 0.0)
        else:
            self.note(name, largest_difference(value, right) / max(largest_magnitude(right), least, 1e-30))


def compare_update(differences: Differences, name: str, value: Tensor, *, right: Tensor, before: Tensor) -> None:
    """Compare a parameter after an optimizer's step, relative to how far the reference's moved.

    Args:
        differences: Receives the difference.
        name: Name in messages.
        value: Parameter of the stage.
        right: Parameter of the reference.
        before: Parameter of the reference before the step.
    """
    if torch.equal(value, right):
        differences.note(name, 0.0)
        return
    moved = largest_difference(right, before)
    rounding = 4 * torch.finfo(right.dtype).eps * largest_magnitude(right) if right.is_floating_point() else 0.0
    difference = largest_difference(value, right)
    differences.note(name, max(0.0, difference - rounding) / max(moved, rounding, 1e-30))


def largest_problem(relative: Mapping[str, float], noise: Callable[[], Mapping[str, float]]) -> str:
    """Describe the largest difference that rounding errors, also amplified by the model, cannot explain.

    Args:
        relative: Differences by name.
        noise: Returns how far the same values change if all parameters change by a rounding error.

    Returns:
        One line; empty if rounding errors explain all differences.
    """
    large = {what: size for what, size in relative.items() if not size <= LIMIT}
    if not large:
        return ""
    may_be_noise = any(size <= _WORST or what.startswith(NUMBER) for what, size in large.items())
    usual = noise() if may_be_noise else {}
    wrong = {what: size for what, size in large.items() if not size <= _allowed(what, usual.get(what, 0.0))}
    what = max(wrong, key=wrong.__getitem__, default="")
    return what and f"{what} differs by {wrong[what]:.1e}"


def _allowed(name: str, usual: float) -> float:
    """Return the limit of a difference whose size from rounding errors is `usual`."""
    # A number that differs in every run is random.
    return 1e3 * usual if name.startswith(NUMBER) else min(_WORST, 10 * usual)


def compare_gradients(differences: Differences, gradients: Mapping[str, Tensor | None], right: ReferenceState) -> None:
    """Compare gradients by parameter name, each relative to its largest number.

    Args:
        differences: Receives the differences.
        gradients: Gradients of the stage.
        right: State of the reference.
    """
    # A gradient that is nothing but rounding errors is compared with the largest of all.
    least = 1e-5 * right.largest_gradient
    for name, gradient in gradients.items():
        differences.compare_tensor(f'the gradient of "{name}"', gradient, right.tensors.get(f"gradient:{name}"), least)


def shaking(precision: Precision, seed: int) -> Callable[[nn.Module], None]:
    """Return a function that changes every number of all parameters by a rounding error, randomly up or down."""

    def shake(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    signs = torch.randint(2, parameter.shape, generator=generator, dtype=torch.int8)
                    parameter.mul_(1 + _NOISE[precision] * (2 * signs - 1))

    return shake


def digest_of_values(tensor: Tensor) -> str:
    """Return a digest of a tensor's values."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
    return hashlib.sha256(data.numpy().data).hexdigest()


def largest_difference(value: Tensor, right: Tensor) -> float:
    """Return the largest absolute difference of two tensors of one shape; NaN equals NaN and no other number.

    It is computed piece by piece: a whole tensor of differences would take as much memory again.
    """
    most = 0.0
    pieces = zip(value.detach().reshape(-1).split(_PIECE), right.detach().reshape(-1).split(_PIECE), strict=True)
    for one, other in pieces:
        if torch.equal(one, other):
            continue
        is_exact = one.is_floating_point() or one.is_complex()
        equal = (one == other) | (torch.isnan(one) & torch.isnan(other))
        numbers = one - other if is_exact else one.double() - other.double()
        difference = largest_magnitude(numbers.masked_fill_(equal, 0.0))
        most = max(most, math.inf if math.isnan(difference) else difference)
    return most
