"""Several plans beside each other."""

from dataclasses import dataclass
from typing import Final, Literal

from planner.core.judge.difference import Difference
from planner.core.values.plan import Plan

__all__ = ["COMPARISON_SCHEMA", "ComparedPlan", "Comparison"]

COMPARISON_SCHEMA: Final = "gpipe-plan/compare/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """One of the plans."""

    path: str
    recomputed: bool
    """Whether its numbers were recomputed from its profile; else they are those it was written with."""
    fits: bool
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The plans in the order given; the first is what the others are compared with."""

    schema: Literal["gpipe-plan/compare/v1"] = COMPARISON_SCHEMA
    plans: tuple[ComparedPlan, ...]
    difference: Difference | None = None
    """Stage by stage, of two plans: from the first to the second."""
