"""Linear expressions in unknown times. The simulator can compute with them instead of numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class LinearExpression:
    """Linear expression: a constant, plus unknowns times factors."""

    factors: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Factors by the index of the unknown."""
    constant: float = 0.0

    def __bool__(self) -> bool:
        """Return True if the expression is not 0."""
        return bool(self.factors) or self.constant != 0

    def __add__(self, other: "LinearExpression | float") -> "LinearExpression":
        """Return the sum of the expression and `other`."""
        if not isinstance(other, LinearExpression):
            return LinearExpression(self.factors, self.constant + other)
        factors = dict(self.factors)
        for unknown, factor in other.factors.items():
            factors[unknown] = factors.get(unknown, 0.0) + factor
        return LinearExpression(factors, self.constant + other.constant)

    def __sub__(self, other: "LinearExpression") -> "LinearExpression":
        """Return the difference of the expression and `other`."""
        return self + other.scaled_by(-1.0)

    def scaled_by(self, factor: float) -> "LinearExpression":
        """Return the product of the expression and a number."""
        return LinearExpression(
            {unknown: factor * value for unknown, value in self.factors.items()}, factor * self.constant
        )
